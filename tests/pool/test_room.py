"""What is evicted, in which order, how much of it, and what is passed over."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
import trio
import trio.lowlevel

from kvfs.errors import StalePage
from kvfs.opening import Openings
from kvfs.pool import Pool
from tests.conftest import LogGuard
from tests.pool import files
from tests.pool.checks import check_pool
from tests.pool.faces import KernelFace
from tests.pool.files import KIB, MIB, create, left, names, page, pages, pattern, put, read, settled

DATA = pattern(MIB)


# Order and amount


@pytest.mark.parametrize(("wanted", "gone"), [(5 * MIB, 5), (5 * MIB + 1, 6), (1, 1), (0, 0), (-5, 0)])
async def test_the_coldest_leave_and_no_more_than_asked_and_one(
    pool: Pool, face: KernelFace, wanted: int, gone: int
) -> None:
    await pages(pool, 20)
    assert await pool.evictor.free(wanted) == gone * MIB
    assert left(pool) == names(*range(gone, 20))
    assert pool.counters.evictions == gone
    assert pool.counters.evicted_bytes == gone * MIB
    assert pool.tier.room().used_bytes == (20 - gone) * MIB
    assert face.invalidated == [(1, name) for name in names(*range(gone))]


async def test_what_was_used_is_hot(pool: Pool, openings: Openings, face: KernelFace) -> None:
    entries = await pages(pool, 10)
    await read(openings, entries[0])
    face.close_natively(pool, entries[2], face.open_natively(entries[2]))
    await files.rewrite(openings, entries[4], DATA)
    await settled(pool)
    await pool.evictor.free(7 * MIB)
    assert left(pool) == names(0, 2, 4)


async def test_small_files_leave_last(pool: Pool) -> None:
    await pages(pool, 5, size=32 * KIB, prefix=b"small")
    await pages(pool, 5)
    assert await pool.evictor.free(5 * MIB) == 5 * MIB
    assert left(pool) == [b"small" + name for name in names(0, 1, 2, 3, 4)]
    assert await pool.evictor.free(33 * KIB) == 64 * KIB
    assert left(pool) == [b"small" + name for name in names(2, 3, 4)]


async def test_a_file_with_links_goes_with_all_its_names(pool: Pool, face: KernelFace) -> None:
    entry = (await pages(pool, 2))[0]
    directory = files.mkdir(pool, b"d")
    pool.names.link(entry, directory, b"link")
    assert await pool.evictor.free(1) == MIB
    assert left(pool) == [b"01", b"d"]
    assert directory.children == {}
    assert pool.counters.evictions == 1
    assert sorted(face.invalidated) == [(1, b"00"), (directory.number, b"link")]


async def test_many_are_evicted_without_holding_up_the_loop(pool: Pool) -> None:
    await pages(pool, 300, size=4 * KIB)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        assert await pool.evictor.free(300 * 4 * KIB) == 300 * 4 * KIB
        nursery.cancel_scope.cancel()
    assert turns >= 3
    assert left(pool) == []


async def test_an_evicted_page_is_a_miss_and_its_number_lives_while_the_kernel_knows_it(
    pool: Pool, openings: Openings, face: KernelFace
) -> None:
    entry = await page(pool, b"page", DATA)
    entry.lookups = 1
    await pool.evictor.free(1)
    with pytest.raises(StalePage):
        await openings.open_reading(entry)
    with pytest.raises(StalePage):
        await openings.open_writing(entry, truncate=True)
    with pytest.raises(StalePage):
        pool.status(entry)
    assert face.gone == {(1, b"page"): True}
    assert not pool.counters.misses, "the kernel looks the name up again, and then it is one"
    face.misses = (2, 1)
    pool.uses.collect()
    assert pool.counters.misses == {"absent": 2, "evicted": 1}
    files.forget(pool, entry.number, 1)
    assert pool.index.by_number(entry.number) is None


# Passed over


async def test_pages_in_use_are_passed_over(pool: Pool, openings: Openings, face: KernelFace) -> None:
    entries = await pages(pool, 6)
    await openings.open_reading(entries[0])
    fd = face.open_natively(entries[1])
    mapping = files.mapped(files.tier_file(pool, b"02"), MIB, writable=False)
    with mapping:
        held = files.tier_file(pool, b"03")
        assert await pool.evictor.free(6 * MIB) == 2 * MIB
        assert left(pool) == names(0, 1, 2, 3)
        assert face.records[entries[1].number].sealed, "it is answered for natively as before"
        os.close(held)
    check_pool(pool, face)
    openings.close_reading(entries[0])
    face.close_natively(pool, entries[1], fd)
    assert await pool.evictor.free(6 * MIB) == 4 * MIB
    assert left(pool) == []


async def test_only_pages_are_evicted(pool: Pool, expect_log: LogGuard) -> None:
    expect_log("every page left is in use")
    entry = create(pool, b"draft")
    put(entry, DATA)
    files.mkdir(pool, b"directory")
    pool.names.create_other(pool.index.root, b"symlink", files.OWNER.__class__(0o120777, 0, 0), b"target")
    empty = create(pool, b"empty")
    pool.remove_writer(empty)
    await settled(pool)
    assert await pool.evictor.free(10 * MIB, 10) == 0
    assert left(pool) == [b"directory", b"draft", b"empty", b"symlink"]
    pool.remove_writer(entry)


async def test_being_stuck_is_told_while_somebody_writes(pool: Pool, expect_log: LogGuard) -> None:
    stuck = []
    for wanted in (MIB, 0):
        assert await pool.evictor.free(wanted) == 0
        stuck.append(pool.evictor.stuck)
    assert stuck == [True, False]
    expect_log("the pool is full and every page left is in use: writers get ENOSPC")
    entry = create(pool, b"draft")
    for _ in range(3):
        await pool.evictor.free(MIB)
    pool.remove_writer(entry)


async def test_a_page_that_vanished_is_forgotten(pool: Pool, expect_log: LogGuard) -> None:
    expect_log("00 is gone from the tier behind our back")
    pool.idle.limit = 0
    await pages(pool, 3)
    pool.tier.unlink(b"00")
    assert await pool.evictor.free(MIB) == MIB
    assert left(pool) == names(2)
    assert pool.pages == 1


async def test_a_page_that_cannot_be_opened_is_passed_over(
    pool: Pool, expect_log: LogGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_log("a page cannot be evicted: .*Too many open files")
    await pages(pool, 3)
    well, failures = pool.tier.open, 1

    def fail_once(path: bytes, flags: int) -> int:
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return well(path, flags)

    monkeypatch.setattr(pool.tier, "open", fail_once)
    assert await pool.evictor.free(MIB) == MIB
    assert left(pool) == names(0, 2)


async def test_a_failure_in_the_middle_leaves_nothing_open(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pages(pool, 6)
    await pool.evictor.free(1)
    before = len(os.listdir("/proc/self/fd"))
    well, calls = pool.tier.unlink, 0

    def fail_third(path: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        well(path)

    with monkeypatch.context() as patch:
        patch.setattr(pool.tier, "unlink", fail_third)
        with pytest.raises(OSError, match="Input/output"):
            await pool.evictor.free(5 * MIB)
    assert len(os.listdir("/proc/self/fd")) <= before
    assert await pool.evictor.free(5 * MIB) == 3 * MIB


async def test_a_failure_of_the_evictor_does_not_end_the_mount(
    pool: Pool, expect_log: LogGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_log("the reserve could not be kept: .*Too many open files")
    expect_log("the reserve could not be kept$")

    def fail() -> Any:
        raise errors.pop() if errors else ZeroDivisionError

    errors = [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]
    with monkeypatch.context() as patch:
        patch.setattr(pool.tier, "room", fail)
        entry = create(pool, b"draft")
        await trio.sleep(0.05)
    pool.remove_writer(entry)


@pytest.mark.parametrize(("percent", "gone"), [(100.0, "unread"), (10.0, "read")])
async def test_pages_that_were_read_again_are_protected_up_to_a_share(
    pool: Pool, openings: Openings, percent: float, gone: str
) -> None:
    pool.policy.protected_percent = percent
    for number in range(5):
        await page(pool, b"unread-%d" % number, pattern(MIB, number))
    entries = await pages(pool, 10, prefix=b"read-")
    for _ in range(3):
        for entry in entries:
            await read(openings, entry)
    await pool.evictor.free(5 * MIB)
    kinds = [name.rpartition(b"-")[0].decode() for name in left(pool)]
    assert {kind: kinds.count(kind) for kind in ("read", "unread")} == (
        {"read": 10, "unread": 0} if gone == "unread" else {"read": 5, "unread": 5}
    )
