"""Opening for reading, and the entries whose files are gone."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial

import pytest
import trio

from kvfs import opening, sealing
from kvfs.errors import NoSuchPage, StalePage
from kvfs.index import DRAFT, UNCHECKED
from kvfs.opening import Openings
from kvfs.page import Digest
from kvfs.pool import Pool
from kvfs.syscalls import RENAME_EXCHANGE
from tests.conftest import LogGuard
from tests.pool import files
from tests.pool.checks import check_pool
from tests.pool.faces import KernelFace
from tests.pool.files import create, find, page, pattern, put, read, settled

OLD = pattern(100_000)


async def test_opens_of_pages_are_hits_whoever_answers(
    pool: Pool, openings: Openings, face: KernelFace
) -> None:
    entry = await page(pool, b"page", OLD)
    for _ in range(3):
        assert await read(openings, entry) == OLD
    for _ in range(4):
        face.close_natively(pool, entry, face.open_natively(entry))
    pool.uses.collect()
    assert entry.hits == pool.counters.hits == 7
    assert not pool.counters.misses


async def test_opens_of_drafts_are_neither_hits_nor_misses(pool: Pool, openings: Openings) -> None:
    entry = create(pool, b"draft")
    put(entry, b"some")
    assert await read(openings, entry) == b"some"
    assert pool.counters.hits == 0
    assert not pool.counters.misses
    pool.remove_writer(entry)


async def test_natively_counted_opens_of_what_is_gone_are_hits_all_the_same(
    pool: Pool, openings: Openings, face: KernelFace
) -> None:
    entry = await page(pool, b"page", OLD)
    other = await page(pool, b"other", OLD)
    await page(pool, b"hottest", OLD)
    face.close_natively(pool, entry, face.open_natively(entry))
    os.close(pool.names.unlink(pool.index.root, b"page"))
    assert dict(face.touched) == {0: 1}
    pool.uses.collect()
    assert pool.counters.hits == 1
    assert [victim.name for victim in pool.policy.victims()] == [b"other", b"hottest"]
    assert other.hits == 0


async def test_pages_that_nobody_uses_are_held_ready_up_to_a_limit(
    pool: Pool, openings: Openings, face: KernelFace
) -> None:
    pool.idle.limit = 5
    entries = [await page(pool, b"%d" % number, b"bytes %d" % number) for number in range(10)]
    assert [entry.holding is not None for entry in entries] == [False] * 5 + [True] * 5
    assert await read(openings, entries[0]) == b"bytes 0"
    assert entries[0].holding is not None
    assert entries[5].holding is None
    face.close_natively(pool, entries[6], face.open_natively(entries[6]))
    pool.uses.collect()
    await read(openings, entries[1])
    assert entries[6].holding is not None, "what was just read natively is not the coldest"
    assert entries[7].holding is None


async def test_a_page_that_is_open_natively_is_not_let_go_of(pool: Pool, face: KernelFace) -> None:
    pool.idle.limit = 3
    entry = await page(pool, b"open", OLD)
    fd = face.open_natively(entry)
    for number in range(10):
        await page(pool, b"%d" % number, b"bytes")
    assert entry.holding is not None
    assert face.records[entry.number].sealed
    face.close_natively(pool, entry, fd)
    for number in range(10, 20):
        await page(pool, b"%d" % number, b"bytes")
    assert entry.holding is None


async def test_a_removed_page_is_whole_for_those_who_have_it_open(
    pool: Pool, openings: Openings, face: KernelFace
) -> None:
    for how in (0, 1):
        entry = await page(pool, b"page", OLD)
        entry.lookups = 1
        holding = await openings.open_reading(entry)
        fd = face.open_natively(entry)
        assert pool.names.unlink(pool.index.root, b"page") == -1
        assert pool.pages == 0
        assert pool.tier.room().used_bytes > 0
        assert os.pread(holding.read_fd, len(OLD), 0) == os.pread(fd, len(OLD), 0) == OLD
        closing: list[Callable[[], None]] = [
            partial(openings.close_reading, entry),
            partial(face.close_natively, pool, entry, fd),
        ]
        first, last = reversed(closing) if how else closing
        first()
        assert pool.tier.room().used_bytes > 0
        last()
        assert pool.tier.room().used_bytes == 0
        with pytest.raises(StalePage):
            await openings.open_reading(entry)
        files.forget(pool, entry.number, 1)
        assert pool.index.by_number(entry.number) is None
    assert not pool.counters.misses, "a program removed it"
    assert not face.gone


async def test_a_removed_page_can_be_opened_again_while_it_is_open(pool: Pool, openings: Openings) -> None:
    entry = await page(pool, b"page", OLD)
    entry.lookups = 1
    await openings.open_reading(entry)
    pool.names.unlink(pool.index.root, b"page")
    assert await read(openings, entry) == OLD
    openings.close_reading(entry)
    files.forget(pool, entry.number, 1)


async def test_a_change_of_mode_does_not_keep_a_removed_page(pool: Pool, face: KernelFace) -> None:
    entry = await page(pool, b"page", OLD)
    entry.lookups = 1
    fd = face.open_natively(entry)
    pool.names.unlink(pool.index.root, b"page")
    pool.set_owner(entry, files.OWNER)
    face.close_natively(pool, entry, fd)
    assert entry.holding is None
    assert pool.tier.room().used_bytes == 0
    files.forget(pool, entry.number, 1)


# Removed behind our back


async def test_files_that_vanished_from_the_tier_are_forgotten(
    pool: Pool, openings: Openings, face: KernelFace, expect_log: LogGuard
) -> None:
    expect_log("gone from the tier behind our back")
    pool.idle.limit = 0
    entries = [await page(pool, b"%d" % number, OLD) for number in range(3)]
    for number in range(3):
        pool.tier.unlink(b"%d" % number)
    with pytest.raises(NoSuchPage):
        pool.status(entries[0])
    with pytest.raises(StalePage):
        await openings.open_reading(entries[1])
    with pytest.raises(NoSuchPage):
        await openings.open_writing(entries[2], truncate=False)
    assert pool.counters.misses["vanished"] == 3
    assert len(pool.index) == 1
    assert sorted(face.invalidated) == [(1, b"0"), (1, b"1"), (1, b"2")]


async def test_a_directory_that_vanished_takes_what_was_in_it_along(
    pool: Pool, face: KernelFace, expect_log: LogGuard
) -> None:
    expect_log("gone from the tier behind our back")
    pool.idle.limit = 0
    outer = files.mkdir(pool, b"outer")
    inner = files.mkdir(pool, b"inner", outer)
    await page(pool, b"page", OLD, inner)
    pool.tier.unlink(b"outer/inner/page")
    pool.tier.rmdir(b"outer/inner")
    pool.tier.rmdir(b"outer")
    with pytest.raises(NoSuchPage):
        pool.status(outer)
    assert len(pool.index) == 1
    check_pool(pool, face)


async def test_a_link_outlives_another_one_that_vanished(
    pool: Pool, openings: Openings, expect_log: LogGuard
) -> None:
    expect_log("first is gone from the tier behind our back")
    pool.idle.limit = 0
    entry = await page(pool, b"first", OLD)
    pool.names.link(entry, pool.index.root, b"second")
    pool.tier.unlink(b"first")
    with pytest.raises(NoSuchPage):
        pool.status(entry)
    assert pool.index.find(b"first") is None
    assert find(pool, b"second") is entry
    assert await read(openings, entry) == OLD
    assert pool.pages == 1


async def test_removing_what_vanished_succeeds(pool: Pool) -> None:
    await page(pool, b"page", OLD)
    files.mkdir(pool, b"directory")
    pool.tier.unlink(b"page")
    pool.tier.rmdir(b"directory")
    os.close(pool.names.unlink(pool.index.root, b"page"))
    pool.names.remove_directory(pool.index.root, b"directory")
    assert len(pool.index) == 1
    with pytest.raises(FileNotFoundError):
        pool.names.unlink(pool.index.root, b"page")
    with pytest.raises(FileNotFoundError):
        pool.names.remove_directory(pool.index.root, b"directory")


# Names that move


async def test_renaming_over_a_page_that_is_read_keeps_it_for_the_reader(
    pool: Pool, openings: Openings, face: KernelFace
) -> None:
    old = await page(pool, b"key", OLD)
    old.lookups = 1
    holding = await openings.open_reading(old)
    await page(pool, b"temporary", b"new")
    root = pool.index.root
    assert pool.names.rename(root, b"temporary", root, b"key", 0) == -1
    assert files.content(pool, b"key") == b"new"
    assert os.pread(holding.read_fd, len(OLD), 0) == OLD
    openings.close_reading(old)
    files.forget(pool, old.number, 1)
    check_pool(pool, face)


async def test_renaming_a_directory_moves_what_is_in_it(pool: Pool, openings: Openings) -> None:
    pool.idle.limit = 0
    outer = files.mkdir(pool, b"outer")
    inner = files.mkdir(pool, b"inner", outer)
    entry = await page(pool, b"page", OLD, inner)
    elsewhere = files.mkdir(pool, b"elsewhere")
    pool.names.rename(outer, b"inner", elsewhere, b"moved", 0)
    assert entry.path() == b"elsewhere/moved/page"
    assert await read(openings, entry) == OLD
    other = files.mkdir(pool, b"inner", outer)
    await page(pool, b"page", b"another", other)
    pool.names.rename(elsewhere, b"moved", outer, b"inner", RENAME_EXCHANGE)
    assert await read(openings, find(pool, b"outer/inner/page")) == OLD
    assert await read(openings, find(pool, b"elsewhere/moved/page")) == b"another"


async def test_renaming_one_link_over_another_leaves_both(pool: Pool) -> None:
    entry = await page(pool, b"one", OLD)
    pool.names.link(entry, pool.index.root, b"other")
    assert pool.names.rename(pool.index.root, b"one", pool.index.root, b"other", 0) == -1
    assert sorted(pool.tier.list(b"")) == [b"one", b"other"]


async def test_a_failed_rename_changes_nothing(pool: Pool, face: KernelFace) -> None:
    await page(pool, b"page", OLD)
    directory = files.mkdir(pool, b"directory")
    await page(pool, b"inside", OLD, directory)
    root = pool.index.root
    with pytest.raises(IsADirectoryError):
        pool.names.rename(root, b"page", root, b"directory", 0)
    with pytest.raises(FileNotFoundError):
        pool.names.rename(root, b"missing", root, b"new", 0)
    other = files.mkdir(pool, b"other")
    with pytest.raises(OSError, match="not empty"):
        pool.names.rename(root, b"other", root, b"directory", 0)
    with pytest.raises(OSError, match="not empty"):
        pool.names.remove_directory(root, b"directory")
    assert other.parent is root
    check_pool(pool, face)


async def test_numbers_are_kept_for_as_long_as_the_kernel_knows_them(pool: Pool) -> None:
    entry = await page(pool, b"page", OLD)
    entry.lookups = 5
    os.close(pool.names.unlink(pool.index.root, b"page"))
    assert pool.index.by_number(entry.number) is entry
    files.forget(pool, entry.number, 4)
    new = await page(pool, b"new", OLD)
    assert new.number != entry.number
    files.forget(pool, entry.number, 1)
    assert pool.index.by_number(entry.number) is None
    files.forget(pool, entry.number, 1)
    files.forget(pool, 99999, 1)
    files.forget(pool, 1, 1 << 40)
    assert pool.index.by_number(1) is pool.index.root


async def test_fifos_symlinks_and_sockets_are_small_files_and_never_pages(pool: Pool) -> None:
    for kind, content in ((0o120777, b"/target"), (0o010600, b""), (0o140600, b"")):
        entry = pool.names.create_other(
            pool.index.root, b"%o" % kind, files.OWNER.__class__(kind, 1, 2), content
        )
        assert files.content(pool, b"%o" % kind) == content
        assert entry.state != DRAFT
    assert pool.pages == 0
    await settled(pool)


# A check of a page that an earlier daemon left, while other things happen: see also test_adoption


async def test_a_page_removed_while_it_is_checked_is_stale(
    pool: Pool, openings: Openings, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    well = sealing.digest_file

    def slow(fd: int) -> Digest:
        assert go.wait(10)
        return well(fd)

    monkeypatch.setattr(opening, "digest_file", slow)
    entry = await page(pool, b"page", OLD)
    entry.state = UNCHECKED
    stale = 0

    async def open_it() -> None:
        nonlocal stale
        with pytest.raises(StalePage):
            await openings.open_reading(entry)
        stale += 1

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(open_it)
        await trio.sleep(0.01)
        os.close(pool.names.unlink(pool.index.root, b"page"))
        go.set()
    assert stale == 3
    assert pool.tier.room().used_bytes == 0
