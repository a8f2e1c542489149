"""llama.cpp's server, whose slots can be saved to files and restored from them."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.engines.running import Engines, free_port

#: Seconds that one request may take.
REQUEST_SECONDS = 120.0


class LlamaServer:
    """A running server with one slot."""

    def __init__(self, url: str) -> None:
        self._url = url

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self._url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:
            answer: dict[str, Any] = json.load(response)
            return answer

    def complete(self, tokens: list[int], count: int) -> tuple[list[int], int]:
        """The ``count`` likeliest next tokens, and how many tokens of the prompt had to be computed."""
        answer = self._post(
            "/completion",
            {
                "prompt": tokens,
                "n_predict": count,
                "temperature": 0,
                "cache_prompt": True,
                "id_slot": 0,
                "return_tokens": True,
                "ignore_eos": True,
            },
        )
        return answer["tokens"], answer["timings"]["prompt_n"]

    def save(self, name: str) -> int:
        """Save the slot to a file of that name; the number of tokens saved."""
        return int(self._post("/slots/0?action=save", {"filename": name})["n_saved"])

    def restore(self, name: str) -> int:
        """Restore the slot from that file; the number of tokens restored."""
        return int(self._post("/slots/0?action=restore", {"filename": name})["n_restored"])


@contextlib.contextmanager
def llama_server(engines: Engines, slots: Path) -> Iterator[LlamaServer]:
    """A new server process that saves and restores slots in the directory ``slots``."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = (
        *(engines.directory / "llama" / "llama-server", "--model", engines.models / "tiny.gguf"),
        *("--slot-save-path", slots, "--host", "127.0.0.1", "--port", str(port)),
        *("--parallel", "1", "--ctx-size", "4096", "--threads", "2", "--no-warmup", "--log-verbosity", "1"),
    )
    with engines.server(f"{url}/health", *command):
        yield LlamaServer(url)
