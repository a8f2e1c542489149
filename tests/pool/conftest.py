"""A pool in process on a real tmpfs, without a mount. Test functions may be asynchronous: trio runs them."""

from __future__ import annotations

import inspect
import os
import signal
import stat
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio

from kvfs import mounts, opening, syscalls
from kvfs.opening import Openings
from kvfs.page import Owner
from kvfs.pool import Pool
from kvfs.sealing import ignore_lease_breaks
from kvfs.tiers.dram import DramTier
from tests.pool.checks import check_pool
from tests.pool.faces import KernelFace
from tests.pool.files import MIB
from tests.pool.readers import HandleOfThePool, Mapping, NativeHandle, Reader

ROOT_OWNER = Owner(stat.S_IFDIR | 0o770, 1000, 1000)
TEST_SECONDS = 30
POOL_BYTES = 64 * MIB


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    function = pyfuncitem.obj
    if not inspect.iscoroutinefunction(function):
        return None
    names = inspect.signature(function).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    pool = pyfuncitem.funcargs.get("pool")
    assert pool is None or isinstance(pool, Pool)
    failure = trio.run(_run, function, arguments, pool)
    if failure is not None:
        raise failure
    return True


async def _run(
    function: Callable[..., Awaitable[None]], arguments: dict[str, object], pool: Pool | None
) -> Exception | None:
    """The test's own failure; that of a task in the background ends it and is raised."""
    failure: Exception | None = None
    with trio.fail_after(TEST_SECONDS):
        async with trio.open_nursery() as nursery:
            if pool is not None:
                pool.start(nursery)
            try:
                await function(**arguments)
            except Exception as error:
                failure = error
            nursery.cancel_scope.cancel()
    return failure


@pytest.fixture(autouse=True)
def _root_and_lease_breaks() -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("mounts a tmpfs, and so must run as root")
    before = signal.getsignal(signal.SIGIO)
    ignore_lease_breaks()
    yield
    signal.signal(signal.SIGIO, before)


@pytest.fixture
def open_files() -> Iterator[None]:
    """Nothing is left open at the end."""
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Where a tier may be mounted; nothing is left there at the end."""
    directory = tmp_path / "dram"
    yield directory
    left = mounts.find(directory)
    while mounts.find(directory):
        syscalls.umount2(directory, syscalls.MNT_DETACH)
    assert left == []


@pytest.fixture
def tier(open_files: None, place: Path, request: pytest.FixtureRequest) -> Iterator[DramTier]:
    """A private tmpfs of 64 MiB, or of what the test gives as an indirect parameter."""
    tier = DramTier.attach(place, getattr(request, "param", POOL_BYTES), "prefer", "")
    yield tier
    tier.close(keep=False)


@pytest.fixture
def face() -> KernelFace:
    return KernelFace()


@pytest.fixture
def pool(tier: DramTier, face: KernelFace) -> Iterator[Pool]:
    """A pool that runs while the test does, and that must be in order at the end."""
    pool = Pool(tier, ROOT_OWNER)
    pool.attach_face(face)
    yield pool
    try:
        check_pool(pool, face)
    finally:
        pool.close()
        face.end()


@pytest.fixture
def openings(pool: Pool) -> Openings:
    return Openings(pool)


@pytest.fixture
def short_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft in a page's place does not wait long for its writer."""
    monkeypatch.setattr(opening, "RETRY_SECONDS", 0.1)


@pytest.fixture
def open_descriptors(pool: Pool) -> Callable[[], int]:
    """How many descriptors are open; the directories of the tier are open already."""
    return lambda: len(os.listdir("/proc/self/fd"))


@pytest.fixture(params=[HandleOfThePool, NativeHandle, Mapping])
def kind_of_reader(request: pytest.FixtureRequest) -> type[Reader]:
    kind: type[Reader] = request.param
    return kind
