"""Each way to move pages, and a real filesystem in a loop-mounted file."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import importlib.util
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.copies.copier import Copier
from kvfs.copies.cufile import CufileCopier
from kvfs.copies.direct import DirectCopier
from kvfs.copies.uring import UringCopier
from tests.copies.cuda_stub import build_stub
from tests.tiers.ssds import mounted_disk

COPIERS: dict[str, tuple[Callable[[], Copier], str]] = {
    "direct": (DirectCopier, ""),
    "uring": (UringCopier, "liburing"),
    "cufile": (CufileCopier, "kvikio"),
}


@pytest.fixture(scope="session")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A value of LD_LIBRARY_PATH with which KvikIO finds a CUDA driver, a stub where there is none. This
    process has loaded it already."""
    if ctypes.util.find_library("cuda") is not None:
        return os.environ.get("LD_LIBRARY_PATH", "")
    directory = tmp_path_factory.mktemp("cuda")
    ctypes.CDLL(str(build_stub(directory)))  # who asks for a library of this name later gets this one
    return str(directory)


@pytest.fixture(params=COPIERS)
def copier(request: pytest.FixtureRequest) -> Iterator[Copier]:
    make, package = COPIERS[request.param]
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; ./run test installs it")
    if package == "kvikio":
        request.getfixturevalue("cuda")
    copier = make()
    yield copier
    copier.close()


@pytest.fixture(scope="session")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An ext4 filesystem of 128 MiB; tests leave nothing in it."""
    if os.geteuid() != 0:
        pytest.skip("mounts filesystems, and so must run as root")
    with mounted_disk(tmp_path_factory.mktemp("disks") / "ext4", "ext4", 128) as directory:
        yield directory


NoDescriptors = Callable[[int], contextlib.AbstractContextManager[None]]


@pytest.fixture
def no_descriptors() -> NoDescriptors:
    """``no_descriptors(spare)``: so many files can be opened, and no more."""

    @contextlib.contextmanager
    def limit(spare: int) -> Iterator[None]:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = [os.dup(0) for _ in range(spare + 1)]
        for fd in free:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    return limit


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Fails a test that leaves descriptors open."""
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) == before
