"""From the creation of a file to its digest."""

from __future__ import annotations

import os

import pytest
import trio

from kvfs.errors import NoSuchPage
from kvfs.index import DRAFT, SEALED
from kvfs.opening import Openings
from kvfs.page import OWNER
from kvfs.pool import Pool
from tests.pool import files
from tests.pool.checks import check_pool
from tests.pool.faces import KernelFace
from tests.pool.files import KIB, MIB, create, page, pattern, put, settled


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
