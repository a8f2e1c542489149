"""One life of a vLLM engine after the other, for two prompts that only differ at their beginning."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines.running import Engines

#: Tokens of a block, the unit in which vLLM keeps KV.
BLOCK = 32
#: Whole blocks of a prompt. The tokens after them are computed in any case.
BLOCKS = 20
#: Layers of the ``tiny`` model.
LAYERS = 4
#: Tokens to generate.
NEW_TOKENS = 12


def prompts() -> list[list[int]]:
    """Two prompts; they end with the same ten blocks, and a few tokens that fill no block."""
    numbers = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [numbers.randrange(3, 500) for _ in range(count)]

    end = tokens(BLOCK * BLOCKS // 2 + 10)
    return [tokens(BLOCK * BLOCKS // 2) + end for _ in range(2)]


@dataclass(frozen=True, slots=True)
class Output:
    """What the engine generated for one prompt, and how much of the prompt it did not have to compute."""

    tokens: list[int]
    cached_tokens: int
    prompt_tokens: int
    #: The whole call, in seconds.
    seconds: float


def fs_tier(directory: Path) -> dict[str, Any]:
    """vLLM's stock ``fs`` tier below our offloading spec for CPUs."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "cpu_tiering",
            "cpu_bytes_to_use": 64 << 20,
            "secondary_tiers": [
                {"type": "fs", "root_dir": str(directory), "n_read_threads": 2, "n_write_threads": 2}
            ],
        },
    }


def example_connector(directory: Path) -> dict[str, Any]:
    """vLLM's example of a connector: one safetensors file a layer and prompt."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(directory)},
    }


class Vllm:
    """Each call of ``generate`` is a new process."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    def generate(
        self,
        kv_transfer_config: dict[str, Any] | None,
        *,
        await_files: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> list[Output]:
        """The outputs for ``prompts()``; ``arguments`` go to vLLM's ``LLM``.

        ``await_files`` (directory, suffix, count): the process stays until that many files are there.
        """
        request = {
            "model": str(self._engines.models / "tiny"),
            "prompts": prompts(),
            "max_tokens": [NEW_TOKENS] * len(prompts()),
            "kv_transfer_config": kv_transfer_config,
            "await_files": await_files,
            "engine": {"dtype": "float32", "max_model_len": 2048, **arguments},
        }
        answer = self._engines.run_program("vllm", "vllm_generate.py", request=request)
        return [Output(**output) for output in answer["outputs"]]
