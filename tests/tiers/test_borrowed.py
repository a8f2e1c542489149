"""Without the right to mount: a directory of an existing tmpfs, bounded by ourselves."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvfs import mounts
from kvfs.errors import NotPermitted, OutOfRoom, Unavailable
from kvfs.page import HUGEPAGE
from kvfs.tiers import dram
from tests.tiers.conftest import needs_root
from tests.tiers.drams import MEBIBYTE, attach, is_oversized, write

pytestmark = needs_root


def test_it_lives_and_dies_in_a_directory_of_its_own(
    as_nobody: Callable[[Callable[[], None]], None], tmp_path: Path
) -> None:
    home = private_home(tmp_path)

    def check() -> None:
        tier = attach(home / "dram", hugepages="prefer", numa="interleave")
        assert not tier.is_private
        assert tier.directory.parent == Path("/dev/shm")
        assert tier.directory.stat().st_mode & 0o7777 == 0o700
        assert "mounting is not permitted" in tier.missing["private tmpfs"]
        assert {"noswap", "huge=within_size", "mpol=interleave"} < set(tier.missing)
        assert tier.attribute_prefix in ("user.kvfs.", "")
        assert not tier.hugepages_active
        assert "not mounted with huge=" in tier.hugepages_reason
        assert tier.room().total_bytes == 64 * MEBIBYTE
        tier.mkdir(b"d")
        write(tier, b"d/page", MEBIBYTE)
        tier.set_attribute(b"d/page", "digest", b"d")
        assert tier.get_attribute(b"d/page", "digest") == b"d"
        tier.close(keep=True)
        again = attach(home / "dram")
        assert again.directory == tier.directory
        assert again.stat(b"d/page").st_size == MEBIBYTE
        again.close()
        assert not tier.directory.exists()

    as_nobody(check)


def test_growth_during_a_walk_is_counted_once(
    as_nobody: Callable[[Callable[[], None]], None], tmp_path: Path
) -> None:
    home = private_home(tmp_path)

    def check() -> None:
        tier = attach(home / "dram", 16 * MEBIBYTE)
        with tier.growing(3 * MEBIBYTE):
            write(tier, b"a", 3 * MEBIBYTE)
        assert tier.room().used_bytes == 3 * MEBIBYTE
        time.sleep(1.1)  # the next look at the room walks
        with tier.growing(4 * MEBIBYTE):
            write(tier, b"b", 4 * MEBIBYTE)
            assert tier.room().used_bytes == 7 * MEBIBYTE
        assert tier.room().used_bytes == 7 * MEBIBYTE
        time.sleep(1.1)
        with tier.growing(2 * MEBIBYTE):
            assert tier.room().used_bytes == 7 * MEBIBYTE
            write(tier, b"c", 2 * MEBIBYTE)
        assert tier.room().used_bytes == 9 * MEBIBYTE
        with pytest.raises(OSError, match="no room"), tier.growing(5 * MEBIBYTE):
            raise OSError("no room")
        assert tier.room().used_bytes == 9 * MEBIBYTE
        tier.close()

    as_nobody(check)


def test_the_limit_is_ours(as_nobody: Callable[[Callable[[], None]], None], tmp_path: Path) -> None:
    home = private_home(tmp_path)

    def check() -> None:
        tier = attach(home / "dram", 16 * MEBIBYTE)
        assert tier.room().free_bytes == 16 * MEBIBYTE
        write(tier, b"a", 6 * MEBIBYTE)
        tier.account(6 * MEBIBYTE)
        write(tier, b"b", 4 * MEBIBYTE)
        tier.account(4 * MEBIBYTE)
        tier.link(b"a", b"link")
        assert tier.room().used_bytes == 10 * MEBIBYTE
        with pytest.raises(OutOfRoom, match=r"holds 10\.0 MiB"):
            tier.resize(8 * MEBIBYTE)
        assert is_oversized(tier)
        assert tier.room().total_bytes == 16 * MEBIBYTE
        tier.unlink(b"a")
        assert tier.room().used_bytes == 10 * MEBIBYTE, "another name is left"
        tier.unlink(b"link")
        assert tier.room().used_bytes == 4 * MEBIBYTE
        write(tier, b"c", MEBIBYTE)
        tier.account(MEBIBYTE)
        tier.rename(b"c", b"b")
        assert tier.room().used_bytes == MEBIBYTE
        tier.resize(8 * MEBIBYTE)
        assert tier.room().free_bytes == 7 * MEBIBYTE
        tier.close(keep=True)
        tier = attach(home / "dram", 8 * MEBIBYTE)
        assert tier.room().used_bytes == MEBIBYTE, "counted by walking"
        write(tier, b"d", 4 * MEBIBYTE)
        tier.close(keep=True)
        tier = attach(home / "dram", 2 * MEBIBYTE)
        assert is_oversized(tier)
        assert tier.room().free_bytes == 0
        tier.unlink(b"d")
        tier.resize(2 * MEBIBYTE)
        assert not is_oversized(tier)
        assert tier.room().free_bytes == MEBIBYTE
        tier.close()

    as_nobody(check)


def test_what_nobody_accounted_for_is_counted_within_a_second(
    as_nobody: Callable[[Callable[[], None]], None], tmp_path: Path
) -> None:
    home = private_home(tmp_path)

    def check() -> None:
        tier = attach(home / "dram", 16 * MEBIBYTE)
        assert tier.room().used_bytes == 0
        write(tier, b"a", 6 * MEBIBYTE)
        deadline = time.monotonic() + 5
        while tier.room().used_bytes != 6 * MEBIBYTE:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        tier.close()

    as_nobody(check)


def test_hugepages_cannot_be_required_but_pages_can_be_collapsed(
    as_nobody: Callable[[Callable[[], None]], None], tmp_path: Path
) -> None:
    home = private_home(tmp_path)

    def check() -> None:
        before = set(os.listdir("/dev/shm"))
        with pytest.raises(Unavailable, match="not mounted with huge=within_size"):
            attach(home / "dram", hugepages="require")
        assert set(os.listdir("/dev/shm")) == before
        tier = attach(home / "dram")
        write(tier, b"page", 2 * HUGEPAGE)
        fd = tier.open(b"page", os.O_RDONLY)
        content = os.pread(fd, 2 * HUGEPAGE, 0)
        tier.collapse(fd, 2 * HUGEPAGE)
        assert os.pread(fd, 2 * HUGEPAGE, 0) == content
        os.close(fd)
        tier.close()

    as_nobody(check)


def test_a_pool_that_the_tmpfs_cannot_hold_is_refused(
    as_nobody: Callable[[Callable[[], None]], None], tmp_path: Path
) -> None:
    home = private_home(tmp_path)

    def check() -> None:
        with pytest.raises(Unavailable, match=r"less than the pool of 1\.0 PiB: give a smaller --pool"):
            attach(home / "dram", 1 << 50)

    as_nobody(check)


def test_a_directory_that_somebody_else_made_is_not_used(
    as_nobody: Callable[[Callable[[], None]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = private_home(tmp_path)
    trap = tmp_path / "trap"
    trap.mkdir(mode=0o755)
    link = tmp_path / "link"
    link.symlink_to(home)
    os.chmod(tmp_path, 0o755)

    def check() -> None:
        for place in (trap, link):
            with pytest.raises(NotPermitted, match="belongs to somebody else"):
                dram._open_own_directory(place)

    as_nobody(check)


def test_where_there_is_no_tmpfs_at_all_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "find", lambda _path: [])
    with pytest.raises(Unavailable, match="neither /dev/shm nor"):
        dram._borrowed_place(MEBIBYTE)


def private_home(tmp_path: Path) -> Path:
    """A directory that the unprivileged child may write to."""
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 65534, 65534)
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_mode & 0o001 == 0:
            os.chmod(parent, parent.stat().st_mode | 0o001)
    return home


def test_root_without_the_right_to_mount_borrows_too(state: Path) -> None:
    """What a container without CAP_SYS_ADMIN is."""
    child = os.fork()
    if not child:
        status = 1
        try:
            drop_capability(21)
            tier = attach(state)
            assert not tier.is_private
            assert tier.attribute_prefix == "user.kvfs."
            tier.close()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status == 0


def drop_capability(number: int) -> None:
    class Header(ctypes.Structure):
        _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))

    class Data(ctypes.Structure):
        _fields_ = (("effective", ctypes.c_uint32 * 3), ("more", ctypes.c_uint32 * 3))

    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = Header(0x20080522, 0), Data()
    assert libc.capget(ctypes.byref(header), ctypes.byref(sets)) == 0
    for position in range(2):
        sets.effective[position] &= ~(1 << number)
    assert libc.capset(ctypes.byref(header), ctypes.byref(sets)) == 0
