"""The demo's engine: vLLM on the CPU, with its own ``fs`` tier pointed at a directory.

``python vllm_cache.py cold|warm DIRECTORY ANSWER MODEL``: both runs are the same, but for what they find below
DIRECTORY. The cold one writes its answer to the file ANSWER, the warm one compares. The programs of the engines'
tests must be on PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from telling import mebibytes, say, seconds, working
from vllm_generate import generate

PROMPT_TOKENS = 4096
BLOCK_TOKENS = 32


def request(directory: Path, model: str) -> dict[str, Any]:
    """A short prompt that wakes the engine up, then the long one; one token is to be generated for each."""
    numbers = random.Random(0)
    lengths = (BLOCK_TOKENS * 2, PROMPT_TOKENS)
    return {
        "model": model,
        "prompts": [[numbers.randrange(3, 500) for _ in range(length)] for length in lengths],
        "max_tokens": 1,
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "CpuTieringSpec",
                "spec_module_path": "cpu_tiering",
                "cpu_bytes_to_use": 512 << 20,
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
        "engine": {"max_model_len": PROMPT_TOKENS + 1024, "max_num_batched_tokens": PROMPT_TOKENS + 1024},
    }


def main() -> None:
    phase, directory, answer_file, model = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    say(f"process {os.getpid()}: vLLM, 303 million parameters, a prompt of {PROMPT_TOKENS:,} tokens")
    with working("the engine starts and answers (a minute)" if phase == "cold" else "the engine starts and answers"):
        output = generate(request(directory, model))[-1]
    say(f"time to first token: {seconds(output['seconds'])}; {output['cached_tokens']:,} tokens came from the cache")
    pages = list(directory.rglob("*.bin"))
    say(f"{len(pages)} pages on the mount, {mebibytes(sum(page.stat().st_size for page in pages))}")
    if phase == "cold":
        answer_file.write_text(json.dumps(output))
        return
    cold = json.loads(answer_file.read_text())
    if output["tokens"] != cold["tokens"]:
        sys.exit("demo: the answers differ: that must not happen, please report it")
    say(f"the same answer as before, first token {cold['seconds'] / output['seconds']:,.0f} times sooner")


if __name__ == "__main__":
    main()
