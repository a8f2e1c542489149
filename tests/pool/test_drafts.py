"""From the creation of a file to its digest."""

from __future__ import annotations

import errno
import os

import pytest
import trio

from kvfs import sealing
from kvfs.errors import AttributeMissing, NoSuchPage
from kvfs.index import DRAFT, SEALED
from kvfs.opening import Openings
from kvfs.page import OWNER, SPARSE, Digest
from kvfs.pool import Pool
from tests.conftest import LogGuard
from tests.pool import files
from tests.pool.checks import check_pool
from tests.pool.faces import KernelFace
from tests.pool.files import KIB, MIB, create, page, pattern, put, settled, wait_until


async def test_a_new_file_is_an_empty_draft_that_is_held_for_writing(pool: Pool, face: KernelFace) -> None:
    entry = create(pool, b"new")
    assert entry.state == DRAFT
    assert pool.status(entry).st_size == 0
    assert pool.drafts == pool.writing == {entry}
    assert pool.pages == 0
    assert face.names == {(1, b"new"): entry.number}
    assert not face.records[entry.number].sealed
    with pytest.raises(FileExistsError):
        create(pool, b"new")
    pool.remove_writer(entry)


async def test_nothing_is_made_in_a_removed_directory(pool: Pool) -> None:
    directory = files.mkdir(pool, b"gone")
    kept = await page(pool, b"kept", b"bytes")
    directory.lookups = 1
    pool.names.remove_directory(pool.index.root, b"gone")
    with pytest.raises(NoSuchPage):
        create(pool, b"new", directory)
    with pytest.raises(NoSuchPage):
        files.mkdir(pool, b"new", directory)
    with pytest.raises(NoSuchPage):
        pool.names.link(kept, directory, b"new")
    with pytest.raises(NoSuchPage):
        pool.names.rename(pool.index.root, b"kept", directory, b"new", 0)
    files.forget(pool, directory.number, 1)
    assert pool.index.by_number(directory.number) is None


@pytest.mark.parametrize("size", [1, 4096, 256 * KIB, 256 * KIB + 1, 2 * MIB, 5 * MIB + 1])
async def test_a_closed_draft_becomes_a_page_with_the_digest_of_its_bytes(
    pool: Pool, face: KernelFace, size: int
) -> None:
    data = pattern(size)
    entry = await page(pool, b"page", data)
    assert files.is_intact(pool, b"page", data)
    assert pool.tier.get_attribute(b"page", OWNER) == files.OWNER.format().encode()
    assert entry.size == size
    assert pool.pages == pool.counters.sealed == 1
    assert pool.counters.sealed_bytes == size
    assert not pool.drafts
    assert face.records[entry.number].sealed
    assert len(pool.idle) == 1
    check_pool(pool, face)


async def test_the_owner_at_the_time_of_sealing_is_stored(pool: Pool) -> None:
    entry = create(pool, b"page")
    put(entry, b"bytes")
    changed = files.OWNER.__class__(files.OWNER.mode | 0o007, 7, 8)
    pool.set_owner(entry, changed)
    pool.remove_writer(entry)
    await settled(pool)
    assert pool.tier.get_attribute(b"page", OWNER) == changed.format().encode()
    pool.set_owner(entry, files.OWNER)
    assert pool.tier.get_attribute(b"page", OWNER) == files.OWNER.format().encode()


async def test_an_empty_file_stays_a_draft_and_holds_nothing(pool: Pool, openings: Openings) -> None:
    entry = create(pool, b"empty")
    pool.remove_writer(entry)
    await settled(pool)
    assert entry.state == DRAFT
    assert entry.holding is None
    assert not pool.drafts
    assert await files.read(openings, entry) == b""
    assert entry.holding is None
    await files.rewrite(openings, entry, b"not empty any more", truncate=False)
    await settled(pool)
    assert entry.state == SEALED


async def test_the_last_of_several_writers_seals(pool: Pool, openings: Openings) -> None:
    entry = create(pool, b"page")
    await openings.open_writing(entry, truncate=False)
    put(entry, b"first")
    pool.remove_writer(entry)
    await trio.sleep(0.02)
    assert entry.state == DRAFT
    put(entry, b"FIRST")
    pool.remove_writer(entry)
    await settled(pool)
    assert files.is_intact(pool, b"page", b"FIRST")


async def test_a_writable_mapping_delays_sealing(pool: Pool) -> None:
    data = pattern(MIB)
    entry = create(pool, b"page")
    put(entry, bytes(MIB))
    fd = files.tier_file(pool, b"page", os.O_RDWR)
    with files.mapped(fd, MIB, writable=True) as mapping:
        pool.remove_writer(entry)
        await trio.sleep(0.05)
        assert entry.state == DRAFT
        assert pool.unsealed == 1
        mapping[:] = data
    await settled(pool)
    assert files.is_intact(pool, b"page", data)


async def test_a_read_only_mapping_does_not(pool: Pool) -> None:
    entry = create(pool, b"page")
    put(entry, pattern(MIB))
    with files.mapped(files.tier_file(pool, b"page"), MIB, writable=False):
        pool.remove_writer(entry)
        await settled(pool)
        assert entry.state == SEALED


# Drafts that are dropped


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
