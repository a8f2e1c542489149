"""Opening a page for writing: in place when nobody has it, else as a new draft under its names."""

from __future__ import annotations

import os

import pytest
import trio

from kvfs.errors import AttributeMissing, StalePage
from kvfs.index import DRAFT, SEALED
from kvfs.opening import Openings
from kvfs.page import DIGEST, OWNER
from kvfs.pool import Pool
from tests.conftest import LogGuard
from tests.pool import files
from tests.pool.checks import check_pool
from tests.pool.faces import KernelFace
from tests.pool.files import MIB, find, page, pattern, put, settled
from tests.pool.readers import Reader

OLD = pattern(300_000)


pytestmark = pytest.mark.usefixtures("short_retry")

# In place


@pytest.mark.parametrize("truncate", [False, True])
async def test_a_page_that_nobody_has_is_a_draft_again_in_place(
    pool: Pool, openings: Openings, face: KernelFace, truncate: bool
) -> None:
    entry = await page(pool, b"page", OLD)
    pool.names.link(entry, pool.index.root, b"link")
    inode = pool.status(entry).st_ino
    await openings.open_writing(entry, truncate=truncate)
    assert entry.state == DRAFT
    assert entry.size == pool.pages == 0
    assert pool.status(entry).st_size == (0 if truncate else len(OLD))
    assert not face.records[entry.number].sealed
    with pytest.raises(AttributeMissing):
        pool.tier.get_attribute(b"page", DIGEST)
    check_pool(pool, face)
    put(entry, b"NEW")
    pool.remove_writer(entry)
    await settled(pool)
    assert pool.status(entry).st_ino == inode
    new = b"NEW" if truncate else b"NEW" + OLD[3:]
    assert files.is_intact(pool, b"page", new)
    assert files.is_intact(pool, b"link", new)
    assert not face.invalidated


async def test_a_page_that_was_read_and_closed_is_written_in_place(
    pool: Pool, openings: Openings, face: KernelFace
) -> None:
    entry = await page(pool, b"page", OLD)
    assert await files.read(openings, entry) == OLD
    face.close_natively(pool, entry, face.open_natively(entry))
    await files.rewrite(openings, entry, b"new")
    await settled(pool)
    assert files.is_intact(pool, b"page", b"new")
    assert pool.counters.sealed == 2


async def test_two_writers_share_the_draft(pool: Pool, openings: Openings) -> None:
    entry = await page(pool, b"page", b"aaaa")
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(openings.open_writing, entry, False)
    put(entry, b"b", 0)
    pool.remove_writer(entry)
    put(entry, b"c", 3)
    pool.remove_writer(entry)
    await settled(pool)
    assert files.is_intact(pool, b"page", b"baac")


# Beside its readers


@pytest.mark.parametrize("truncate", [False, True])
async def test_readers_keep_the_old_page_and_the_names_get_a_draft(
    pool: Pool, openings: Openings, face: KernelFace, kind_of_reader: type[Reader], truncate: bool
) -> None:
    entry = await page(pool, b"page", OLD)
    directory = files.mkdir(pool, b"d")
    for number in range(3):
        pool.names.link(entry, directory, b"link%d" % number)
    pool.tier.set_attribute(b"page", "user.mine", b"kept")
    entry.lookups = 1
    reader = kind_of_reader(pool, openings, face, entry)
    await reader.open()
    with pytest.raises(StalePage):
        await openings.open_writing(entry, truncate=truncate)
    draft = find(pool, b"page")
    assert draft is not entry
    assert draft.number != entry.number
    assert entry.names() == []
    paths = [b"page", b"d/link0", b"d/link1", b"d/link2"]
    for path in paths:
        assert find(pool, path) is draft
        assert pool.tier.stat(path).st_nlink == 4
        assert files.content(pool, path) == (b"" if truncate else OLD)
    assert sorted(face.invalidated) == sorted(
        [(1, b"page"), *((directory.number, b"link%d" % number) for number in range(3))]
    )
    assert draft.owner == files.OWNER
    assert pool.tier.get_attribute(b"page", "user.mine") == b"kept"
    check_pool(pool, face)
    await files.rewrite(openings, draft, b"NEW", truncate=truncate)
    await settled(pool)
    new = b"NEW" if truncate else b"NEW" + OLD[3:]
    for path in paths:
        assert files.is_intact(pool, path, new)
        assert pool.tier.get_attribute(path, OWNER) == files.OWNER.format().encode()
    assert reader.content() == OLD
    reader.close()
    await settled(pool)
    files.forget(pool, entry.number, 1)
    assert pool.index.by_number(entry.number) is None
    assert entry.holding is None
    used = pool.tier.stat(b"page").st_blocks * 512
    assert pool.tier.room().used_bytes == used, "the old page is freed with its last reader"


@pytest.mark.parametrize("truncate", [False, True])
async def test_writers_that_come_at_once_all_get_the_new_draft(
    pool: Pool, openings: Openings, face: KernelFace, kind_of_reader: type[Reader], truncate: bool
) -> None:
    entry = await page(pool, b"page", OLD)
    entry.lookups = 1
    reader = kind_of_reader(pool, openings, face, entry)
    await reader.open()
    stale = 0

    async def open_for_writing() -> None:
        nonlocal stale
        try:
            await openings.open_writing(entry, truncate=truncate)
        except StalePage:
            stale += 1

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(open_for_writing)
    await open_for_writing()  # what the kernel sent before it heard of the new draft
    assert stale == 6, "a writer was given the page that readers hold, without a name"
    assert reader.content() == OLD
    with pytest.raises(StalePage):
        await openings.resize(entry, 10)
    assert reader.content() == OLD
    reader.close()


async def test_readers_that_come_late_read_the_page_that_they_found(
    pool: Pool, openings: Openings, face: KernelFace
) -> None:
    entry = await page(pool, b"page", OLD)
    entry.lookups = 1
    await openings.open_reading(entry)
    with pytest.raises(StalePage):
        await openings.open_writing(entry, truncate=True)
    assert await files.read(openings, entry) == OLD
    openings.close_reading(entry)
    assert await files.read(openings, entry) == OLD
    files.forget(pool, entry.number, 1)
    assert entry.holding is None


async def test_a_draft_waits_for_the_writer_that_was_sent_back(pool: Pool, openings: Openings) -> None:
    entry = await page(pool, b"page", OLD)
    await openings.open_reading(entry)
    with pytest.raises(StalePage):
        await openings.open_writing(entry, truncate=False)
    draft = find(pool, b"page")
    await trio.sleep(0.05)
    assert draft.state == DRAFT
    await openings.open_writing(draft, truncate=False)  # in place: nothing is copied again
    put(draft, b"NEW")
    pool.remove_writer(draft)
    await settled(pool)
    assert find(pool, b"page") is draft
    openings.close_reading(entry)


async def test_a_draft_whose_writer_never_comes_back_is_a_page_again(pool: Pool, openings: Openings) -> None:
    entry = await page(pool, b"page", OLD)
    await openings.open_reading(entry)
    with pytest.raises(StalePage):
        await openings.open_writing(entry, truncate=False)
    await settled(pool)
    assert find(pool, b"page").state == SEALED
    assert files.is_intact(pool, b"page", OLD)
    openings.close_reading(entry)


@pytest.mark.parametrize("read", [False, True])
async def test_an_empty_draft_whose_writer_never_comes_back_goes(
    pool: Pool, openings: Openings, face: KernelFace, expect_log: LogGuard, read: bool
) -> None:
    """The program was killed inside open: what it wanted to overwrite is not to be found any more."""
    expect_log("page is dropped: the program that was to overwrite it never came back")
    entry = await page(pool, b"page", OLD)
    pool.names.link(entry, pool.index.root, b"link")
    holding = await openings.open_reading(entry)
    with pytest.raises(StalePage):
        await openings.open_writing(entry, truncate=True)
    draft = find(pool, b"page")
    if read:
        assert await files.read(openings, draft) == b""
    await settled(pool)
    assert draft.parent is None
    assert pool.tier.list(b"") == []
    assert pool.counters.failures == {"abandoned": 1}
    assert {name for _, name in face.invalidated} == {b"page", b"link"}
    assert os.pread(holding.read_fd, len(OLD), 0) == OLD
    openings.close_reading(entry)
    assert pool.tier.room().used_bytes == 0


async def test_an_empty_draft_whose_writer_came_back_and_wrote_nothing_stays(
    pool: Pool, openings: Openings
) -> None:
    entry = await page(pool, b"page", OLD)
    await openings.open_reading(entry)
    with pytest.raises(StalePage):
        await openings.open_writing(entry, truncate=True)
    draft = find(pool, b"page")
    await openings.open_writing(draft, truncate=True)
    pool.remove_writer(draft)
    await settled(pool)
    assert find(pool, b"page") is draft
    assert pool.status(draft).st_size == 0
    openings.close_reading(entry)


async def test_a_page_that_had_holes_has_them_in_its_copy(pool: Pool, openings: Openings) -> None:
    entry = files.create(pool, b"sparse")
    await openings.resize(entry, MIB)
    pool.remove_writer(entry)
    await settled(pool)
    await openings.open_reading(entry)
    with pytest.raises(StalePage):
        await openings.open_writing(entry, truncate=False)
    await settled(pool)
    assert files.is_intact(pool, b"sparse", bytes(MIB))
    openings.close_reading(entry)
