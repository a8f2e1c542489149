"""The time of a directory: it changes with the names that programs make and remove, and with nothing else."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from kvfs import adoption
from kvfs.errors import StalePage
from kvfs.fs.attributes import ExtendedAttributes, entry_attributes
from kvfs.index import SEALED, Directory
from kvfs.opening import Openings
from kvfs.page import Owner
from kvfs.pool import Pool
from kvfs.syscalls import RENAME_EXCHANGE
from kvfs.tiers.dram import DramTier
from tests.pool import files
from tests.pool.conftest import ROOT_OWNER
from tests.pool.faces import KernelFace
from tests.pool.files import MIB, page, pattern, settled

OLD = 1_000_000_000_000_000_007
DATA = pattern(MIB)


def age(pool: Pool, *directories: Directory) -> None:
    """A program sets the time of modification."""
    for directory in directories:
        pool.set_times(directory, OLD, OLD)


def shown(pool: Pool, directory: Directory) -> tuple[int, int, int]:
    """Times of modification and of change, and the size, as stat shows them."""
    attributes = entry_attributes(directory, pool.status(directory))
    return attributes.st_mtime_ns, attributes.st_ctime_ns, attributes.st_size


@pytest.mark.parametrize("is_busy", [True, False])
async def test_eviction_does_not_show(pool: Pool, face: KernelFace, is_busy: bool) -> None:
    directory = files.mkdir(pool, b"directory")
    pages = [await page(pool, b"%d" % number, DATA, directory) for number in range(3)]
    pool.names.link(pages[0], pool.index.root, b"link")
    if not is_busy:
        pool.directories.close()
    age(pool, directory, pool.index.root)
    before = shown(pool, directory), shown(pool, pool.index.root)
    await pool.evictor.free(3 * MIB)
    assert not directory.children
    assert (shown(pool, directory), shown(pool, pool.index.root)) == before
    assert before[0][0] == OLD
    assert (directory.number in face.directories) == is_busy, "the channel tells of it again"


async def test_the_channel_says_nothing_of_a_directory_while_dram_changes(
    pool: Pool, face: KernelFace
) -> None:
    directory = files.mkdir(pool, b"directory")
    await page(pool, b"page", DATA, directory)
    assert directory.number in face.directories
    with pool.directories.unseen(directory):
        assert directory.number not in face.directories
    assert directory.number in face.directories


async def test_a_draft_in_the_place_of_a_page_does_not_show(pool: Pool, openings: Openings) -> None:
    directory = files.mkdir(pool, b"directory")
    entry = await page(pool, b"page", DATA, directory)
    pool.names.link(entry, pool.index.root, b"link")
    await openings.open_reading(entry)
    age(pool, directory, pool.index.root)
    before = shown(pool, directory), shown(pool, pool.index.root)
    with pytest.raises(StalePage):
        await openings.open_writing(entry, truncate=False)
    assert (shown(pool, directory), shown(pool, pool.index.root)) == before
    openings.close_reading(entry)
    pool.remove_everywhere(directory.children[b"page"])
    assert (shown(pool, directory), shown(pool, pool.index.root)) == before


def make(pool: Pool, directory: Directory) -> None:
    pool.remove_writer(files.create(pool, b"new", directory))


def make_directory(pool: Pool, directory: Directory) -> None:
    files.mkdir(pool, b"new", directory)


def make_fifo(pool: Pool, directory: Directory) -> None:
    pool.names.create_other(directory, b"new", Owner(stat.S_IFIFO | 0o600, 1, 1))


def link(pool: Pool, directory: Directory) -> None:
    pool.names.link(directory.children[b"page"], directory, b"new")


def unlink(pool: Pool, directory: Directory) -> None:
    os.close(pool.names.unlink(directory, b"page"))


def rename(pool: Pool, directory: Directory) -> None:
    pool.names.rename(directory, b"page", directory, b"new", 0)


def exchange(pool: Pool, directory: Directory) -> None:
    pool.names.rename(directory, b"page", directory, b"below", RENAME_EXCHANGE)


def remove_directory(pool: Pool, directory: Directory) -> None:
    pool.names.remove_directory(directory, b"below")


@pytest.mark.parametrize(
    "change", [make, make_directory, make_fifo, link, unlink, rename, exchange, remove_directory]
)
async def test_what_programs_do_shows(pool: Pool, change: Callable[[Pool, Directory], None]) -> None:
    told: list[Directory] = []
    pool.directories.on_changed = told.append
    directory = files.mkdir(pool, b"directory")
    files.mkdir(pool, b"below", directory)
    await page(pool, b"page", DATA, directory)
    age(pool, directory)
    await trio.sleep(0.005)
    told.clear()
    change(pool, directory)
    modified, changed, size = shown(pool, directory)
    assert modified > OLD
    assert changed == max(modified, directory.changed_ns)
    assert size == 0
    assert directory in told
    await settled(pool)


async def test_a_change_of_the_directory_itself_shows_as_its_time_of_change(pool: Pool) -> None:
    directory = files.mkdir(pool, b"directory")
    attributes = ExtendedAttributes(pool)
    for own in (True, False):
        before = shown(pool, directory)
        await trio.sleep(0.001)
        if own:
            pool.set_owner(directory, Owner(stat.S_IFDIR | 0o700, 7, 8))
        else:
            age(pool, directory)
        assert shown(pool, directory)[1] > before[1]
    for step in (attributes.set(directory, "user.name", b"1"), attributes.remove(directory, "user.name")):
        before = shown(pool, directory)
        await trio.sleep(0.001)
        await step
        after = shown(pool, directory)
        assert after[0] == before[0] == OLD
        assert after[1] > before[1]


async def test_it_outlives_the_daemon_with_the_drafts_dropped(open_files: None, place: Path) -> None:
    tier = DramTier.attach(place, 64 * MIB, "prefer", "")
    pool = Pool(tier, ROOT_OWNER)
    async with trio.open_nursery() as nursery:
        pool.start(nursery)
        directory = files.mkdir(pool, b"directory")
        entry = await page(pool, b"page", DATA, directory)
        draft = files.create(pool, b"draft", directory)
        age(pool, directory, pool.index.root)
        assert (entry.state, draft.size) == (SEALED, 0)
        nursery.cancel_scope.cancel()
    pool.close()
    tier.close(keep=True)
    tier = DramTier.attach(place, 64 * MIB, "prefer", "")
    again = Pool(tier, ROOT_OWNER)
    adoption.adopt(again)
    found = again.index.find(b"directory")
    assert isinstance(found, Directory)
    assert set(found.children) == {b"page"}
    assert shown(again, found) == shown(again, again.index.root) == (OLD, OLD, 0)
    again.close()
    tier.close(keep=False)
