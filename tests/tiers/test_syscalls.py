from __future__ import annotations

import ctypes
import errno
import os
import signal
import threading
from pathlib import Path

import pytest

from kvfs import syscalls
from tests.tiers.conftest import mounted_tmpfs, needs_root, open_root

HUGEPAGE = 2 << 20


@pytest.mark.parametrize(
    ("path", "number"),
    [
        (b"link/file", errno.ELOOP),
        (b"link", errno.ELOOP),
        (b"../x", errno.EXDEV),
        (b"/etc/passwd", errno.EXDEV),
        (b"directory/../../x", errno.EXDEV),
        (b"missing", errno.ENOENT),
        (b"directory/" + b"n" * 256, errno.ENAMETOOLONG),
    ],
)
def test_openat2_stays_below(tmp_path: Path, path: bytes, number: int) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to("/etc")
    root = open_root(tmp_path)
    with pytest.raises(OSError, match=os.strerror(number)) as failure:
        syscalls.openat2(root, path, os.O_RDONLY)
    assert failure.value.errno == number
    assert failure.value.filename == path
    os.close(root)


def test_openat2_creates_and_closes_on_exec(tmp_path: Path) -> None:
    root = open_root(tmp_path)
    fd = syscalls.openat2(root, b"file", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o640)
    assert not os.get_inheritable(fd)
    assert os.fstat(fd).st_mode & 0o777 == 0o640
    os.close(fd)
    os.close(root)


def test_renameat2_exchanges_and_refuses_to_replace(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    root = open_root(tmp_path)
    syscalls.renameat2(root, b"a", root, b"b", syscalls.RENAME_EXCHANGE)
    assert (tmp_path / "a").read_text() == "b"
    with pytest.raises(FileExistsError):
        syscalls.renameat2(root, b"a", root, b"b", syscalls.RENAME_NOREPLACE)
    os.close(root)


def test_fallocate_beyond_four_gigabytes(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb+") as file:
        offset = 5 << 30
        syscalls.fallocate(file.fileno(), 0, offset, 4096)
        assert os.fstat(file.fileno()).st_size == offset + 4096
        punch = syscalls.FALLOC_FL_PUNCH_HOLE | syscalls.FALLOC_FL_KEEP_SIZE
        syscalls.fallocate(file.fileno(), punch, offset, 4096)
        assert os.fstat(file.fileno()).st_blocks == 0


@needs_root
def test_fallocate_of_too_much_says_so(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "t", "size=1m") as directory, (directory / "file").open("wb+") as file:
        with pytest.raises(OSError, match="No space"):
            syscalls.fallocate(file.fileno(), 0, 0, 2 << 20)
        assert os.fstat(file.fileno()).st_size == 0


@needs_root
def test_mount_and_umount(tmp_path: Path) -> None:
    syscalls.mount("source", tmp_path, "tmpfs", syscalls.MS_NOEXEC, "size=1m")
    fd = open_root(tmp_path)
    with pytest.raises(OSError, match="busy"):
        syscalls.umount2(tmp_path)
    syscalls.umount2(tmp_path, syscalls.MNT_DETACH)
    os.close(fd)
    with pytest.raises(OSError, match="Invalid argument") as failure:
        syscalls.umount2(tmp_path)
    assert failure.value.filename == str(tmp_path)


@needs_root
def test_a_filesystem_is_made_without_mounting_anything() -> None:
    before = Path("/proc/self/mountinfo").read_text(), len(os.listdir("/proc/self/fd"))
    os.close(syscalls.make_filesystem("tmpfs", {"size": "1m", "noswap": None}))
    for name, value in (("no-such-option", None), ("size", "many"), ("huge", "sometimes")):
        with pytest.raises(OSError, match=r"\[Errno 22\]"):
            syscalls.make_filesystem("tmpfs", {"size": "1m", name: value})
    with pytest.raises(OSError, match="No such device"):
        syscalls.make_filesystem("no-such-filesystem", {})
    assert (Path("/proc/self/mountinfo").read_text(), len(os.listdir("/proc/self/fd"))) == before


@needs_root
def test_collapse_leaves_the_bytes_and_no_mapping(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "t", "size=64m,huge=within_size") as directory:
        content = os.urandom(3 * HUGEPAGE + 12345)
        file = directory / "file"
        with file.open("wb") as writing:
            for start in range(0, len(content), 4096):
                writing.write(content[start : start + 4096])
        mappings = len(Path("/proc/self/maps").read_text().splitlines())
        fd = os.open(file, os.O_RDONLY)
        syscalls.collapse(fd, 3 * HUGEPAGE)
        os.close(fd)
        assert abs(len(Path("/proc/self/maps").read_text().splitlines()) - mappings) <= 1
        assert file.read_bytes() == content


def test_a_call_that_a_signal_interrupts_goes_on() -> None:
    calls = []

    def call(value: int) -> int:
        calls.append(value)
        if len(calls) < 3:
            ctypes.set_errno(errno.EINTR)
            return -1
        return 7

    assert syscalls._uninterrupted(call, 1) == 7
    assert calls == [1, 1, 1]


def test_a_signal_handler_can_still_end_a_call_that_is_interrupted() -> None:
    class Stop(Exception):
        pass

    def stop(number: int, frame: object) -> None:
        raise Stop

    def call() -> int:
        os.kill(os.getpid(), signal.SIGUSR1)
        ctypes.set_errno(errno.EINTR)
        return -1

    assert threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(Stop):
            syscalls._uninterrupted(call)
    finally:
        signal.signal(signal.SIGUSR1, previous)
