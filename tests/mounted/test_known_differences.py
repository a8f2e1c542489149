"""What differs from a plain tmpfs by design: one test for each row of docs/semantics.md that says so."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mounted import libc
from tests.mounted.operations import pattern
from tests.mounted.running import MIB, KvfsMount, digest, wait_sealed, wait_until

DATA = pattern(3, 100_000)


def refused(number: int, call: Callable[[], object]) -> None:
    """The call fails with this errno."""
    with pytest.raises(OSError) as caught:  # noqa: PT011
        call()
    assert caught.value.errno == number, caught.value


def sealed_page(path: Path) -> Path:
    path.write_bytes(DATA)
    wait_sealed(path)
    return path


def test_a_file_with_holes_that_was_not_given_its_size_is_dropped(mount: KvfsMount, directory: Path) -> None:
    path = directory / "torn"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    os.pwrite(descriptor, DATA, 0)
    os.pwrite(descriptor, DATA, MIB)
    os.close(descriptor)
    wait_until(lambda: not path.exists(), 10, "the file with holes has been dropped")


@pytest.mark.parametrize("how", ["ftruncate", "truncate", "fallocate"])
def test_a_file_that_was_given_its_size_may_have_parts_never_written(directory: Path, how: str) -> None:
    path = directory / "sparse"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    if how == "ftruncate":
        os.ftruncate(descriptor, 2 * MIB)
    elif how == "truncate":
        os.truncate(path, 2 * MIB)
    else:
        libc.fallocate(descriptor, 0, 0, 2 * MIB)
    os.pwrite(descriptor, DATA, MIB)
    os.close(descriptor)
    wait_sealed(path)
    assert path.read_bytes() == (bytes(MIB) + DATA).ljust(2 * MIB, b"\0")


def test_growth_above_half_of_the_pool_is_too_large(mount: KvfsMount, directory: Path) -> None:
    path = directory / "large"
    path.touch()
    size = mount.pool_bytes // 2 + 4096
    with open(path, "r+b") as file:
        refused(errno.EFBIG, lambda: file.truncate(size))
        refused(errno.EFBIG, lambda: os.truncate(path, size))
        refused(errno.EFBIG, lambda: libc.fallocate(file.fileno(), 0, 0, size))
    assert path.stat().st_size == 0


def test_growth_allocates(mount: KvfsMount, directory: Path) -> None:
    path = directory / "grown"
    before = mount.used_bytes()
    with open(path, "wb") as file:
        file.truncate(16 * MIB)
        assert os.stat(path).st_blocks * 512 >= 16 * MIB
        assert mount.used_bytes() - before >= 16 * MIB


def test_growth_beyond_the_room_is_refused_at_once(mount: KvfsMount, directory: Path) -> None:
    """Not later, with SIGBUS, when the memory is touched. Files that are open cannot make room."""
    part = mount.pool_bytes // 4
    held = []
    try:
        for number in range(3):
            held.append(os.open(directory / f"held-{number}", os.O_RDWR | os.O_CREAT, 0o644))
            os.ftruncate(held[-1], part)
        last = os.open(directory / "last", os.O_RDWR | os.O_CREAT, 0o644)
        held.append(last)
        refused(errno.ENOSPC, lambda: os.ftruncate(last, part + MIB))
        refused(errno.ENOSPC, lambda: libc.fallocate(last, 0, 0, part + MIB))
        assert os.fstat(last).st_size == 0
    finally:
        for descriptor in held:
            os.close(descriptor)
    wait_until(lambda: not (directory / "last").exists(), 10, "the draft that found no room is dropped")


def test_there_is_no_o_tmpfile(directory: Path) -> None:
    refused(errno.EOPNOTSUPP, lambda: os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600))


@pytest.mark.as_root
@pytest.mark.parametrize("name", ["trusted.a", "security.a", "system.posix_acl_access"])
def test_only_user_attributes_can_be_set(directory: Path, name: str) -> None:
    path = directory / "file"
    path.touch()
    acl = bytes.fromhex("0200000001000600ffffffff04000400ffffffff20000400ffffffff")
    refused(errno.EOPNOTSUPP, lambda: os.setxattr(path, name, acl if "acl" in name else b"value"))


def test_what_the_mount_tells_of_a_page_cannot_be_changed(directory: Path) -> None:
    """Writes are accepted and ignored, so that tools that copy attributes go on."""
    path = sealed_page(directory / "page")
    before = {name: os.getxattr(path, name) for name in os.listxattr(path)}
    for name in ("user.kvfs.digest", "user.kvfs.tier", "user.kvfs.hits", "user.kvfs.sealed"):
        assert name in before
        os.setxattr(path, name, b"forged")
        os.removexattr(path, name)
        assert os.getxattr(path, name) == before[name]


def test_a_page_opened_for_writing_under_readers_becomes_a_new_file(directory: Path) -> None:
    path = sealed_page(directory / "page")
    os.link(path, directory / "other-name")
    with open(path, "rb") as reader:
        inode = os.fstat(reader.fileno()).st_ino
        path.write_bytes(b"new bytes")
        assert reader.read() == DATA
        assert os.fstat(reader.fileno()).st_ino == inode
        assert path.stat().st_ino != inode
        assert path.read_bytes() == b"new bytes"
        assert (directory / "other-name").read_bytes() == b"new bytes"
        assert path.samefile(directory / "other-name")
    wait_sealed(path)


def test_a_page_changed_in_its_middle_under_readers_keeps_the_rest(directory: Path) -> None:
    path = sealed_page(directory / "page")
    with open(path, "rb") as reader, open(path, "r+b") as writer:
        writer.seek(50_000)
        writer.write(b"changed")
        writer.flush()
        assert path.read_bytes() == DATA[:50_000] + b"changed" + DATA[50_007:]
        assert reader.read() == DATA


def test_a_page_truncated_under_readers_leaves_them_the_whole(directory: Path) -> None:
    path = sealed_page(directory / "page")
    with open(path, "rb") as reader:
        os.truncate(path, 10)
        assert path.read_bytes() == DATA[:10]
        assert reader.read() == DATA


def test_a_page_that_nobody_reads_is_changed_in_place(directory: Path) -> None:
    path = sealed_page(directory / "page")
    inode = path.stat().st_ino
    path.write_bytes(b"new bytes")
    assert path.stat().st_ino == inode


def test_the_access_time_is_the_last_use(directory: Path) -> None:
    """It orders what is evicted first, over a restart too; it can be set, and the next use sets it again."""
    path = sealed_page(directory / "page")
    os.utime(path, ns=(10**9, 2 * 10**9))
    assert (path.stat().st_atime_ns, path.stat().st_mtime_ns) == (10**9, 2 * 10**9)
    assert path.read_bytes() == DATA
    wait_until(lambda: path.stat().st_atime > time.time() - 60, 5, "the access time is that of the read")
    assert path.stat().st_mtime_ns == 2 * 10**9


@pytest.mark.as_root
def test_device_files_are_refused(directory: Path) -> None:
    for kind in (stat.S_IFCHR, stat.S_IFBLK):
        refused(errno.EPERM, lambda kind=kind: os.mknod(directory / "device", kind | 0o600, os.makedev(1, 3)))  # type: ignore[misc]
    assert not list(directory.iterdir())


@pytest.mark.as_root
def test_whiteouts_are_refused(directory: Path) -> None:
    path = sealed_page(directory / "page")
    refused(errno.EINVAL, lambda: libc.renameat2(str(path), str(directory / "moved"), libc.RENAME_WHITEOUT))
    assert path.read_bytes() == DATA


@pytest.mark.parametrize("name", [".kvfs-owner", ".kvfs-temporary", ".kvfs-quarantine", ".kvfs-any"])
def test_names_of_our_own_in_the_root_are_reserved(mount: KvfsMount, directory: Path, name: str) -> None:
    own = mount.path / name
    page = sealed_page(directory / "page")
    refused(errno.EPERM, lambda: own.write_bytes(DATA))
    refused(errno.EPERM, lambda: own.mkdir())
    refused(errno.EPERM, lambda: own.symlink_to("page"))
    refused(errno.EPERM, lambda: os.mkfifo(own))
    refused(errno.EPERM, lambda: page.rename(own))
    refused(errno.EPERM, lambda: os.link(page, own))
    assert not own.exists()
    (directory / name).write_bytes(DATA)
    assert (directory / name).read_bytes() == DATA


def test_the_control_directory_is_reserved(mount: KvfsMount, directory: Path) -> None:
    control = mount.path / ".kvfs"
    page = sealed_page(directory / "page")
    refused(errno.EEXIST, lambda: control.mkdir())
    refused(errno.EPERM, lambda: control.rmdir())
    refused(errno.EPERM, lambda: (control / "new").touch())
    refused(errno.EPERM, lambda: (control / "new").mkdir())
    refused(errno.EPERM, lambda: (control / "status").unlink())
    refused(errno.EPERM, lambda: control.rename(mount.path / "moved"))
    refused(errno.EPERM, lambda: page.rename(control / "page"))
    refused(errno.EPERM, lambda: os.link(page, control / "page"))
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC):
        with pytest.raises(PermissionError):
            os.close(os.open(control / "status", flags))
    assert page.read_bytes() == DATA


def test_below_the_root_its_name_is_free(directory: Path) -> None:
    path = directory / ".kvfs"
    path.mkdir()
    (path / "file").write_bytes(DATA)
    assert (path / "file").read_bytes() == DATA
    assert os.listdir(directory) == [".kvfs"]


def test_a_page_is_sealed_again_after_a_rename_over_it(directory: Path) -> None:
    """A published name stays whole for those who read the one it replaced."""
    path = sealed_page(directory / "page")
    with open(path, "rb") as reader:
        (directory / "temporary").write_bytes(b"replacement")
        (directory / "temporary").replace(path)
        assert path.read_bytes() == b"replacement"
        assert reader.read() == DATA
    wait_sealed(path)
    assert digest(path)


def test_all_attributes_of_a_file_together_are_bounded(directory: Path) -> None:
    path = sealed_page(directory / "page")
    os.setxattr(path, "user.first", b"x" * 40_000)
    refused(errno.ENOSPC, lambda: os.setxattr(path, "user.second", b"x" * 40_000))
    os.setxattr(path, "user.first", b"x" * 60_000)
    os.removexattr(path, "user.first")
    os.setxattr(path, "user.second", b"x" * 40_000)


def test_a_directory_cannot_be_moved_where_its_files_have_too_long_a_path(directory: Path) -> None:
    name = "n" * 250
    for top in ("one", "other"):
        path = directory / top
        path.mkdir()
        for _ in range(8):
            path = path / name
            path.mkdir()
    refused(errno.ENAMETOOLONG, lambda: (directory / "one").rename(path / "moved"))
    assert (directory / "one" / name).is_dir()
