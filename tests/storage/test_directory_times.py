"""The time of a directory while its pages go down and come up, and on the next host."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfs.fs.attributes import ExtendedAttributes, entry_attributes
from kvfs.index import SEALED, STORED, Directory, Entry
from kvfs.opening import Openings
from kvfs.pool import Pool
from kvfs.storage.described import RESIDENT
from kvfs.storage.directory_times import MTIME, recorded_ns
from kvfs.storage.storage import Storage
from tests.pool import files
from tests.pool.files import MIB, page, pattern, read, wait_until
from tests.pool.test_directory_times import OLD, age, shown
from tests.storage.disks import empty_dram
from tests.storage.test_restart import daemon

DATA = pattern(MIB)


def page_shown(pool: Pool, entry: Entry) -> tuple[int, int, int]:
    """Times of modification and of change, and the size, as stat shows them."""
    attributes = entry_attributes(entry, pool.status(entry))
    return attributes.st_mtime_ns, attributes.st_ctime_ns, attributes.st_size


async def demoted(pool: Pool, directory: Directory, name: bytes) -> Entry:
    entry = await page(pool, name, DATA, directory)
    await wait_until(lambda: entry.stored == RESIDENT)
    await empty_dram(pool)
    return entry


async def test_pages_that_go_down_and_come_up_do_not_show(pool: Pool, openings: Openings) -> None:
    root, directory = pool.index.root, files.mkdir(pool, b"directory")
    entry = await demoted(pool, directory, b"page")
    pool.names.link(entry, root, b"link")
    age(pool, root, directory)
    before = shown(pool, root), shown(pool, directory)
    assert await read(openings, entry) == DATA
    assert entry.state == SEALED
    assert (shown(pool, root), shown(pool, directory)) == before
    await empty_dram(pool)
    assert (shown(pool, root), shown(pool, directory)) == before
    await openings.open_writing(entry, truncate=True)
    assert (shown(pool, root), shown(pool, directory)) == before
    pool.remove_writer(entry)


async def test_a_page_does_not_seem_to_change_on_its_way(pool: Pool, openings: Openings) -> None:
    entry = files.create(pool, b"page")
    files.put(entry, DATA)
    pool.remove_writer(entry)
    attributes = ExtendedAttributes(pool)
    for _ in range(2):
        before = page_shown(pool, entry)
        await wait_until(lambda: entry.state == SEALED and entry.stored == RESIDENT)
        assert page_shown(pool, entry) == before
        await empty_dram(pool)
        assert entry.state == STORED
        assert page_shown(pool, entry) == before
        await read(openings, entry)
        assert page_shown(pool, entry) == before
        await attributes.set(entry, "user.name", b"value")
        assert page_shown(pool, entry)[1] > before[1]


@pytest.mark.parametrize("change", ["unlink", "rename", "link", "replace"])
async def test_names_of_pages_that_are_only_on_the_ssd_show(pool: Pool, change: str) -> None:
    root, directory = pool.index.root, files.mkdir(pool, b"directory")
    entry = await demoted(pool, directory, b"page")
    await page(pool, b"new", DATA)
    age(pool, root, directory)
    if change == "unlink":
        pool.names.unlink(directory, b"page")
    elif change == "rename":
        pool.names.rename(directory, b"page", root, b"moved", 0)
    elif change == "link":
        pool.names.link(entry, directory, b"link")
    else:
        pool.names.rename(root, b"new", directory, b"page", 0)
    assert shown(pool, directory)[0] > OLD
    assert (shown(pool, root)[0] > OLD) == (change in ("rename", "replace"))


@pytest.mark.parametrize("keep_dram", [True, False])
async def test_it_outlives_the_daemon_and_the_host(base: Path, keep_dram: bool) -> None:
    async with daemon(base, keep_dram=keep_dram) as pool:
        outer = files.mkdir(pool, b"outer")
        inner = files.mkdir(pool, b"inner", outer)
        entry = await page(pool, b"page", DATA, inner)
        age(pool, pool.index.root, outer, inner)
        assert pool.storage is not None
        pool.storage.directory_times.record_all()
        await wait_until(lambda: entry.stored == RESIDENT)
        await pool.storage.history.settled()
    for keep in (keep_dram, False):
        async with daemon(base, keep_dram=keep) as pool:
            for path in (b"", b"outer", b"outer/inner"):
                directory = pool.index.find(path)
                assert isinstance(directory, Directory)
                assert shown(pool, directory) == (OLD, OLD, 0), path


async def test_what_changed_is_told_to_the_ssd_now_and_then(pool: Pool, storage: Storage) -> None:
    directory = files.mkdir(pool, b"directory")
    await storage.history.settled()
    age(pool, directory)
    gone = files.mkdir(pool, b"gone")
    pool.names.remove_directory(pool.index.root, b"gone")
    storage.directory_times.record_all()
    await storage.history.settled()
    assert storage.tier.get_attribute(b"directory", MTIME) == b"%d" % OLD
    assert pool.index.by_number(gone.number) is None
    before = len(storage.history)
    storage.directory_times.record_all()
    assert len(storage.history) == before, "nothing changed since"


@pytest.mark.parametrize("value", [b"", b"yesterday", b"\xff"])
def test_a_damaged_time_is_none(value: bytes) -> None:
    assert recorded_ns({MTIME: value}, 5) == 5
    assert recorded_ns({}, 5) == 5
    assert recorded_ns({MTIME: b"7"}, 5) == 7


@pytest.fixture
def base(open_files: None, tmp_path: Path) -> Path:
    return tmp_path
