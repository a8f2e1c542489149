"""The demo's engine: vLLM on the CPU, with its own ``fs`` tier pointed at a directory.

``python vllm_cache.py cold|warm DIRECTORY ANSWER MODEL``: both runs are the same, but for what they find
below DIRECTORY. The cold one writes its answer to the file ANSWER, the warm one compares. The programs of the
engines' tests must be on PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from telling import mebibytes, say, seconds, summarize, working
from vllm_generate import generate

PROMPT_TOKENS = 4096
BLOCK_TOKENS = 32
NEW_TOKENS = 16


def request(directory: Path, model: str) -> dict[str, Any]:
    """A short prompt that wakes the engine up, the long one for a token, the same for its answer."""
    numbers = random.Random(0)
    lengths = (BLOCK_TOKENS * 2, PROMPT_TOKENS)
    waking, prompt = ([numbers.randrange(3, 500) for _ in range(length)] for length in lengths)
    return {
        "model": model,
        "prompts": [waking, prompt, prompt],
        "max_tokens": [1, 1, NEW_TOKENS],
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "CpuTieringSpec",
                "spec_module_path": "cpu_tiering",
                "cpu_bytes_to_use": 1 << 30,
                "secondary_tiers": [
                    {"type": "fs", "root_dir": str(directory), "n_read_threads": 2, "n_write_threads": 2}
                ],
            },
        },
        "await_files": {
            "directory": str(directory),
            "suffix": ".bin",
            "count": sum(length // BLOCK_TOKENS for length in lengths),
        },
        "engine": {
            "dtype": "fastest",
            "max_model_len": PROMPT_TOKENS + 1024,
            "max_num_batched_tokens": PROMPT_TOKENS + 1024,
        },
    }


def main() -> None:
    phase, directory, answer_file, model = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    say(f"process {os.getpid()}: vLLM with a Llama of 303 million parameters, whose values are random")
    say(f"a prompt of {PROMPT_TOKENS:,} random tokens: what counts is the time, the answer makes no sense")
    with working("the engine starts, and answers"):
        _, first, answer = generate(request(directory, model))
    say(f"time to first token: {seconds(first['seconds'])}, {first['cached_tokens']:,} tokens from the cache")
    pages = list(directory.rglob("*.bin"))
    say(f"{len(pages)} pages on the mount, {mebibytes(sum(page.stat().st_size for page in pages))}")
    say(f"answer: {' '.join(map(str, answer['tokens']))}")
    if phase == "cold":
        answer_file.write_text(json.dumps({"tokens": answer["tokens"], "seconds": first["seconds"]}))
        return
    cold = json.loads(answer_file.read_text())
    if answer["tokens"] != cold["tokens"]:
        sys.exit("demo: the answers differ: that must not happen, please report it")
    say("the same answer as before")
    summarize(answer_file, cold["seconds"], first["seconds"], NEW_TOKENS)


if __name__ == "__main__":
    main()
