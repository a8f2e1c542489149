from __future__ import annotations

import itertools
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.errors import TierFull
from kvfs.interleaved import at_once, finish
from kvfs.page import Digest
from kvfs.tiers import ssd_following as following
from kvfs.tiers.ssd import SsdTier
from tests.tiers.conftest import needs_root
from tests.tiers.ssds import (
    DIRECTORY,
    MEBIBYTE,
    attach,
    check_accounts,
    disk_usage,
    mounted_disk,
    new_page,
    pages,
    read,
    scan,
    source,
    store,
    temporaries,
)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """256 MiB of ext4."""
    if os.geteuid() != 0:
        pytest.skip("mounts filesystems, and so must run as root")
    with mounted_disk(tmp_path / "disk", "ext4", 256) as directory:
        yield directory


def evict(tier: SsdTier, wanted: int) -> int:
    """The pages that were stored first go, until so much is free; how many went."""
    evicted = freed = 0
    for name in sorted(tier.list(b"pages")):
        if freed >= wanted:
            break
        freed += tier.stat(b"pages/" + name).st_blocks * 512
        tier.unlink(b"pages/" + name)
        evicted += 1
    return evicted


def missing(tier: SsdTier, path: bytes) -> tuple[int, int]:
    """What has to be evicted, bytes and inodes, before a page can be stored."""
    with pytest.raises(TierFull) as full:
        store(tier, path, b"content")
    return full.value.missing_bytes, full.value.missing_inodes


def change_something(tier: SsdTier, randomly: random.Random, buffer: bytes) -> int:
    """One of the changes that a mount makes; how many pages had to be evicted for it."""
    path, other = (b"%d/%d" % (randomly.randrange(8), randomly.randrange(200)) for _ in range(2))
    action = randomly.random()
    if action < 0.45:
        size = 1 + int(randomly.paretovariate(0.6) * 2000) % len(buffer)
        try:
            store(tier, path, buffer[:size])
        except TierFull as full:
            return evict_anything(tier, randomly, full.missing_bytes)
    elif action < 0.6:
        following.unlink(tier, path)
    elif action < 0.75:
        following.rename(tier, path, other, 0, [DIRECTORY])
    elif action < 0.8:
        following.link(tier, path, other, [DIRECTORY])
    elif action < 0.9:
        following.set_attribute(tier, path, "user.mine", b"x" * randomly.randrange(1, 3000))
    else:
        following.remove_attribute(tier, path, "user.mine")
    return 0


def evict_anything(tier: SsdTier, randomly: random.Random, wanted: int) -> int:
    evicted = freed = 0
    while freed < wanted:
        directory = b"%d" % randomly.randrange(8)
        for name in tier.list(directory):
            path = directory + b"/" + name
            freed += tier.stat(path).st_blocks * 512 // tier.stat(path).st_nlink
            following.unlink(tier, path)
            evicted += 1
            if freed >= wanted:
                break
    return evicted


@pytest.mark.parametrize("seed", range(2))
def test_thousands_of_changes_leave_the_accounts_exact_and_below_the_capacity(ssd: Path, seed: int) -> None:
    randomly = random.Random(seed)
    buffer = randomly.randbytes(400_000)
    capacity = 16 * MEBIBYTE
    tier = attach(ssd, capacity)
    for directory in range(8):
        following.mkdir(tier, b"%d" % directory, DIRECTORY)
    evicted = 0
    for turn in range(4_000):
        evicted += change_something(tier, randomly, buffer)
        assert tier.accounts.used_bytes <= capacity
        if turn % 500 == 499:
            assert tier.accounts.used_bytes == disk_usage(ssd)
    assert evicted > 20
    check_accounts(tier)
    for directory in range(8):
        for name in tier.list(b"%d" % directory):
            tier.unlink(b"%d/%s" % (directory, name))
        tier.rmdir(b"%d" % directory)
    assert scan(tier)[0] == []
    check_accounts(tier)
    assert tier.accounts.used_bytes < 100_000
    store(tier, b"page", b"works")
    tier.close()


def test_a_disk_that_fills_before_the_capacity_is_a_full_tier(full_disk: Path) -> None:
    """Somebody else has filled the disk: evicting makes room, once is enough, and reading goes on."""
    tier = attach(full_disk / "tier", 220 * MEBIBYTE)
    content = os.urandom(4 * MEBIBYTE)
    for number in range(20):
        store(tier, b"pages/%03d" % number, content)
    with (full_disk / "of-others").open("wb") as other:
        os.posix_fallocate(other.fileno(), 0, tier.refresh_room().free_bytes - MEBIBYTE)
    tier.refresh_room()
    evicted = 0
    for number in range(20, 60):
        path = b"pages/%03d" % number
        try:
            store(tier, path, content)
        except TierFull as full:
            evicted += evict(tier, full.missing_bytes)
            store(tier, path, content)
        assert 0 <= tier.room().used_bytes <= tier.room().total_bytes
    assert 40 <= evicted <= 45
    assert read(tier, b"pages/059") == content
    assert temporaries(tier.directory) == []
    check_accounts(tier)
    (full_disk / "of-others").unlink()
    os.sync()
    tier.refresh_room()
    for number in range(60, 80):
        store(tier, b"pages/%03d" % number, content)
    check_accounts(tier)
    tier.close()


def test_enospc_from_the_disk_itself_leaves_nothing_and_says_so(full_disk: Path) -> None:
    """The filesystem said that there is room, and there is none when it comes to it."""
    tier = attach(full_disk / "tier", 220 * MEBIBYTE)
    content = os.urandom(16 * MEBIBYTE)
    store(tier, b"pages/000", content)
    reservation = tier.reserve(len(content))
    with (full_disk / "of-others").open("wb") as other:
        status = os.statvfs(full_disk)
        os.posix_fallocate(other.fileno(), 0, status.f_bfree * status.f_frsize - 6 * MEBIBYTE)
    with source(content) as fd, pytest.raises(TierFull, match="filesystem of the SSD tier is full") as full:
        finish(tier.write_page(new_page(content), fd, lambda *_: pytest.fail("written"), reservation))
    assert 8 * MEBIBYTE < full.value.missing_bytes <= 16 * MEBIBYTE
    assert temporaries(tier.directory) == []
    assert read(tier, b"pages/000") == content
    check_accounts(tier)
    tier.close()


def test_a_writer_that_meets_enospc_halfway(ssd: Path) -> None:
    tier = attach(ssd)

    @at_once
    def fill_up(source_fd: int, target_fd: int, size: int) -> Digest:
        raise OSError(28, "No space left on device")

    with source(b"x" * 10_000) as fd, pytest.raises(TierFull):
        finish(tier.write_page(new_page(b"x" * 10_000), fd, fill_up))
    assert temporaries(ssd) == []
    check_accounts(tier)
    tier.close()


@needs_root
def test_a_disk_without_inodes_is_full_too(tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "disk", "ext4", 64, "-N", "64") as directory:
        tier = attach(directory / "tier", 32 * MEBIBYTE)
        for number in itertools.count():
            if tier.room().free_inodes == 1:
                break
            store(tier, b"pages/%03d" % number, b"content")
        assert missing(tier, b"deep/" * 3 + b"page") == (0, 1)
        for name in (b"pages/001", b"pages/002", b"pages/003"):
            tier.unlink(name)
        store(tier, b"pages/new", b"content")
        check_accounts(tier)
        tier.close()


def test_a_smaller_capacity_than_before_shows_how_much_must_go(ssd: Path) -> None:
    tier = attach(ssd)
    for number in range(10):
        store(tier, b"pages/%03d" % number, os.urandom(MEBIBYTE))
    tier.close_cleanly()
    tier = attach(ssd, 4 * MEBIBYTE)
    excess = tier.accounts.excess_bytes
    assert 6 * MEBIBYTE <= excess < 7 * MEBIBYTE
    with pytest.raises(TierFull):
        store(tier, b"page", b"content")
    assert evict(tier, excess) in (6, 7)
    assert tier.accounts.excess_bytes == 0
    assert tier.room().total_bytes == 4 * MEBIBYTE
    store(tier, b"page", b"content")
    check_accounts(tier)
    tier.close()


@needs_root
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_disk_that_turns_read_only_is_read_and_works_again_later(tmp_path: Path, kind: str) -> None:
    with mounted_disk(tmp_path / "disk", kind, 320) as directory:
        tier = attach(directory / "tier", 200 * MEBIBYTE)
        content = os.urandom(MEBIBYTE)
        store(tier, b"a/page", content)
        subprocess.run(["mount", "-o", "remount,ro", directory], check=True)
        with pytest.raises(OSError, match="Read-only file system"):
            store(tier, b"a/page", b"new")
        with pytest.raises(OSError, match="Read-only file system"):
            following.rename(tier, b"a/page", b"b")
        with pytest.raises(OSError, match="Read-only file system"):
            following.unlink(tier, b"a/page")
        with pytest.raises(OSError, match="Read-only file system"):
            tier.set_aside(b"a/page", "bytes")
        with pytest.raises(OSError, match="Read-only file system"):
            tier.probe()
        assert read(tier, b"a/page") == content
        assert pages(tier) == {b"a/page"}
        assert tier.accounts.reserved_bytes == 0
        subprocess.run(["mount", "-o", "remount,rw", directory], check=True)
        tier.probe()
        store(tier, b"a/page", b"new")
        assert read(tier, b"a/page") == b"new"
        check_accounts(tier)
        tier.close()


def test_room_and_statistics_ask_nothing_of_the_disk(ssd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that df and status answer while a disk hangs."""
    tier = attach(ssd)
    store(tier, b"page", b"content")

    def hang(*_arguments: object, **_named: object) -> None:
        pytest.fail("the disk was asked")

    for name in ("stat", "fstat", "fstatvfs", "open", "getxattr", "listdir", "scandir"):
        monkeypatch.setattr(os, name, hang)
    assert tier.room().used_bytes > 0
    statistics = tier.statistics()
    reservation = tier.reserve(1000)
    reservation.release()
    monkeypatch.undo()
    assert (statistics.stored, statistics.stored_bytes) == (1, 7)
    assert statistics.used_bytes == tier.accounts.used_bytes
    assert statistics.is_counted
    tier.close()
