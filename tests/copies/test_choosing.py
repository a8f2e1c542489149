"""The way that is asked for is used where it works, and else the next one, which is told."""

from __future__ import annotations

import errno
import logging
import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.copies import choosing, trial
from kvfs.copies.choosing import READ_PATHS, Copies, CopiesStatistics, choose
from kvfs.copies.copier import is_direct
from kvfs.copies.cufile import GPU_DIRECT_STORAGE
from kvfs.copies.direct import DirectCopier
from kvfs.errors import Unavailable
from kvfs.interleaved import Work, finish
from kvfs.page import Digest, digest_of
from tests.conftest import LogGuard
from tests.copies.cuda_stub import build_stub
from tests.copies.files import content_of, in_memory, on_disk

pytestmark = pytest.mark.usefixtures("descriptors")

CONTENT = os.urandom(3 << 20)


@pytest.fixture
def directory(disk: Path) -> Iterator[int]:
    fd = os.open(disk, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def works(copies: Copies, disk: Path) -> None:
    size = len(CONTENT)
    with in_memory(CONTENT) as source, on_disk(disk) as page, in_memory(bytes(size)) as target:
        assert finish(copies.write(source, page, size)) == digest_of(CONTENT)
        assert copies.read(page, target, size) == digest_of(CONTENT)
        assert content_of(target) == CONTENT


def chosen(read_path: str, directory: int, disk: Path) -> CopiesStatistics:
    """What is in use after a page went there and back."""
    copies = choose(read_path, directory)
    try:
        works(copies, disk)
        return copies.statistics()
    finally:
        copies.close()


def test_direct_needs_nothing(directory: int, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(trial, "try_in_child")
    assert chosen("direct", directory, disk) == CopiesStatistics("direct", "", False, "")


def test_uring(directory: int, disk: Path) -> None:
    pytest.importorskip("liburing")
    assert chosen("uring", directory, disk) == CopiesStatistics("uring", "", False, "")


def test_cufile(directory: int, disk: Path, cuda: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kvikio")
    monkeypatch.setenv("LD_LIBRARY_PATH", cuda)
    used = chosen("cufile", directory, disk)
    assert used == CopiesStatistics("cufile", "posix" if no_gpu_direct_storage() else "gds", False, "")


def no_gpu_direct_storage() -> bool:
    return not os.path.exists(GPU_DIRECT_STORAGE)


def test_auto_takes_what_is_installed(directory: int, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KvikIO is not even tried where it could only do what the others do."""
    monkeypatch.setattr(choosing, "GPU_DIRECT_STORAGE", "/nonexistent")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "kvikio" or None)
    assert chosen("auto", directory, disk) == CopiesStatistics("direct", "", False, "")


def test_auto_tries_kvikio_where_it_can_leave_out_the_processor(
    directory: int, disk: Path, monkeypatch: pytest.MonkeyPatch, expect_log: LogGuard
) -> None:
    expect_log("SSD: cufile cannot be used: no driver")
    tried: list[str] = []

    def try_in_child(path: str, directory: int, *, direct: bool) -> None:
        tried.append(path)
        if path == "cufile":
            raise Unavailable("no driver")

    monkeypatch.setattr(choosing, "GPU_DIRECT_STORAGE", "/")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr(trial, "try_in_child", try_in_child)
    monkeypatch.setattr(trial, "make", lambda path: DirectCopier())
    assert chosen("auto", directory, disk).reason == "cufile cannot be used: no driver"
    assert tried == ["cufile", "uring"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], None]:
    """``package(name, version, source)``: makes trials find another package of this name."""

    def make(name: str, version: str, source: str) -> None:
        place = tmp_path / "packages"
        described = place / f"{name}-{version}.dist-info"
        described.mkdir(parents=True)
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (place / f"{name}.py").write_text(textwrap.dedent(source))
        monkeypatch.setenv("PYTHONPATH", f"{place}:{os.environ.get('PYTHONPATH', '')}")

    return make


Package = Callable[[str, str, str], None]


def test_a_library_that_ends_its_process(
    directory: int, disk: Path, package: Package, expect_log: LogGuard
) -> None:
    expect_log("SSD: uring cannot be used: a trial was ended by SIGILL")
    package("liburing", "2024.9.9", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    used = chosen("uring", directory, disk)
    assert (used.path, used.degraded) == ("direct", True)
    assert used.reason == "uring cannot be used: a trial was ended by SIGILL"


def test_a_library_of_another_release(
    directory: int, disk: Path, package: Package, expect_log: LogGuard
) -> None:
    expect_log("liburing 2026.3.30 is not the one to use: pip install kvfs")
    package("liburing", "2026.3.30", "raise AssertionError('imported all the same')")
    assert chosen("uring", directory, disk).path == "direct"


def test_a_kernel_that_forbids_it(directory: int, disk: Path, package: Package, expect_log: LogGuard) -> None:
    """What a container without io_uring answers."""
    expect_log("SSD: uring cannot be used: the kernel gives no io_uring: Operation not permitted")
    package(
        "liburing",
        "2024.9.9",
        """
        import errno, os
        io_uring = object
        def io_uring_queue_init(entries, ring):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        """,
    )
    assert chosen("uring", directory, disk).path == "direct"


def test_a_driver_that_never_answers(
    directory: int, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expect_log: LogGuard
) -> None:
    """KvikIO waits for itself for ever where the driver fails to tell its version."""
    pytest.importorskip("kvikio")
    build_stub(tmp_path, knows_its_version=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setattr(trial, "SECONDS", 3)
    monkeypatch.setattr(choosing, "_is_promising", lambda path: path == "direct")
    expect_log("SSD: cufile cannot be used: a trial did not end within 3 s")
    assert chosen("cufile", directory, disk).path == "direct"


def test_no_driver_at_all(
    directory: int, disk: Path, monkeypatch: pytest.MonkeyPatch, expect_log: LogGuard
) -> None:
    if not no_gpu_direct_storage():
        pytest.skip("what KvikIO does without a driver cannot be seen where NVIDIA's is installed")
    pytest.importorskip("kvikio")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(choosing, "_is_promising", lambda path: path == "direct")
    expect_log("SSD: cufile cannot be used: .*libcuda.so.1")
    assert chosen("cufile", directory, disk).path == "direct"


def test_bytes_that_come_back_changed(directory: int) -> None:
    class Liar(DirectCopier):
        def read(self, source_fd: int, target_fd: int, size: int) -> Digest:
            digest = super().read(source_fd, target_fd, size)
            os.pwrite(target_fd, b"not what was there", 100)
            return digest

    with pytest.raises(Unavailable, match="what was read is not what was written"):
        trial.try_here(Liar(), directory, direct=True)


# While it runs


class Failing(DirectCopier):
    """Fails as it is told to."""

    name = "failing"

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self.errors = list(errors)
        self.calls = 0

    def _fail(self) -> None:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)

    def read(self, source_fd: int, target_fd: int, size: int) -> Digest:
        self._fail()
        return super().read(source_fd, target_fd, size)

    def write(self, source_fd: int, target_fd: int, size: int, *, idle: bool = False) -> Work[Digest]:
        self._fail()
        return super().write(source_fd, target_fd, size, idle=idle)


@pytest.fixture
def beginning_with(directory: int) -> Iterator[Callable[[DirectCopier], Copies]]:
    made: list[Copies] = []

    def make(copier: DirectCopier) -> Copies:
        copies = choose("direct", directory)
        copies._copiers.insert(0, copier)
        made.append(copies)
        return copies

    yield make
    for copies in made:
        copies.close()


BeginningWith = Callable[[DirectCopier], Copies]

OWN_FAULTS = [
    RuntimeError("the library is lost"),
    OSError(errno.EINVAL, "Invalid argument"),
    OSError(errno.EPERM, "Operation not permitted"),
    OSError(errno.ENOSYS, "Function not implemented"),
    Unavailable("the kernel gives no io_uring"),
]
FAULTS_OF_THE_DISK = [
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EMFILE, "Too many open files"),
    MemoryError(),
]


@pytest.mark.parametrize("error", OWN_FAULTS, ids=repr)
def test_a_way_that_fails_by_its_own_fault_is_given_up(
    beginning_with: BeginningWith, disk: Path, error: Exception, expect_log: LogGuard
) -> None:
    expect_log("SSD: failing is not used any more: ")
    failing = Failing(error)
    copies = beginning_with(failing)
    for _ in range(3):
        works(copies, disk)
    assert failing.calls == 1
    used = copies.statistics()
    assert (used.path, used.degraded) == ("direct", True)
    assert str(error) in used.reason


@pytest.mark.parametrize("error", FAULTS_OF_THE_DISK, ids=repr)
def test_a_way_is_kept_when_the_disk_fails(
    beginning_with: BeginningWith, disk: Path, error: Exception
) -> None:
    copies = beginning_with(Failing(error))
    with pytest.raises(type(error)):
        works(copies, disk)
    works(copies, disk)
    assert copies.statistics() == CopiesStatistics("failing", "", False, "")


def test_a_way_is_kept_when_the_next_one_shows_that_the_disk_failed(
    beginning_with: BeginningWith, disk: Path
) -> None:
    """A library may not tell what the kernel said."""
    copies = beginning_with(Failing(RuntimeError("something failed")))
    copies._copiers[1] = Failing(OSError(errno.EIO, "Input/output error"))
    with pytest.raises(OSError, match="Input/output error"):
        works(copies, disk)
    works(copies, disk)
    assert copies.statistics().path == "failing"


def test_a_disk_that_suddenly_refuses_to_bypass_the_cache(
    beginning_with: BeginningWith, disk: Path, monkeypatch: pytest.MonkeyPatch, expect_log: LogGuard
) -> None:
    expect_log("SSD: direct is not used any more: .*Invalid argument")
    original = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if is_direct(fd):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return original(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    copies = beginning_with(DirectCopier())
    for _ in range(2):
        works(copies, disk)
    assert copies.statistics().mode == "page cache"


def test_where_no_way_is_left_the_failure_is_raised(directory: int, disk: Path) -> None:
    copies = choose("direct", directory)
    copies._copiers = [Failing(RuntimeError("first"))]
    copies._untried = iter([Failing(RuntimeError("last"))])
    with pytest.raises(RuntimeError, match="last"):
        works(copies, disk)
    copies.close()


def test_a_line_for_each_way_that_fails(
    directory: int,
    monkeypatch: pytest.MonkeyPatch,
    expect_log: LogGuard,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expect_log("SSD: (cufile|uring) cannot be used: not here")

    def try_in_child(path: str, directory: int, *, direct: bool) -> None:
        raise Unavailable("not here")

    monkeypatch.setattr(trial, "try_in_child", try_in_child)
    copies = Copies(READ_PATHS[1:], directory)
    assert copies.statistics() == CopiesStatistics(
        "direct", "", True, "cufile cannot be used: not here; uring cannot be used: not here"
    )
    copies.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
