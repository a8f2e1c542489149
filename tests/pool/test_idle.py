"""Pages that can be opened without the daemon: with a descriptor, with an id alone, after a rename."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from kvfs import idle
from kvfs.errors import NoSuchPage, StalePage
from kvfs.fs.attributes import ExtendedAttributes
from kvfs.index import SEALED
from kvfs.opening import Openings
from kvfs.pool import Pool
from kvfs.syscalls import RENAME_EXCHANGE
from tests.conftest import LogGuard
from tests.pool import files
from tests.pool.checks import check_pool
from tests.pool.faces import KernelFace
from tests.pool.files import MIB, create, page, pattern, put, read, settled

OLD = pattern(100_000)


@pytest.fixture(autouse=True)
def _no_descriptors(pool: Pool) -> None:
    """Every page that nobody uses has a backing id alone."""
    pool.idle.limit = 0


async def test_a_page_without_a_descriptor_is_opened_natively(
    pool: Pool, openings: Openings, face: KernelFace
) -> None:
    entry = await page(pool, b"page", OLD)
    assert entry.holding is None
    assert entry.ready_id
    assert pool.idle.ready == 1
    fd = face.open_natively(entry)
    assert os.pread(fd, len(OLD), 0) == OLD
    assert pool.status(entry).st_size == len(OLD)
    face.close_natively(pool, entry, fd)
    assert await read(openings, entry) == OLD
    check_pool(pool, face)


async def test_a_page_without_a_descriptor_is_described_as_it_is(pool: Pool, face: KernelFace) -> None:
    """Whatever was done to it by its name meanwhile."""
    entry = await page(pool, b"page", OLD)

    def described() -> os.stat_result:
        return face.described[entry.number]

    def is_right() -> bool:
        return described() == pool.tier.stat(entry.path())

    first = described()
    assert first.st_size == len(OLD)
    assert is_right()
    fd = face.open_natively(entry)
    os.utime(fd, ns=(5, first.st_mtime_ns))  # as reading would
    face.close_natively(pool, entry, fd)
    pool.uses.collect()
    assert described().st_atime_ns == 5
    assert entry.hits == 1
    assert is_right()
    pool.names.link(entry, pool.index.root, b"link")
    assert described().st_nlink == 2
    pool.set_times(entry, 7, 8)
    assert (described().st_atime_ns, described().st_mtime_ns) == (7, 8)
    pool.set_owner(entry, files.OWNER.__class__(files.OWNER.mode, 5, 6))
    assert is_right()
    attributes = ExtendedAttributes(pool)
    await attributes.set(entry, "user.name", b"value")
    assert is_right()
    await attributes.remove(entry, "user.name")
    assert is_right()
    root = pool.index.root
    assert pool.names.rename(root, b"page", root, b"renamed", 0) == -1
    assert is_right()
    await page(pool, b"other", OLD)
    assert pool.names.rename(root, b"renamed", root, b"other", RENAME_EXCHANGE) == -1
    assert is_right()
    assert entry.ready_id
    check_pool(pool, face)


async def test_a_page_without_a_descriptor_is_evicted_unless_it_is_open(pool: Pool, face: KernelFace) -> None:
    open_one, cold = await page(pool, b"open", pattern(MIB)), await page(pool, b"cold", pattern(MIB))
    fd = face.open_natively(open_one)
    face.touched.clear()
    assert await pool.evictor.free(2 * MIB) == MIB
    assert cold.ready_id == 0
    assert face.can_open_natively(open_one)
    face.close_natively(pool, open_one, fd)
    assert await pool.evictor.free(2 * MIB) == MIB
    assert pool.idle.ready == 0
    assert pool.tier.room().used_bytes == 0


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_page_without_a_descriptor_is_removed(pool: Pool, face: KernelFace, is_open: bool) -> None:
    entry = await page(pool, b"page", OLD)
    entry.lookups = 1
    fd = face.open_natively(entry) if is_open else -1
    assert pool.names.unlink(pool.index.root, b"page") == -1
    if is_open:
        assert pool.status(entry).st_nlink == 0, "fstat is answered"
        assert os.pread(fd, len(OLD), 0) == OLD
        face.close_natively(pool, entry, fd)
    assert pool.tier.room().used_bytes == 0
    files.forget(pool, entry.number, 1)
    assert len(pool.index) == 1


async def test_a_page_without_a_descriptor_loses_one_of_its_names(pool: Pool, face: KernelFace) -> None:
    entry = await page(pool, b"page", OLD)
    pool.names.link(entry, pool.index.root, b"link")
    fd = face.open_natively(entry)
    assert pool.names.unlink(pool.index.root, b"page") == -1
    check_pool(pool, face)
    face.close_natively(pool, entry, fd)
    check_pool(pool, face)


@pytest.mark.parametrize("lookups", [0, 1])
async def test_a_page_without_a_descriptor_is_replaced_by_rename(
    pool: Pool, face: KernelFace, lookups: int
) -> None:
    entry = await page(pool, b"page", OLD)
    entry.lookups = lookups
    await page(pool, b"new", b"new bytes")
    fd = pool.names.rename(pool.index.root, b"new", pool.index.root, b"page", 0)
    if fd >= 0:
        os.close(fd)
    files.forget(pool, entry.number, lookups)
    assert files.content(pool, b"page") == b"new bytes"
    assert pool.tier.room().used_bytes == 4096
    check_pool(pool, face)


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_page_without_a_descriptor_that_vanished_leaves_nothing(
    pool: Pool, face: KernelFace, expect_log: LogGuard, is_open: bool
) -> None:
    expect_log("gone from the tier behind our back")
    entry = await page(pool, b"page", OLD)
    entry.lookups = 1
    fd = face.open_natively(entry) if is_open else -1
    pool.tier.unlink(b"page")
    with pytest.raises(NoSuchPage):
        pool.status(entry)
    if is_open:
        assert os.pread(fd, len(OLD), 0) == OLD
        face.close_natively(pool, entry, fd)
    files.forget(pool, entry.number, 1)
    assert face.ids == {}
    assert len(pool.index) == 1
    assert pool.tier.room().used_bytes == 0


async def test_a_page_without_a_descriptor_is_written_in_place_or_beside_its_readers(
    pool: Pool, openings: Openings, face: KernelFace
) -> None:
    entry = await page(pool, b"page", OLD)
    await files.rewrite(openings, entry, b"in place")
    await settled(pool)
    assert files.is_intact(pool, b"page", b"in place")
    assert entry.ready_id
    fd = face.open_natively(entry)
    with pytest.raises(StalePage):
        await openings.open_writing(entry, truncate=True)
    assert os.pread(fd, 100, 0) == b"in place"
    face.close_natively(pool, entry, fd)
    await files.rewrite(openings, files.find(pool, b"page"), b"beside")
    await settled(pool)
    assert files.is_intact(pool, b"page", b"beside")


async def test_links_and_owners_of_a_page_without_a_descriptor(
    pool: Pool, openings: Openings, face: KernelFace
) -> None:
    entry = await page(pool, b"page", OLD)
    pool.names.link(entry, pool.index.root, b"link")
    pool.set_owner(entry, files.OWNER.__class__(files.OWNER.mode, 5, 6))
    assert pool.names.unlink(pool.index.root, b"page") == -1
    assert pool.pages == 1
    check_pool(pool, face)
    assert await read(openings, entry) == OLD
    check_pool(pool, face)


async def test_ids_are_bounded(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "READY_LIMIT", 3)
    entries = [await page(pool, b"%d" % number, b"bytes") for number in range(5)]
    assert [bool(entry.ready_id) for entry in entries] == [True] * 3 + [False] * 2


async def test_descriptors_that_nobody_uses_are_given_up_where_they_run_out(
    pool: Pool, openings: Openings, face: KernelFace, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.idle.limit = 100
    entries = [await page(pool, b"%d" % number, OLD) for number in range(5)]
    held = face.open_natively(entries[0])
    holding = await openings.open_reading(entries[1])
    well, failures = pool.tier.open, 1

    def fail_once(path: bytes, flags: int) -> int:
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return well(path, flags)

    monkeypatch.setattr(pool.tier, "open", fail_once)
    new = create(pool, b"new")
    assert [entry.holding is not None for entry in entries] == [True, True, False, False, False]
    assert os.pread(holding.read_fd, len(OLD), 0) == OLD
    put(new, b"new bytes")
    pool.remove_writer(new)
    await settled(pool)
    assert new.state == SEALED
    openings.close_reading(entries[1])
    face.close_natively(pool, entries[0], held)
    check_pool(pool, face)


# After a rename


async def test_who_looked_a_name_up_before_a_rename_opens_what_it_was(
    pool: Pool, openings: Openings, face: KernelFace
) -> None:
    old = await page(pool, b"key", OLD)
    old.lookups = 2
    await page(pool, b"temporary", b"new bytes")
    root = pool.index.root
    assert pool.names.rename(root, b"temporary", root, b"key", 0) == -1
    assert await read(openings, old) == OLD
    assert await read(openings, old) == OLD, "and another one too"
    with pytest.raises(StalePage):
        await openings.open_writing(old, truncate=True)
    files.forget(pool, old.number, 1)
    assert await read(openings, old) == OLD
    files.forget(pool, old.number, 1)
    assert pool.index.by_number(old.number) is None
    assert pool.tier.room().used_bytes == 4096
    check_pool(pool, face)


async def test_a_draft_that_a_rename_replaces_is_kept_too(pool: Pool, openings: Openings) -> None:
    draft = create(pool, b"key")
    put(draft, b"a part")
    draft.lookups = 1
    await page(pool, b"temporary", b"new bytes")
    root = pool.index.root
    assert pool.names.rename(root, b"temporary", root, b"key", 0) == -1
    pool.remove_writer(draft)
    await settled(pool)
    assert await read(openings, draft) == b"a part"
    files.forget(pool, draft.number, 1)
    assert pool.tier.room().used_bytes == 4096


@pytest.mark.parametrize("limit", [0, 100])
async def test_a_rename_that_fails_leaves_its_target_as_it_was(
    pool: Pool, face: KernelFace, limit: int
) -> None:
    pool.idle.limit = limit
    target = await page(pool, b"target", OLD)
    target.lookups = 1
    empty = create(pool, b"empty")
    empty.lookups = 1
    pool.remove_writer(empty)
    await settled(pool)
    files.mkdir(pool, b"directory")
    root = pool.index.root
    for name in (b"target", b"empty"):
        for source, kind in ((b"missing", FileNotFoundError), (b"directory", NotADirectoryError)):
            with pytest.raises(kind):
                pool.names.rename(root, source, root, name, 0)
            check_pool(pool, face)
    assert face.can_open_natively(target)
    result: Any = pool.names.unlink(root, b"target")
    if result >= 0:
        os.close(result)
