"""One life of a vLLM engine: starts it, generates for the prompts it was given, ends.

Runs in vLLM's environment. Reads a JSON object on stdin::

    {"model": DIRECTORY, "prompts": [[token, …], …], "max_tokens": [N, …],
     "kv_transfer_config": {…} | null, "engine": {argument of LLM: value, …}, "forget": true | false,
     "await_files": {"directory": DIRECTORY, "suffix": ".bin", "count": N} | null}

and writes, as its last line on stdout, ``{"outputs": [{"tokens": […], "cached_tokens": N,
"prompt_tokens": N, "seconds": S}, …]}``. ``seconds`` is the time of the whole call; with one output token,
the time to first token.

- ``await_files``: stay until the files are there, for connectors that write behind the engine's back.
- ``forget``: before each prompt, forget what the engine keeps in its own memory; the files stay.
- The engine's ``dtype`` may be ``fastest``: the one that this CPU computes fastest.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: How long written files may take to appear.
AWAIT_SECONDS = 60.0


def await_files(directory: str, suffix: str, count: int, nudge: Callable[[], object]) -> None:
    """Nudge the engine until the files are there: it writes its last blocks while it works on others."""
    deadline = time.monotonic() + AWAIT_SECONDS
    while (found := sum(1 for _ in Path(directory).rglob(f"*{suffix}"))) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{found} of {count} files *{suffix} below {directory} after {AWAIT_SECONDS} s"
            )
        nudge()
        time.sleep(0.05)


def fastest_dtype() -> str:
    """Without instructions for bfloat16, a CPU is several times slower with it than with float32."""
    flags = Path("/proc/cpuinfo").read_text().split()
    return "bfloat16" if {"avx512_bf16", "amx_bf16"}.intersection(flags) else "float32"


def generate(request: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.inputs import TokensPrompt

    arguments: dict[str, Any] = {
        "model": request["model"],
        "enforce_eager": True,
        "max_num_seqs": 2,
        "block_size": 32,
        "seed": 0,
        # One process instead of three: an engine starts in a third of the time.
        "distributed_executor_backend": "uni",
    }
    arguments.update(request["engine"])
    if arguments.get("dtype") == "fastest":
        arguments["dtype"] = fastest_dtype()
    if request.get("kv_transfer_config"):
        arguments["kv_transfer_config"] = KVTransferConfig(**request["kv_transfer_config"])
    engine = LLM(**arguments)
    outputs = []
    for tokens, count in zip(request["prompts"], request["max_tokens"], strict=True):
        if request.get("forget"):
            engine.reset_prefix_cache(reset_connector=True)
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        started = time.perf_counter()
        result = engine.generate([TokensPrompt(prompt_token_ids=tokens)], sampling, use_tqdm=False)[0]
        outputs.append(
            {
                "tokens": list(result.outputs[0].token_ids),
                "cached_tokens": result.num_cached_tokens,
                "prompt_tokens": len(result.prompt_token_ids),
                "seconds": time.perf_counter() - started,
            }
        )
    if awaited := request.get("await_files"):
        few = TokensPrompt(prompt_token_ids=[3, 4, 5])
        await_files(
            **awaited, nudge=lambda: engine.generate([few], SamplingParams(max_tokens=4), use_tqdm=False)
        )
    return outputs


def main() -> None:
    request = json.load(sys.stdin)
    outputs = generate(request)
    print(json.dumps({"outputs": outputs}), flush=True)


if __name__ == "__main__":
    main()
