"""Pages between DRAM and the SSD: down after they are sealed, up when they are opened, with their names."""

from __future__ import annotations

import os

import pytest
import trio

from kvfs.errors import DirectoryNotEmpty, NameTaken, StalePage
from kvfs.index import DRAFT, SEALED, STORED, Directory
from kvfs.opening import Openings
from kvfs.page import Owner
from kvfs.pool import Pool
from kvfs.storage.described import RESIDENT
from kvfs.storage.storage import Storage
from kvfs.syscalls import RENAME_EXCHANGE, RENAME_NOREPLACE
from tests.conftest import LogGuard
from tests.pool import files
from tests.pool.files import MIB, page, pattern, read, rewrite, settled, wait_until
from tests.storage.disks import demoted, empty_dram, on_ssd, stored

OLD = pattern(100_000)
NEW = pattern(3 * MIB + 5, 2)


@pytest.mark.parametrize("size", [1, 4096, 100_000, 3 * MIB + 5])
async def test_a_page_is_copied_leaves_dram_and_comes_back(
    pool: Pool, storage: Storage, openings: Openings, size: int
) -> None:
    data = pattern(size)
    entry = await demoted(pool, b"page", data)
    assert on_ssd(pool, b"page") == data
    assert pool.tier.list(b"") == []
    assert pool.pages == 0
    status = pool.status(entry)
    assert (status.st_size, status.st_nlink, status.st_uid) == (size, 1, entry.owner.uid)
    assert await read(openings, entry) == data
    assert (entry.state, entry.stored) == (SEALED, RESIDENT)
    assert files.is_intact(pool, b"page", data)
    assert pool.status(entry).st_mtime_ns == status.st_mtime_ns
    assert storage.promotions.read == 1
    assert await read(openings, entry) == data
    assert storage.promotions.read == 1


async def test_a_page_without_a_copy_gets_one_before_it_leaves(
    pool: Pool, storage: Storage, openings: Openings
) -> None:
    storage.demotions.unstored.settle_seconds = 1000
    entries = [await page(pool, b"%d" % number, pattern(MIB, number)) for number in range(8)]
    assert await pool.evictor.free(8 * MIB) == 8 * MIB
    assert {entry.state for entry in entries} == {STORED}
    for number, entry in enumerate(entries):
        assert await read(openings, entry) == pattern(MIB, number)


async def test_many_ask_for_one_page_and_it_is_read_once(
    pool: Pool, storage: Storage, openings: Openings
) -> None:
    entry = await demoted(pool, b"page", NEW)
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(read, openings, entry)
    assert storage.promotions.read == 1
    assert entry.hits == 20


async def test_overwriting_takes_the_copy_away(pool: Pool, openings: Openings) -> None:
    entry = await stored(pool, b"page", OLD)
    await openings.open_writing(entry, truncate=True)
    assert entry.stored is None
    files.put(entry, NEW)
    pool.remove_writer(entry)
    await settled(pool)
    await wait_until(lambda: entry.stored == RESIDENT)
    assert on_ssd(pool, b"page") == NEW


@pytest.mark.parametrize("truncate", [True, False])
async def test_a_page_that_is_only_there_is_written_again(
    pool: Pool, openings: Openings, truncate: bool
) -> None:
    entry = await demoted(pool, b"page", OLD)
    await rewrite(openings, entry, b"new", truncate=truncate)
    assert entry.state == DRAFT
    await settled(pool)
    await wait_until(lambda: entry.stored == RESIDENT)
    expected = b"new" if truncate else b"new" + OLD[3:]
    assert files.is_intact(pool, b"page", expected)
    assert on_ssd(pool, b"page") == expected


async def test_readers_keep_a_page_whose_name_is_written_anew(
    pool: Pool, openings: Openings, short_retry: None
) -> None:
    entry = await demoted(pool, b"page", OLD)
    holding = await openings.open_reading(entry)
    with pytest.raises(StalePage):
        await openings.open_writing(entry, truncate=True)
    await rewrite(openings, files.find(pool, b"page"), NEW)
    await settled(pool)
    assert os.pread(holding.read_fd, len(OLD), 0) == OLD
    openings.close_reading(entry)
    fresh = files.find(pool, b"page")
    await wait_until(lambda: fresh.stored == RESIDENT)
    assert on_ssd(pool, b"page") == NEW


async def test_removing_takes_it_away_there_too(pool: Pool, storage: Storage) -> None:
    await stored(pool, b"one", OLD)
    await demoted(pool, b"other", OLD)
    for name in (b"one", b"other"):
        assert pool.names.unlink(pool.index.root, name) == -1
        await storage.history.settled()
        assert on_ssd(pool, name) is None
    assert len(pool.index) == 1


# Names


@pytest.mark.parametrize("target", [None, "draft", "page", "stored", "demoted"])
@pytest.mark.parametrize("source", ["page", "stored", "demoted"])
@pytest.mark.parametrize("flags", [0, RENAME_EXCHANGE])
async def test_renames_between_whatever_is_where(
    pool: Pool, storage: Storage, openings: Openings, source: str, target: str | None, flags: int
) -> None:
    if target is None and flags:
        pytest.skip("an exchange needs two names")
    makers = {"page": page, "stored": stored, "demoted": demoted}
    storage.demotions.unstored.settle_seconds = (
        1000 if "page" in (source, target) and {source, target} == {"page"} else 0
    )
    other = None
    if target == "draft":
        other = files.create(pool, b"other")
    elif target is not None:
        other = await makers[target](pool, b"other", NEW)
    one = await makers[source](pool, b"one", OLD)
    root = pool.index.root
    fd = pool.names.rename(root, b"one", root, b"other", flags)
    if fd >= 0:
        os.close(fd)
    assert files.find(pool, b"other") is one
    assert await read(openings, one) == OLD
    if flags:
        assert files.find(pool, b"one") is other
    if target == "draft" and other is not None:
        pool.remove_writer(other)
    elif flags and other is not None:
        assert await read(openings, other) == NEW
    await settled(pool)
    await storage.demotions.finish()
    assert on_ssd(pool, b"other") == OLD
    assert on_ssd(pool, b"one") == (NEW if flags and target != "draft" else None)


async def test_names_that_only_the_ssd_has_are_taken(pool: Pool) -> None:
    await demoted(pool, b"taken", OLD)
    one = await page(pool, b"one", OLD)
    root = pool.index.root
    with pytest.raises(NameTaken):
        files.create(pool, b"taken")
    with pytest.raises(NameTaken):
        files.mkdir(pool, b"taken")
    with pytest.raises(NameTaken):
        pool.names.link(one, root, b"taken")
    with pytest.raises(NameTaken):
        pool.names.rename(root, b"one", root, b"taken", RENAME_NOREPLACE)


async def test_directories_move_with_all_that_is_in_them(
    pool: Pool, storage: Storage, openings: Openings
) -> None:
    directory = files.mkdir(pool, b"directory")
    for name in (b"one", b"two"):
        await page(pool, name, OLD, directory)
    await storage.demotions.finish()
    await empty_dram(pool)
    root = pool.index.root
    with pytest.raises(DirectoryNotEmpty):
        pool.names.remove_directory(root, b"directory")
    files.mkdir(pool, b"empty")
    with pytest.raises(DirectoryNotEmpty):
        pool.names.rename(root, b"empty", root, b"directory", 0)
    assert pool.names.rename(root, b"directory", root, b"moved", 0) == -1
    assert await read(openings, files.find(pool, b"moved/one")) == OLD
    await storage.history.settled()
    assert on_ssd(pool, b"moved/two") == OLD
    moved = files.find(pool, b"moved")
    assert isinstance(moved, Directory)
    for name in (b"one", b"two"):
        fd = pool.names.unlink(moved, name)
        if fd >= 0:
            os.close(fd)
    pool.names.remove_directory(root, b"moved")
    await storage.history.settled()


async def test_hard_links_are_one_file_there_as_well(
    pool: Pool, storage: Storage, openings: Openings
) -> None:
    entry = await stored(pool, b"page", OLD)
    root = pool.index.root
    pool.names.link(entry, root, b"before")
    await empty_dram(pool)
    assert entry.state == STORED
    pool.names.link(entry, root, b"after")
    assert pool.status(entry).st_nlink == 3
    await storage.history.settled()
    assert storage.tier.stat(b"page").st_nlink == 3
    assert await read(openings, entry) == OLD
    assert pool.tier.stat(b"after").st_nlink == 3
    assert pool.names.unlink(root, b"page") == -1
    await storage.history.settled()
    assert on_ssd(pool, b"page") is None
    assert on_ssd(pool, b"before") == OLD


async def test_owners_and_times_are_kept_there(pool: Pool, storage: Storage) -> None:
    entry = await demoted(pool, b"page", OLD)
    owner = Owner(entry.owner.mode, 77, 78)
    pool.set_owner(entry, owner)
    pool.set_times(entry, 5_000_000_000, 6_000_000_000)
    status = pool.status(entry)
    assert (status.st_uid, status.st_atime_ns, status.st_mtime_ns) == (77, 5_000_000_000, 6_000_000_000)
    await storage.history.settled()
    assert Owner.parse(storage.tier.get_attribute(b"page", "owner")) == owner
    assert storage.tier.stat(b"page").st_mtime_ns == 6_000_000_000


# Damage


@pytest.mark.parametrize("kind", ["byte", "shorter", "longer", "gone"])
async def test_a_damaged_page_is_a_miss_and_can_be_stored_again(
    pool: Pool, storage: Storage, openings: Openings, expect_log: LogGuard, kind: str
) -> None:
    entry = await demoted(pool, b"page", OLD)
    fd = storage.tier.open(b"page", os.O_RDWR)
    if kind == "byte":
        os.pwrite(fd, bytes([OLD[5000] ^ 1]), 5000)
    elif kind == "gone":
        storage.tier.unlink(b"page")
    else:
        os.ftruncate(fd, len(OLD) + (1 if kind == "longer" else -1))
    os.close(fd)
    if kind != "gone":
        expect_log("quarantined")
    with pytest.raises(StalePage):
        await read(openings, entry)
    assert pool.index.find(b"page") is None
    await storage.history.settled()
    assert dict(pool.counters.misses) == {"vanished" if kind == "gone" else "corrupt": 1}
    assert len(storage.tier.list_quarantined()) == (kind != "gone")
    again = await stored(pool, b"page", OLD)
    assert await read(openings, again) == OLD
