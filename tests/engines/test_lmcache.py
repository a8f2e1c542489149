"""LMCache: its storage backends by themselves, and its server between vLLM and the files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.engines.caches import PlainCache
from tests.engines.running import Engines, free_port
from tests.engines.vllm_engine import BLOCK, BLOCKS, Output, Vllm, prompts

#: Chunks of 4 MiB that a backend stores.
CHUNKS = 8
#: Tokens of a chunk of the server: two of vLLM's blocks.
CHUNK_TOKENS = 2 * BLOCK


def run_backend(engines: Engines, backend: str, cache: PlainCache, *steps: str) -> dict[str, Any]:
    return engines.run_program("vllm", "lmcache_backends.py", backend, cache.path, str(CHUNKS), *steps)


def test_fs_backend_finds_its_chunks_in_a_new_process(
    engines: Engines, cache_in_both_modes: PlainCache
) -> None:
    cache = cache_in_both_modes
    run_backend(engines, "fs", cache, "store")
    cache.assert_pages("*.data", CHUNKS)
    hits = cache.hits()
    answer = run_backend(engines, "fs", cache, "load")
    assert (answer["found"], answer["equal"]) == (CHUNKS, CHUNKS)
    assert hits is None or (cache.hits() or 0) > hits


def test_local_disk_backend_reads_back_what_it_wrote(
    engines: Engines, cache_in_both_modes: PlainCache
) -> None:
    """Its index lives in memory: only the process that wrote can read."""
    cache = cache_in_both_modes
    answer = run_backend(engines, "local_disk", cache, "store", "load")
    assert (answer["found"], answer["equal"]) == (CHUNKS, CHUNKS)
    cache.assert_pages("*.pt", CHUNKS)
    assert {path.stat().st_size for path in cache.files("*.pt")} == {answer["bytes"]}


@contextlib.contextmanager
def lmcache_server(engines: Engines, directory: Path) -> Iterator[dict[str, Any]]:
    """A new LMCache server with an ``fs`` store; yields what vLLM needs to use it."""
    port, http_port = free_port(), free_port()
    store = {"type": "fs", "base_path": str(directory)}
    command = (
        *(engines.directory / "vllm" / "bin" / "python", "-m", "lmcache.cli.main", "server"),
        *(
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--http-host",
            "127.0.0.1",
            "--http-port",
            str(http_port),
        ),
        *("--chunk-size", str(CHUNK_TOKENS), "--supported-transfer-mode", "engine_driven"),
        *("--l1-size-gb", "0.2", "--eviction-policy", "LRU", "--disable-observability"),
        *("--l2-adapter", json.dumps(store)),
    )
    with engines.server(f"http://127.0.0.1:{http_port}/healthcheck", *command):
        yield {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
        }


def test_vllm_hits_through_a_new_lmcache_server(
    engines: Engines, vllm: Vllm, cache: PlainCache, uncached: list[Output]
) -> None:
    chunks = BLOCK * BLOCKS // CHUNK_TOKENS * len(prompts())
    # vLLM's kernel overrides trip over what LMCache imports when both share one process.
    arguments: dict[str, Any] = {"distributed_executor_backend": "mp"}
    with lmcache_server(engines, cache.path) as connector:
        cold = vllm.generate(
            connector,
            await_files={"directory": str(cache.path), "suffix": ".data", "count": chunks},
            **arguments,
        )
    assert [output.tokens for output in cold] == [output.tokens for output in uncached]
    cache.assert_pages("*.data", chunks)

    hits = cache.hits()
    with lmcache_server(engines, cache.path) as connector:
        warm = vllm.generate(connector, **arguments)
    assert [output.tokens for output in warm] == [output.tokens for output in uncached]
    assert [output.cached_tokens for output in warm] == [BLOCK * BLOCKS] * 2
    assert hits is None or (cache.hits() or 0) > hits
