"""What has gone wrong elsewhere with the room: counters that drift, caps that are none, full for ever."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import shutil
import time
from pathlib import Path

import pytest

from tests.mounted.children import together
from tests.mounted.operations import pattern
from tests.mounted.running import MIB, PAGE, KvfsMount, wait_sealed, wait_until

DATA = pattern(13, MIB)


def disk_usage(top: Path) -> tuple[int, int]:
    """What ``du`` finds: the bytes that all files occupy, and how many files there are."""
    blocks: dict[int, int] = {}
    for parent, _, names in os.walk(top):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found = os.lstat(f"{parent}/{name}")
                blocks[found.st_ino] = found.st_blocks
    return sum(blocks.values()) * 512, len(blocks)


def assert_accounts_agree(mount: KvfsMount) -> None:
    """``df``, ``du`` and the status agree to within a page of memory for each file."""

    def agree() -> bool:
        found, files = disk_usage(mount.path)
        slack = (files + 16) * PAGE
        used = mount.used_bytes()
        shown = mount.status()["tiers"]["dram"]["used_bytes"]
        return abs(used - found) <= slack and abs(shown - used) <= slack

    try:
        wait_until(agree, 10, "the accounts agree")
    except TimeoutError as error:
        found, files = disk_usage(mount.path)
        dram = mount.status()["tiers"]["dram"]
        raise AssertionError(
            f"du {found} of {files} files, df {mount.used_bytes()}, status {dram}"
        ) from error


def fill(directory: Path, count: int, prefix: str = "page") -> list[Path]:
    """Write pages of one MiB, one after the other."""
    paths = [directory / f"{prefix}-{number}" for number in range(count)]
    for number, path in enumerate(paths):
        path.write_bytes(number.to_bytes(8, "big") + DATA[8:])
    return paths


@pytest.mark.deadline(180)
def test_ten_thousand_puts_removes_and_overwrites_keep_the_accounts(empty_pool: KvfsMount, mode: str) -> None:
    """Under pressure too: what is asked for is more than the pool holds."""
    mount = empty_pool
    chance = random.Random(20)
    top = mount.path / "churn"
    top.mkdir()
    sizes = [100, 4096, 5000, 65_536, 300_000, MIB]
    for number in range(10_000 if mode == "passthrough" else 3_000):
        path = top / f"{chance.randrange(900)}"
        if chance.random() < 0.3:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(DATA[: chance.choice(sizes)])
        if number % 1000 == 999:
            used = mount.used_bytes()
            assert 0 <= used <= mount.pool_bytes
            assert_accounts_agree(mount)
    shutil.rmtree(top)
    wait_until(lambda: mount.used_bytes() <= 64 * PAGE, 10, "nothing is used when all is removed")
    assert_accounts_agree(mount)
    assert mount.status()["tiers"]["dram"]["pages"] == 0
    for path in fill(mount.path, 10):
        wait_sealed(path)


def test_writing_more_than_the_pool_holds_evicts_the_oldest(empty_pool: KvfsMount) -> None:
    mount = empty_pool
    before = mount.status()["evictions"]
    paths = []
    for part in range(6):
        paths += fill(mount.path, 100, f"part-{part}")
        assert mount.used_bytes() <= mount.pool_bytes
    wait_sealed(paths[-1])
    status = mount.status()
    assert status["evictions"] > before
    assert status["tiers"]["dram"]["capacity_bytes"] <= mount.pool_bytes
    there = [path.exists() for path in paths]
    assert all(there[-50:]), "a page just written was evicted"
    assert not any(there[:200]), "the oldest pages are still there"
    for number, path in list(enumerate(paths))[-50:]:
        assert path.read_bytes() == (number % 100).to_bytes(8, "big") + DATA[8:]
    assert_accounts_agree(mount)


def test_what_is_read_again_stays_longer_than_what_is_not(empty_pool: KvfsMount) -> None:
    mount = empty_pool
    favourites = fill(mount.path, 20, "favourite")
    wait_sealed(*favourites)
    for part in range(8):
        fill(mount.path, 30, f"part-{part}")
        for path in favourites:
            assert path.read_bytes()[8:] == DATA[8:]
    assert mount.status()["evictions"] > 0


def test_a_page_that_is_evicted_while_it_is_read_stays_whole_for_its_reader(empty_pool: KvfsMount) -> None:
    mount = empty_pool
    (page,) = fill(mount.path, 1, "held")
    wait_sealed(page)
    with open(page, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        for part in range(4):
            fill(mount.path, 100, f"part-{part}")
        assert mapping[8:] == DATA[8:]
        assert os.pread(file.fileno(), MIB, 8) == DATA[8:]


def test_the_cap_is_the_mounts_whoever_writes(empty_pool: KvfsMount) -> None:
    """Four processes, each of which alone would fill the pool."""
    mount = empty_pool

    def write(number: int) -> None:
        for round_number in range(200):
            (mount.path / f"{number}-{round_number}").write_bytes(DATA)
            room = os.statvfs(mount.path)
            assert (room.f_blocks - room.f_bfree) * room.f_frsize <= mount.pool_bytes

    together(4, write)
    assert_accounts_agree(mount)
    dram = mount.status()["tiers"]["dram"]
    assert dram["used_bytes"] <= dram["capacity_bytes"] <= mount.pool_bytes


def test_a_pool_full_of_pages_in_use_refuses_writers_serves_readers_and_recovers(
    empty_pool: KvfsMount,
) -> None:
    mount = empty_pool
    held: list[int] = []
    try:
        with pytest.raises(OSError, match="No space left") as caught:
            hold_everything(mount, held)
        assert caught.value.errno == errno.ENOSPC
        assert len(held) >= mount.pool_bytes // MIB * 0.6
        for descriptor in held:
            assert os.pread(descriptor, 100, 8) == DATA[8:108]
        assert mount.used_bytes() <= mount.pool_bytes
    finally:
        for descriptor in held:
            os.close(descriptor)
    wait_until(lambda: can_write(mount), 5, "writing works again")
    for path in fill(mount.path, 300, "again")[-20:]:
        assert path.exists()


def can_write(mount: KvfsMount) -> bool:
    """Whether a page can be written now: room is made soon after the last descriptor is closed."""
    try:
        fill(mount.path, 1, "after")
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False
    return True


def hold_everything(mount: KvfsMount, held: list[int]) -> None:
    """Write pages and keep every one of them open for reading."""
    for number in range(mount.pool_bytes // MIB + 1):
        path = mount.path / f"held-{number}"
        with open(path, "wb") as file:
            file.write(DATA)
            held.append(os.open(path, os.O_RDONLY))


def test_many_drafts_that_were_given_their_size_never_meet_sigbus(empty_pool: KvfsMount) -> None:
    """Eight processes ask for twice the pool; whoever got an answer can touch every byte."""
    mount = empty_pool

    def write(number: int) -> None:
        granted = []
        for part in range(8):
            descriptor = os.open(mount.path / f"{number}-{part}", os.O_RDWR | os.O_CREAT, 0o644)
            try:
                os.ftruncate(descriptor, mount.pool_bytes // 32)
            except OSError as error:
                assert error.errno == errno.ENOSPC  # noqa: PT017
                os.close(descriptor)
                continue
            granted.append(mmap.mmap(descriptor, 0))
            os.close(descriptor)
        for mapping in granted:
            for offset in range(0, len(mapping), PAGE):
                mapping[offset] = 1
            mapping.close()

    together(8, write)
    assert mount.used_bytes() <= mount.pool_bytes


def test_ten_thousand_refusals_do_not_flood_the_log(empty_pool: KvfsMount, mode: str) -> None:
    mount = empty_pool
    held = []
    for number in range(3):
        held.append(os.open(mount.path / f"held-{number}", os.O_RDWR | os.O_CREAT, 0o644))
        os.ftruncate(held[-1], mount.pool_bytes // 4)
    refused = os.open(mount.path / "refused", os.O_RDWR | os.O_CREAT, 0o644)
    before, begun = mount.log, time.monotonic()
    try:
        for _ in range(10_000 if mode == "passthrough" else 3_000):
            with pytest.raises(OSError, match="No space left"):
                os.ftruncate(refused, mount.pool_bytes // 3)
    finally:
        for descriptor in (*held, refused):
            os.close(descriptor)
    lines = mount.log[len(before) :].splitlines()
    assert len(lines) <= time.monotonic() - begun + 3, lines[:20]


def test_df_counts_inodes(empty_pool: KvfsMount) -> None:
    mount = empty_pool
    before = os.statvfs(mount.path)
    fill(mount.path, 100)
    after = os.statvfs(mount.path)
    assert 100 <= before.f_ffree - after.f_ffree <= 150, "a file's attributes count a little too"
    assert before.f_files == after.f_files
    assert after.f_namemax == 255
