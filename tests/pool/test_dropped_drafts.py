"""Drafts that are dropped instead of sealed."""

from __future__ import annotations

import errno
import os

import pytest

from kvfs import sealing
from kvfs.errors import AttributeMissing
from kvfs.index import SEALED
from kvfs.opening import Openings
from kvfs.page import SPARSE, Digest
from kvfs.pool import Pool
from tests.conftest import LogGuard
from tests.pool import files
from tests.pool.faces import KernelFace
from tests.pool.files import MIB, create, page, pattern, put, settled, wait_until


async def dropped(pool: Pool, name: bytes, reason: str) -> None:
    await settled(pool)
    assert pool.index.find(name) is None
    assert pool.tier.list(b"") == []
    assert pool.counters.failures == {reason: 1}
    assert pool.tier.room().used_bytes == 0


@pytest.mark.parametrize("ranges", [[(3 * MIB, 4096)], [(0, 4096), (3 * MIB, 100)], [(4 * MIB, 2 * MIB)]])
async def test_a_draft_with_holes_is_dropped(
    pool: Pool, face: KernelFace, expect_log: LogGuard, ranges: list[tuple[int, int]]
) -> None:
    expect_log("holes is dropped: parts of it were never written")
    entry = create(pool, b"holes")
    for offset, size in ranges:
        put(entry, pattern(size), offset)
    pool.remove_writer(entry)
    await dropped(pool, b"holes", "holes")
    assert face.invalidated == [(1, b"holes")]


async def test_a_hole_at_the_end_is_one_too(pool: Pool, expect_log: LogGuard) -> None:
    expect_log("holes is dropped")
    entry = create(pool, b"holes")
    put(entry, pattern(4096))
    assert entry.holding is not None
    os.ftruncate(entry.holding.write_fd, 100_000)  # as nobody can through the mount
    pool.remove_writer(entry)
    await dropped(pool, b"holes", "holes")


async def test_holes_are_meant_where_a_program_gave_the_size(pool: Pool, openings: Openings) -> None:
    entry = create(pool, b"sparse")
    await openings.resize(entry, 4 * MIB)
    put(entry, b"at the end", 4 * MIB - 10)
    pool.remove_writer(entry)
    await settled(pool)
    assert files.is_intact(pool, b"sparse", bytes(4 * MIB - 10) + b"at the end")
    assert pool.tier.get_attribute(b"sparse", SPARSE) == b"1"
    await files.rewrite(openings, entry, b"x", truncate=False)
    await settled(pool)
    assert entry.state == SEALED, "what was sparse may stay so"
    await files.rewrite(openings, entry, b"whole")
    await settled(pool)
    with pytest.raises(AttributeMissing):
        pool.tier.get_attribute(b"sparse", SPARSE)


async def test_holes_are_meant_where_the_channel_saw_fallocate(pool: Pool, face: KernelFace) -> None:
    entry = create(pool, b"sparse")
    put(entry, b"far", 100_000)
    face.marks[entry.number] = (False, True)
    pool.remove_writer(entry)
    await settled(pool)
    assert entry.state == SEALED


async def test_the_draft_of_a_killed_writer_is_dropped(pool: Pool, expect_log: LogGuard) -> None:
    expect_log("half is dropped: its writer was ended by a signal")
    entry = create(pool, b"half")
    put(entry, b"half of it")
    pool.remove_writer(entry, "killed")
    await dropped(pool, b"half", "killed")


async def test_one_of_two_writers_that_is_killed_spoils_the_draft(
    pool: Pool, openings: Openings, expect_log: LogGuard
) -> None:
    expect_log("half is dropped")
    entry = create(pool, b"half")
    await openings.open_writing(entry, truncate=False)
    pool.remove_writer(entry, "killed")
    put(entry, b"all of it")
    pool.remove_writer(entry)
    await dropped(pool, b"half", "killed")


async def test_a_writer_that_begins_anew_makes_it_good(pool: Pool, openings: Openings) -> None:
    entry = create(pool, b"page")
    put(entry, bytes(4096))
    with files.mapped(files.tier_file(pool, b"page", os.O_RDWR), 4096, writable=True):
        pool.remove_writer(entry, "killed")  # and the sealing has to wait
        await openings.open_writing(entry, truncate=True)
    put(entry, b"all of it")
    pool.remove_writer(entry)
    await settled(pool)
    assert files.is_intact(pool, b"page", b"all of it")


async def test_a_killed_writer_that_wrote_nothing_leaves_no_name(pool: Pool, expect_log: LogGuard) -> None:
    expect_log("nothing is dropped: its writer was ended by a signal")
    pool.remove_writer(create(pool, b"nothing"), "killed")
    await dropped(pool, b"nothing", "killed")


async def test_a_killed_writer_that_cut_a_page_short_leaves_no_name(
    pool: Pool, openings: Openings, expect_log: LogGuard
) -> None:
    expect_log("cut is dropped: its writer was ended by a signal")
    entry = await page(pool, b"cut", b"bytes")
    await openings.open_writing(entry, truncate=True)
    pool.remove_writer(entry, "killed")
    await dropped(pool, b"cut", "killed")


async def test_a_killed_holder_of_an_empty_lock_file_leaves_it(pool: Pool, openings: Openings) -> None:
    entry = create(pool, b"lock")
    pool.remove_writer(entry)
    await settled(pool)
    for truncate in (False, True):
        await openings.open_writing(entry, truncate=truncate)
        pool.remove_writer(entry, "killed")
        await settled(pool)
        assert pool.index.find(b"lock") is entry
    assert not pool.counters.failures


async def test_a_draft_whose_write_was_refused_is_dropped(
    pool: Pool, face: KernelFace, expect_log: LogGuard
) -> None:
    expect_log("short is dropped: the pool was full")
    entry = create(pool, b"short")
    put(entry, b"a part")
    face.marks[entry.number] = (True, False)
    pool.remove_writer(entry)
    await dropped(pool, b"short", "no-room")


@pytest.mark.parametrize("tier", [8 * MIB], indirect=True)
@pytest.mark.parametrize("polled", [False, True])
async def test_a_draft_that_was_open_while_the_tmpfs_was_full_is_dropped(
    pool: Pool, expect_log: LogGuard, polled: bool
) -> None:
    expect_log("short is dropped: the pool was full")
    if polled:
        expect_log("writers get ENOSPC")
    entry = create(pool, b"short")
    with pytest.raises(OSError, match="No space") as refusal:
        put(entry, pattern(9 * MIB))
    assert refusal.value.errno == errno.ENOSPC
    if polled:
        await pool.evictor.keep_reserve()
        assert entry.holding is not None
        os.ftruncate(entry.holding.write_fd, 100)  # there is room again before it is closed
    pool.remove_writer(entry)
    await dropped(pool, b"short", "no-room")


async def test_a_draft_that_cannot_be_read_is_dropped(
    pool: Pool, expect_log: LogGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_fd: int) -> Digest:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(sealing, "digest_file", fail)
    expect_log("bad is dropped: its bytes could not be read: Input/output error")
    entry = create(pool, b"bad")
    put(entry, b"bytes")
    pool.remove_writer(entry)
    await dropped(pool, b"bad", "io-error")


async def test_a_reader_keeps_a_draft_that_is_dropped(
    pool: Pool, openings: Openings, expect_log: LogGuard
) -> None:
    expect_log("half is dropped")
    entry = create(pool, b"half")
    put(entry, b"half of it")
    holding = await openings.open_reading(entry)
    pool.remove_writer(entry, "killed")
    await wait_until(lambda: pool.index.find(b"half") is None)
    assert os.pread(holding.read_fd, 100, 0) == b"half of it"
    openings.close_reading(entry)
    assert entry.holding is None
    assert pool.tier.room().used_bytes == 0
