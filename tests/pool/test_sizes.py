"""Changes of size: allocated, bounded, and safe from writers that leave meanwhile."""

from __future__ import annotations

import errno
import os
import threading
from typing import Any

import pytest
import trio

from kvfs import opening, syscalls
from kvfs.errors import FileTooLarge, OutOfRoom, StalePage
from kvfs.index import DRAFT, SEALED
from kvfs.opening import Openings
from kvfs.pool import Pool
from tests.conftest import LogGuard
from tests.pool import files
from tests.pool.faces import KernelFace
from tests.pool.files import KIB, MIB, create, find, page, pattern, put, settled, wait_until

DATA = pattern(100_000)


async def test_growth_is_allocated_at_once(pool: Pool, openings: Openings) -> None:
    entry = create(pool, b"file")
    for size in (1, 4096, 5 * MIB, 20 * MIB):
        await openings.resize(entry, size)
        status = pool.status(entry)
        assert status.st_size == size
        assert status.st_blocks * 512 >= size
        assert pool.tier.room().used_bytes == status.st_blocks * 512
    put(entry, b"end", 20 * MIB - 3)
    pool.remove_writer(entry)
    await settled(pool)
    assert files.is_intact(pool, b"file", bytes(20 * MIB - 3) + b"end")


async def test_growth_keeps_what_is_written(pool: Pool, openings: Openings) -> None:
    entry = await page(pool, b"page", DATA)
    await openings.resize(entry, len(DATA) + 5000)
    await settled(pool)
    assert entry.state == SEALED
    assert files.is_intact(pool, b"page", DATA + bytes(5000))


@pytest.mark.parametrize("size", [0, 1, 50_000])
async def test_shortening_a_page_seals_it_anew(pool: Pool, openings: Openings, size: int) -> None:
    entry = await page(pool, b"page", DATA)
    await openings.resize(entry, size)
    await settled(pool)
    assert pool.status(entry).st_size == size
    assert entry.state == (SEALED if size else DRAFT)
    if size:
        assert files.is_intact(pool, b"page", DATA[:size])


async def test_the_same_size_changes_nothing(pool: Pool, openings: Openings) -> None:
    entry = await page(pool, b"page", DATA)
    await openings.resize(entry, len(DATA))
    await settled(pool)
    assert files.is_intact(pool, b"page", DATA)


@pytest.mark.parametrize("tier", [16 * MIB], indirect=True)
async def test_more_than_half_of_the_pool_is_too_large(pool: Pool, openings: Openings) -> None:
    entry = await page(pool, b"page", DATA)
    for size in (8 * MIB + 1, 1 << 62):
        with pytest.raises(FileTooLarge):
            await openings.resize(entry, size)
    assert files.is_intact(pool, b"page", DATA), "it was not even opened"
    await openings.resize(entry, 8 * MIB)
    await settled(pool)
    assert entry.size == 8 * MIB


@pytest.mark.parametrize("tier", [16 * MIB], indirect=True)
async def test_growth_evicts_and_is_refused_where_that_does_not_help(
    pool: Pool, openings: Openings, expect_log: LogGuard
) -> None:
    expect_log("every page left is in use")
    await page(pool, b"cold", pattern(5 * MIB))
    await page(pool, b"warm", pattern(4 * MIB))
    first, second, third = (create(pool, name) for name in (b"1", b"2", b"3"))
    await openings.resize(first, 8 * MIB)
    assert pool.index.find(b"cold") is None
    await openings.resize(second, 7 * MIB)
    assert pool.index.find(b"warm") is None
    with pytest.raises(OutOfRoom):
        await openings.resize(third, 2 * MIB)
    await pool.evictor.keep_reserve()
    for entry in (first, second, third):
        pool.remove_writer(entry)
    await settled(pool)


@pytest.mark.parametrize("tier", [16 * MIB], indirect=True)
async def test_refused_growth_leaves_size_and_bytes(
    pool: Pool, openings: Openings, expect_log: LogGuard
) -> None:
    expect_log("every page left is in use")
    ballast = create(pool, b"ballast")
    await openings.resize(ballast, 8 * MIB)
    second = create(pool, b"second")
    await openings.resize(second, 6 * MIB)
    entry = create(pool, b"file")
    put(entry, DATA)
    with pytest.raises(OutOfRoom):
        await openings.resize(entry, 3 * MIB)
    assert pool.status(entry).st_size == len(DATA)
    await pool.evictor.keep_reserve()
    for each in (ballast, second, entry):
        pool.remove_writer(each)
    await settled(pool)
    assert files.is_intact(pool, b"file", DATA)


@pytest.mark.parametrize("inline", [True, False])
async def test_an_allocation_that_fails_after_all_leaves_the_size(
    pool: Pool, openings: Openings, monkeypatch: pytest.MonkeyPatch, inline: bool
) -> None:
    """Room was there, and a writer was quicker."""

    def refuse(*_arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if not inline:
        monkeypatch.setattr(opening, "INLINE_ALLOCATION", 0)
    entry = create(pool, b"file")
    put(entry, DATA)
    with monkeypatch.context() as patch:
        patch.setattr(opening, "fallocate", refuse)
        with pytest.raises(OSError, match="No space left"):
            await openings.resize(entry, MIB)
    assert pool.status(entry).st_size == len(DATA)
    pool.remove_writer(entry)
    await settled(pool)
    assert files.is_intact(pool, b"file", DATA)


class SlowAllocation:
    """Allocates only when ``go`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.begun = False
        self._fallocate = syscalls.fallocate
        monkeypatch.setattr(opening, "INLINE_ALLOCATION", 0)
        monkeypatch.setattr(opening, "fallocate", self.allocate)

    def allocate(self, fd: int, mode: int, offset: int, length: int) -> None:
        self.begun = True
        assert self.go.wait(10)
        self._fallocate(fd, mode, offset, length)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowAllocation:
    return SlowAllocation(monkeypatch)


async def test_a_writer_that_closes_meanwhile_takes_no_descriptor_away(
    pool: Pool, openings: Openings, slow: SlowAllocation
) -> None:
    entry = create(pool, b"file")
    put(entry, DATA)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(openings.resize, entry, MIB)
        await wait_until(lambda: slow.begun)
        pool.remove_writer(entry)
        # Whoever got its number would be allocated in its place.
        others = [create(pool, b"other %d" % number) for number in range(10)]
        slow.go.set()
    await settled(pool)
    assert files.is_intact(pool, b"file", DATA + bytes(MIB - len(DATA)))
    for other in others:
        assert pool.status(other).st_size == 0
        assert pool.status(other).st_blocks == 0
        pool.remove_writer(other)


async def test_a_file_removed_meanwhile_goes_afterwards(
    pool: Pool, openings: Openings, slow: SlowAllocation
) -> None:
    entry = await page(pool, b"page", DATA)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(openings.resize, entry, MIB)
        await wait_until(lambda: slow.begun)
        assert pool.names.unlink(pool.index.root, b"page") == -1
        slow.go.set()
    assert pool.tier.room().used_bytes == 0
    assert len(pool.index) == 1


async def test_changes_of_one_file_at_once(pool: Pool, openings: Openings) -> None:
    entry = await page(pool, b"page", DATA)
    sizes = [MIB, 10, 5 * MIB, 4096, 3 * MIB]
    async with trio.open_nursery() as nursery:
        for size in sizes:
            nursery.start_soon(openings.resize, entry, size)
    await settled(pool)
    assert entry.state == SEALED
    assert pool.status(entry).st_size in sizes
    assert files.stored_digest(pool, b"page").size == pool.status(entry).st_size


async def test_a_page_that_is_read_is_replaced_before_its_size_changes(
    pool: Pool, openings: Openings, face: KernelFace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "RETRY_SECONDS", 0.05)
    entry = await page(pool, b"page", DATA)
    fd = face.open_natively(entry)
    with pytest.raises(StalePage):
        await openings.resize(entry, 10)
    await openings.resize(find(pool, b"page"), 10)
    await settled(pool)
    assert files.is_intact(pool, b"page", DATA[:10])
    assert os.pread(fd, len(DATA), 0) == DATA
    face.close_natively(pool, entry, fd)


async def test_many_files_that_were_given_their_size_all_have_it(
    pool: Pool, openings: Openings, expect_log: LogGuard
) -> None:
    """Nothing is promised that is not there: the sum of what was given fits, the rest is refused."""
    expect_log("every page left is in use")
    given = []
    refused = 0
    for number in range(100):
        entry = create(pool, b"%02d" % number)
        try:
            await openings.resize(entry, 900 * KIB)
            given.append(entry)
        except OutOfRoom:
            refused += 1
            pool.remove_writer(entry)
    await settled(pool)
    await pool.evictor.keep_reserve()
    assert refused > 0
    assert len(given) * 900 * KIB <= 64 * MIB
    for entry in given:
        put(entry, bytes(900 * KIB))
    for entry in given:
        pool.remove_writer(entry)
    await settled(pool)
