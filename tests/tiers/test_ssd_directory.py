from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvfs import mounts
from kvfs.errors import NotPermitted, TierUnusable, UsageError
from kvfs.tiers import ssd_directory, tmpfs
from kvfs.tiers.attributes import MemoryAttributes
from tests.conftest import LogGuard
from tests.tiers.conftest import NOBODY, mounted_tmpfs, needs_root
from tests.tiers.ssds import MEBIBYTE, attach, check_accounts, mounted_disk, pages, read, store, tree


@pytest.mark.parametrize("name", ["file", "directory/file", "directory"])
def test_a_directory_with_something_else_in_it_is_refused(ssd: Path, name: str) -> None:
    ssd.mkdir()
    path = ssd / name
    path.parent.mkdir(exist_ok=True)
    path.touch() if "file" in name else path.mkdir()
    before = tree(ssd)
    with pytest.raises(TierUnusable, match=r"holds something that is not ours, (file|directory)"):
        attach(ssd)
    assert tree(ssd) == before


def test_the_root_of_a_new_filesystem_is_taken(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounts filesystems, and so must run as root")
    with mounted_disk(tmp_path / "disk", "ext4", 64) as directory:
        assert os.listdir(directory) == ["lost+found"]
        tier = attach(directory, 32 * MEBIBYTE)
        store(tier, b"page", b"content")
        check_accounts(tier)
        tier.close()
        tier = attach(directory, 32 * MEBIBYTE)
        assert pages(tier) == {b"page"}
        tier.close()


def test_a_capacity_above_the_filesystem_is_refused(ssd: Path) -> None:
    with pytest.raises(UsageError, match=r"--ssd-capacity 1\.0 TiB is more than .* its filesystem has"):
        attach(ssd, 1 << 40)
    assert not ssd.exists()


def test_a_place_within_the_mount_or_its_dram_is_refused(ssd: Path) -> None:
    ssd.mkdir()
    for other in ("mountpoint", "dram", "states"):
        for where in (ssd, ssd.parent, ssd / "below"):
            with pytest.raises(UsageError, match=r"--ssd .*: (that is|that lies in|the |its DRAM tier)"):
                attach(ssd, 64 * MEBIBYTE, **{other: where})
    link = ssd.parent / "link"
    link.symlink_to(ssd)
    with pytest.raises(UsageError, match="that is the mount itself"):
        attach(link, mountpoint=ssd)
    assert os.listdir(ssd) == []


def test_a_place_on_a_mount_of_kvfs_is_refused(ssd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = mounts.filesystem_with(os.stat(ssd.parent).st_dev)
    assert entry is not None
    for found in (replace(entry, fstype=mounts.FSTYPE), replace(entry, source=tmpfs.SOURCE)):
        monkeypatch.setattr(mounts, "filesystem_with", lambda _number, found=found: found)
        with pytest.raises(UsageError, match="that is on a mount of kvfs"):
            attach(ssd)
    assert not ssd.exists()


@pytest.mark.parametrize("place", ["/proc", "/sys", "/proc/sys/kvfs"])
def test_what_is_no_disk_is_refused(place: str) -> None:
    with pytest.raises(UsageError, match="its filesystem has no room to give"):
        attach(Path(place))


# In another tier


def test_a_directory_in_a_tier_is_refused_whether_somebody_has_that_or_not(ssd: Path) -> None:
    tier = attach(ssd)
    store(tier, b"a/b/page", b"content")
    (ssd / "other").mkdir()
    before = tree(ssd)
    for end in (tier.close_cleanly, lambda: None):
        for place in ("a", "a/b", "new", "other", ".kvfs-quarantine"):
            with pytest.raises(UsageError, match=rf"that lies in {ssd}, an SSD directory of kvfs"):
                attach(ssd / place)
        assert tree(ssd) == before
        end()
        before = tree(ssd)
    (ssd / "other").rmdir()
    tier = attach(ssd)
    assert pages(tier) == {b"a/b/page"}
    tier.close()


def test_a_directory_above_a_tier_is_refused(ssd: Path) -> None:
    tier = attach(ssd)
    with pytest.raises(TierUnusable, match=r"holds an SSD directory of kvfs, tier: give one of its own"):
        attach(ssd.parent)
    tier.close()


@needs_root
def test_a_part_of_a_tier_is_known_wherever_it_is(ssd: Path) -> None:
    tier = attach(ssd)
    store(tier, b"a/page", b"content")
    elsewhere = ssd.parent / "elsewhere"
    elsewhere.mkdir()
    subprocess.run(["mount", "--bind", ssd / "a", elsewhere], check=True)
    try:
        with pytest.raises(TierUnusable, match="is a part of an SSD directory of kvfs"):
            attach(elsewhere)
    finally:
        subprocess.run(["umount", elsewhere], check=True)
    assert read(tier, b"a/page") == b"content"
    tier.close()
    (ssd / "a").rename(ssd.parent / "moved")
    with pytest.raises(TierUnusable, match="is a part of an SSD directory of kvfs"):
        attach(ssd.parent / "moved")


def test_paths_that_are_wrong(ssd: Path) -> None:
    with pytest.raises(UsageError, match="does not exist: is the disk mounted"):
        attach(ssd / "deep" / "deeper")
    ssd.touch()
    with pytest.raises(UsageError, match="is not a directory"):
        attach(ssd)
    with pytest.raises(UsageError, match="a part of it, is not a directory"):
        attach(ssd / "below")


def test_a_filesystem_without_extended_attributes_is_refused(
    ssd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssd_directory, "choose_attributes", lambda _fd: MemoryAttributes())
    with pytest.raises(TierUnusable, match=r"filesystem \((ext4|xfs)\) has no extended attributes"):
        attach(ssd)
    assert not ssd.exists()


@needs_root
def test_a_directory_of_somebody_else_is_refused(ssd: Path) -> None:
    ssd.mkdir()
    os.chown(ssd, NOBODY, NOBODY)
    with pytest.raises(NotPermitted, match="belongs to somebody else"):
        attach(ssd)


def test_a_directory_that_others_could_enter_is_closed_to_them(ssd: Path) -> None:
    ssd.mkdir(mode=0o755)
    attach(ssd).close()
    assert ssd.stat().st_mode & 0o7777 == 0o700


@needs_root
def test_a_read_only_filesystem_is_refused(tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "disk", "ext4", 64) as directory:
        attach(directory / "tier", 32 * MEBIBYTE).close()
        subprocess.run(["mount", "-o", "remount,ro", directory], check=True)
        with pytest.raises(TierUnusable, match="cannot be an SSD tier: Read-only file system"):
            attach(directory / "tier", 32 * MEBIBYTE)
        with pytest.raises(TierUnusable, match="cannot be an SSD tier: Read-only file system"):
            attach(directory / "other", 32 * MEBIBYTE)


# Without privileges


@needs_root
def test_whoever_is_not_root_has_a_tier_too_but_not_one_of_root(
    disk: Path, ssd: Path, as_nobody: Callable[[Callable[[], None]], None]
) -> None:
    attach(ssd).close()
    for path in (disk, ssd.parent):
        path.chmod(0o755)
    shutil.chown(ssd, NOBODY)
    own = ssd.parent / "own"
    own.mkdir(mode=0o700)
    shutil.chown(own, NOBODY)

    def work() -> None:
        with pytest.raises((NotPermitted, TierUnusable)):
            attach(ssd)
        tier = attach(own)
        assert tier.attribute_prefix == "user.kvfs."
        store(tier, b"a/page", b"content")
        assert read(tier, b"a/page") == b"content"
        check_accounts(tier)
        tier.close_cleanly()

    as_nobody(work)
    shutil.chown(own, "root")
    tier = attach(own)
    assert tier.attribute_prefix == "user.kvfs."
    tier.close()


# O_DIRECT


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem that takes O_DIRECT at open and refuses it at write, as some do."""
    genuine = os.pwritev

    def pwritev(fd: int, buffers: list[object], offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("/probe"):
            raise OSError(22, "Invalid argument")
        return genuine(fd, buffers, offset)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwritev", pwritev)


def test_o_direct_that_fails_at_the_first_write_is_left_out_with_one_warning(
    ssd: Path, monkeypatch: pytest.MonkeyPatch, expect_log: LogGuard
) -> None:
    refuse_direct(monkeypatch)
    expect_log("pages go through the page cache: open takes O_DIRECT, but reading or writing does not")
    tier = attach(ssd)
    assert not tier.direct
    assert "Invalid argument" in tier.statistics().direct_reason
    store(tier, b"page", b"x" * 100_000)
    assert read(tier, b"page") == b"x" * 100_000
    check_accounts(tier)
    assert len(expect_log.lines) == 1
    tier.close()


@needs_root
def test_any_posix_filesystem_will_do(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "tmpfs") as directory:
        tier = attach(directory / "tier", 32 * MEBIBYTE)
        store(tier, b"a/page", b"x" * 100_000)
        assert read(tier, b"a/page") == b"x" * 100_000
        assert pages(tier) == {b"a/page"}
        tier.close_cleanly()
