"""Time to first token of vLLM with its stock ``fs`` tier on the mount, against the same on a raw tmpfs.

    python -m benches.ttft              # a table on the terminal
    python -m benches.ttft --rounds 5   # more processes on each side

Needs root and the parts ``vllm`` and ``medium`` of ``tests/engines/prepare``: 303 million random parameters,
48 KiB of KV a token, or 96 KiB where the CPU is faster with float32. Each side is filled by an engine of its
own that computes the prompt; then new processes on either side in turn answer it, each several times: before
each answer the engine forgets all that it keeps in its own memory, so that every block comes from the
filesystem. Exit code 1 when the median on the mount is more than 1.15 times that on the tmpfs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from pathlib import Path
from typing import Any

from benches.measure import Row, print_table, time_text
from tests.engines.caches import PlainCache, open_cache
from tests.engines.running import Engines
from tests.mounted.running import scratch_directory

BOUND = 1.15
BLOCK_TOKENS = 32
PROMPT_TOKENS = 4096
#: How often a new process answers.
ANSWERS = 8
#: A short prompt comes first and is not measured: what an engine does but once has nothing to do with files.
WAKING_TOKENS = 64
BLOCKS = (WAKING_TOKENS + PROMPT_TOKENS) // BLOCK_TOKENS
POOL_BYTES = 3 << 30
CPU_TIER_BYTES = 1 << 30


def times_to_first_token(engines: Engines, directory: Path, answers: int, cached: int) -> list[float]:
    """Seconds of each answer of one new process; ``cached`` tokens of the prompt must come from the cache."""
    numbers = random.Random(0)
    lengths = WAKING_TOKENS, PROMPT_TOKENS
    waking, prompt = ([numbers.randrange(3, 500) for _ in range(length)] for length in lengths)
    request: dict[str, Any] = {
        "model": str(engines.models / "medium"),
        "prompts": [waking, *[prompt] * answers],
        "max_tokens": [1] * (1 + answers),
        "forget": cached > 0,
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "CpuTieringSpec",
                "spec_module_path": "cpu_tiering",
                "cpu_bytes_to_use": CPU_TIER_BYTES,
                "secondary_tiers": [
                    {"type": "fs", "root_dir": str(directory), "n_read_threads": 2, "n_write_threads": 2}
                ],
            },
        },
        "await_files": {"directory": str(directory), "suffix": ".bin", "count": BLOCKS},
        "engine": {
            "dtype": "fastest",
            "max_model_len": PROMPT_TOKENS + 1024,
            "max_num_batched_tokens": PROMPT_TOKENS + 1024,
        },
    }
    answer = engines.run_program("vllm", "vllm_generate.py", request=request)
    measured = answer["outputs"][1:]
    for output in measured:
        if output["cached_tokens"] != cached:
            raise RuntimeError(f"{output['cached_tokens']} tokens came from the cache, not {cached}")
    return [output["seconds"] for output in measured]


def compare(engines: Engines, mount: PlainCache, raw: PlainCache, rounds: int) -> list[Row]:
    """Measure both sides in turn; tells on stderr where it is."""
    sides = {"raw tmpfs": raw, "mount": mount}
    computed: dict[str, list[float]] = {}
    loaded: dict[str, list[float]] = {name: [] for name in sides}
    for name, cache in sides.items():
        tell(f"a prompt of {PROMPT_TOKENS:,} tokens is computed on the {name}")
        computed[name] = times_to_first_token(engines, cache.path, 1, cached=0)
    mount.assert_pages("*.bin", BLOCKS)
    for number in range(rounds):
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        for name in order:
            tell(f"round {number + 1} of {rounds}: a new process on the {name}")
            loaded[name] += times_to_first_token(engines, sides[name].path, ANSWERS, cached=PROMPT_TOKENS)
            tell("  " + ", ".join(map(time_text, loaded[name][-ANSWERS:])))
    mounted, plain = (statistics.median(loaded[name]) for name in ("mount", "raw tmpfs"))
    reference = f"raw tmpfs {time_text(plain)}"
    recomputed = statistics.median(computed["mount"])
    what = f"time to first token, {PROMPT_TOKENS:,} tokens in the cache"
    return [
        Row(what, time_text(mounted), reference, mounted / plain, BOUND, better="lower"),
        Row(what, time_text(mounted), f"computed {time_text(recomputed)}", recomputed / mounted),
    ]


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2, help="processes on each side (default 2)")
    parser.add_argument("--markdown", action="store_true", help="print the table for a Markdown page")
    arguments = parser.parse_args()
    with scratch_directory() as scratch:
        engines = Engines(scratch)
        for name in ("raw", "kvfs"):
            (scratch / name).mkdir()
        with (
            open_cache(scratch / "raw", engines.user, plain=True, pool_bytes=POOL_BYTES) as raw,
            open_cache(scratch / "kvfs", engines.user, plain=False, pool_bytes=POOL_BYTES) as mount,
        ):
            rows = compare(engines, mount, raw, arguments.rounds)
    title = "vLLM on the CPU with its fs tier, 303 M parameters, new processes"
    print_table(title, rows, "markdown" if arguments.markdown else "table")
    sys.exit(0 if all(row.verdict != "MISS" for row in rows) else 1)


if __name__ == "__main__":
    main()
