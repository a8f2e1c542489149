"""The engines and the directories that they cache in.

With KVFS_ENGINES_CACHE=tmpfs the same tests run on a plain tmpfs: what fails there is not a fault of kvfs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.engines.caches import PlainCache, open_cache
from tests.engines.running import Engines
from tests.engines.vllm_engine import Output, Vllm
from tests.mounted.running import scratch_directory

SHARED_MEMORY = Path("/dev/shm")
OpenCache = Callable[..., PlainCache]


def pytest_runtest_setup() -> None:
    if os.geteuid() != 0:
        pytest.fail("the engines' tests mount and change user: run them with sudo", pytrace=False)


@pytest.fixture(scope="session")
def scratch() -> Iterator[Path]:
    with scratch_directory() as directory:
        yield directory


@pytest.fixture(scope="session")
def engines(scratch: Path) -> Iterator[Engines]:
    before = set(SHARED_MEMORY.iterdir())
    engines = Engines(scratch)
    yield engines
    for left in set(SHARED_MEMORY.glob("vllm_offload_*")) - before:  # by a vLLM that was killed
        if left.stat().st_uid == engines.user.uid:
            left.unlink()


@pytest.fixture
def make_cache(scratch: Path, engines: Engines, request: pytest.FixtureRequest) -> Iterator[OpenCache]:
    """Opens a cache directory; takes the environment of the mount."""
    plain = os.environ.get("KVFS_ENGINES_CACHE") == "tmpfs"
    directory = scratch / f"cache-{abs(hash(request.node.nodeid)):x}"
    directory.mkdir()
    with ExitStack() as stack:

        def make(environment: dict[str, str] | None = None) -> PlainCache:
            opened = open_cache(directory, engines.user, plain=plain, environment=environment)
            return stack.enter_context(opened)

        yield make


@pytest.fixture
def cache(make_cache: OpenCache) -> PlainCache:
    return make_cache()


@pytest.fixture(params=["passthrough", "daemon-io"])
def cache_in_both_modes(request: pytest.FixtureRequest, make_cache: OpenCache) -> PlainCache:
    """Bytes moved by the kernel, and bytes moved by the daemon: for engines that start in seconds."""
    return make_cache({"KVFS_PASSTHROUGH": "off"} if request.param == "daemon-io" else None)


@pytest.fixture(scope="session")
def vllm(engines: Engines) -> Vllm:
    return Vllm(engines)


@pytest.fixture(scope="session")
def uncached(vllm: Vllm) -> list[Output]:
    """What vLLM says without any connector."""
    outputs = vllm.generate(None)
    assert [output.cached_tokens for output in outputs] == [0, 0]
    # Both prompts end alike: an engine that lost or mixed up what came before would answer both the same.
    assert outputs[0].tokens != outputs[1].tokens
    return outputs
