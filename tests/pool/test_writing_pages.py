"""Opening a page for writing: in place when nobody has it, else as a new draft under its names."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import trio

from kvfs import opening
from kvfs.errors import AttributeMissing, OutOfRoom, StalePage
from kvfs.holding import Holding
from kvfs.index import DRAFT, SEALED, Entry
from kvfs.opening import Openings
from kvfs.page import DIGEST, OWNER
from kvfs.pool import Pool
from kvfs.tiers.dram import DramTier
from tests.pool import files
from tests.pool.checks import check_pool
from tests.pool.faces import KernelFace
from tests.pool.files import MIB, find, page, pattern, put, settled, wait_until

OLD = pattern(300_000)


@pytest.fixture(autouse=True)
def _short_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "RETRY_SECONDS", 0.1)


@pytest.fixture
def open_descriptors(pool: Pool) -> Callable[[], int]:
    """How many descriptors are open; the directories of the tier are open already."""
    return lambda: len(os.listdir("/proc/self/fd"))


# In place


@pytest.mark.parametrize("truncate", [False, True])
async def test_a_page_that_nobody_has_is_a_draft_again_in_place(
    pool: Pool, openings: Openings, face: KernelFace, truncate: bool
) -> None:
    entry = await page(pool, b"page", OLD)
    pool.link(entry, pool.index.root, b"link")
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


class Reader:
    """One of the ways to have a page."""

    def __init__(self, pool: Pool, openings: Openings, face: KernelFace, entry: Entry) -> None:
        self.pool, self.openings, self.face, self.entry = pool, openings, face, entry

    async def open(self) -> None: ...
    def content(self) -> bytes: ...  # type: ignore[empty-body]
    def close(self) -> None: ...


class HandleOfThePool(Reader):
    async def open(self) -> None:
        self.holding = await self.openings.open_reading(self.entry)

    def content(self) -> bytes:
        return os.pread(self.holding.read_fd, 1 << 20, 0)

    def close(self) -> None:
        self.openings.close_reading(self.entry)


class NativeHandle(Reader):
    async def open(self) -> None:
        self.fd = self.face.open_natively(self.entry)

    def content(self) -> bytes:
        return os.pread(self.fd, 1 << 20, 0)

    def close(self) -> None:
        self.face.close_natively(self.pool, self.entry, self.fd)


class Mapping(Reader):
    async def open(self) -> None:
        size = self.pool.status(self.entry).st_size
        self._whole = files.mapped(files.tier_file(self.pool, self.entry.path()), size, writable=False)
        self.mapping = self._whole.__enter__()

    def content(self) -> bytes:
        return self.mapping[:]

    def close(self) -> None:
        self._whole.__exit__(None, None, None)


@pytest.fixture(params=[HandleOfThePool, NativeHandle, Mapping])
def kind_of_reader(request: pytest.FixtureRequest) -> type[Reader]:
    kind: type[Reader] = request.param
    return kind


@pytest.mark.parametrize("truncate", [False, True])
async def test_readers_keep_the_old_page_and_the_names_get_a_draft(
    pool: Pool, openings: Openings, face: KernelFace, kind_of_reader: type[Reader], truncate: bool
) -> None:
    entry = await page(pool, b"page", OLD)
    directory = files.mkdir(pool, b"d")
    for number in range(3):
        pool.link(entry, directory, b"link%d" % number)
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
    assert entry.holding is None
    files.forget(pool, entry.number, 1)
    assert pool.index.by_number(entry.number) is None
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
    with pytest.raises(StalePage):
        await openings.open_reading(entry)
    files.forget(pool, entry.number, 1)


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


# A removed page


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_removed_page_that_is_still_open_keeps_its_bytes(
    pool: Pool, openings: Openings, face: KernelFace, kind_of_reader: type[Reader], replaced: bool
) -> None:
    """A writer had looked its name up, and was overtaken."""
    entry = await page(pool, b"page", OLD)
    entry.lookups = 1
    reader = kind_of_reader(pool, openings, face, entry)
    await reader.open()
    if replaced:
        await page(pool, b"temporary", b"other bytes")
        fd = pool.rename(pool.index.root, b"temporary", pool.index.root, b"page", 0)
    else:
        fd = pool.unlink(pool.index.root, b"page")
    if fd >= 0:
        os.close(fd)
    for call in (openings.open_writing(entry, truncate=True), openings.resize(entry, 5)):
        with pytest.raises(StalePage):
            await call
    assert reader.content() == OLD
    reader.close()
    files.forget(pool, entry.number, 1)
    assert pool.tier.room().used_bytes == (4096 if replaced else 0)


async def test_a_removed_draft_can_be_opened_again(pool: Pool, openings: Openings) -> None:
    entry = files.create(pool, b"draft")
    put(entry, OLD)
    assert pool.unlink(pool.index.root, b"draft") == -1
    await openings.open_writing(entry, truncate=False)
    await openings.resize(entry, 10)
    pool.remove_writer(entry)
    pool.remove_writer(entry)
    assert pool.tier.room().used_bytes == 0
    await settled(pool)


async def test_a_removed_page_is_not_among_the_idle_ones(
    pool: Pool, openings: Openings, face: KernelFace
) -> None:
    pool.idle.limit = 2
    entry = await page(pool, b"page", OLD)
    entry.lookups = 1
    fd = face.open_natively(entry)
    pool.unlink(pool.index.root, b"page")
    holding = await openings.open_reading(entry)
    face.close_natively(pool, entry, fd)
    for number in range(5):
        await page(pool, b"%d" % number, b"bytes")
    assert os.pread(holding.read_fd, len(OLD), 0) == OLD
    openings.close_reading(entry)
    files.forget(pool, entry.number, 1)


# What may happen while the bytes are copied


class SlowCopy:
    """Copies only when ``go`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.begun = False
        self._copy = opening._copy
        monkeypatch.setattr(opening, "_copy", self.copy)

    def copy(self, source: int, target: int, size: int) -> None:
        self.begun = True
        assert self.go.wait(10)
        self._copy(source, target, size)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowCopy:
    return SlowCopy(monkeypatch)


async def replace_while(
    pool: Pool, openings: Openings, slow: SlowCopy, entry: Entry, meanwhile: Callable[[], Any]
) -> None:
    """A writer comes while a reader has the page; something happens during the copy."""
    await openings.open_reading(entry)

    async def write() -> None:
        with pytest.raises(StalePage):
            await openings.open_writing(entry, truncate=False)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        await wait_until(lambda: slow.begun)
        meanwhile()
        slow.go.set()
    openings.close_reading(entry)
    await settled(pool)


async def test_a_page_removed_meanwhile_stays_removed(pool: Pool, openings: Openings, slow: SlowCopy) -> None:
    entry = await page(pool, b"page", OLD)
    await replace_while(pool, openings, slow, entry, lambda: pool.unlink(pool.index.root, b"page"))
    assert pool.tier.list(b"") == []
    assert pool.tier.room().used_bytes == 0


async def test_a_page_renamed_meanwhile_is_replaced_under_its_new_name(
    pool: Pool, openings: Openings, slow: SlowCopy
) -> None:
    entry = await page(pool, b"page", OLD)
    root = pool.index.root
    await replace_while(pool, openings, slow, entry, lambda: pool.rename(root, b"page", root, b"new", 0))
    assert pool.tier.list(b"") == [b"new"]
    assert find(pool, b"new") is not entry
    assert files.is_intact(pool, b"new", OLD)


async def test_a_page_whose_name_was_taken_meanwhile_leaves_it_alone(
    pool: Pool, openings: Openings, slow: SlowCopy
) -> None:
    entry = await page(pool, b"page", OLD)
    other = await page(pool, b"other", b"other bytes")
    root = pool.index.root
    await replace_while(pool, openings, slow, entry, lambda: pool.rename(root, b"other", root, b"page", 0))
    assert find(pool, b"page") is other
    assert files.is_intact(pool, b"page", b"other bytes")


async def test_a_page_linked_meanwhile_has_its_new_link_moved_too(
    pool: Pool, openings: Openings, slow: SlowCopy
) -> None:
    entry = await page(pool, b"page", OLD)
    await replace_while(pool, openings, slow, entry, lambda: pool.link(entry, pool.index.root, b"link"))
    assert find(pool, b"page") is find(pool, b"link") is not entry


async def test_an_owner_changed_meanwhile_is_the_owner_of_the_draft(
    pool: Pool, openings: Openings, slow: SlowCopy
) -> None:
    entry = await page(pool, b"page", OLD)
    owner = files.OWNER.__class__(files.OWNER.mode, 5, 6)
    await replace_while(pool, openings, slow, entry, lambda: pool.set_owner(entry, owner))
    assert find(pool, b"page").owner == owner
    assert pool.tier.get_attribute(b"page", OWNER) == owner.format().encode()


async def test_a_page_is_not_evicted_meanwhile(pool: Pool, openings: Openings, slow: SlowCopy) -> None:
    entry = await page(pool, b"page", OLD)
    freed: list[int] = []

    async def evict() -> None:
        freed.append(await pool.evictor.free(MIB))

    async with trio.open_nursery() as nursery:
        await replace_while(pool, openings, slow, entry, lambda: nursery.start_soon(evict))
    assert freed == [0]
    assert files.content(pool, b"page") == OLD


# Failures


async def with_a_reader(openings: Openings, entry: Entry, kind: type[Exception]) -> Any:
    """What a writer is answered while a reader has the page."""
    await openings.open_reading(entry)
    with pytest.raises(kind) as caught:
        await openings.open_writing(entry, truncate=False)
    openings.close_reading(entry)
    return caught.value


@pytest.mark.parametrize("tier", [16 * MIB], indirect=True)
async def test_no_room_for_the_copy_leaves_everything_as_it_was(
    pool: Pool, openings: Openings, face: KernelFace, open_descriptors: Callable[[], int]
) -> None:
    data = pattern(10 * MIB)
    entry = await page(pool, b"page", data)
    before = open_descriptors()
    await with_a_reader(openings, entry, OutOfRoom)
    assert open_descriptors() == before
    assert files.is_intact(pool, b"page", data)
    assert pool.tier.list(b"") == [b"page"]
    assert await files.read(openings, entry) == data
    check_pool(pool, face)


@pytest.mark.parametrize("failing", ["create", "link", "rename", "set_attribute", "list_attributes"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE])
async def test_a_failure_on_the_tier_leaves_everything_as_it_was(
    pool: Pool,
    tier: DramTier,
    openings: Openings,
    face: KernelFace,
    open_descriptors: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    failing: str,
    number: int,
) -> None:
    entry = await page(pool, b"page", OLD)
    for name in (b"link1", b"link2"):
        pool.link(entry, pool.index.root, name)
    pool.tier.set_attribute(b"page", "user.mine", b"value")
    before = open_descriptors()
    calls = 0
    well = getattr(tier, failing)

    def fail_later(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == (2 if failing == "link" else 1):
            raise OSError(number, os.strerror(number))
        return well(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(tier, failing, fail_later)
        error = await with_a_reader(openings, entry, OSError)
        assert error.errno == number
    assert calls
    assert open_descriptors() == before
    assert sorted(pool.tier.list(b"")) == [b"link1", b"link2", b"page"]
    for name in (b"page", b"link1", b"link2"):
        assert files.is_intact(pool, name, OLD)
        assert pool.tier.stat(name).st_nlink == 3
    check_pool(pool, face)
    await files.rewrite(openings, entry, b"new")
    await settled(pool)
    assert files.is_intact(pool, b"link2", b"new")


async def test_a_page_that_cannot_be_opened_for_writing_is_a_page_again(
    pool: Pool, openings: Openings, face: KernelFace, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = await page(pool, b"page", OLD)
    well = os.open

    def fail(path: Any, flags: int, *arguments: Any, **keywords: Any) -> int:
        if flags & os.O_ACCMODE == os.O_RDWR:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return well(path, flags, *arguments, **keywords)

    for call in (lambda: openings.open_writing(entry, truncate=False), lambda: openings.resize(entry, 5)):
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", fail)
            with pytest.raises(OSError, match="Too many open files"):
                await call()
        await settled(pool)
        assert entry.state == SEALED
        assert files.is_intact(pool, b"page", OLD)
        check_pool(pool, face)


def test_a_copy_of_a_file_that_became_shorter_ends(tier: DramTier) -> None:
    source, target = tier.create(b"source"), tier.create(b"target")
    try:
        os.write(source, b"short")
        with pytest.raises(StalePage):
            opening._copy(source, target, 4096)
    finally:
        os.close(source)
        os.close(target)


async def test_a_user_may_have_a_file_with_the_name_of_a_temporary(pool: Pool, openings: Openings) -> None:
    entry = await page(pool, b"page", OLD)
    for number in range(1, 4):
        await page(pool, b".kvfs-draft-%d" % number, b"the user's own")
    await openings.open_reading(entry)
    with pytest.raises(StalePage):
        await openings.open_writing(entry, truncate=False)
    openings.close_reading(entry)
    await settled(pool)
    assert files.is_intact(pool, b".kvfs-draft-1", b"the user's own")


async def test_holdings_of_replaced_pages_do_not_pile_up(
    pool: Pool, openings: Openings, open_descriptors: Callable[[], int]
) -> None:
    entry = await page(pool, b"page", OLD)
    held: list[tuple[Entry, Holding]] = []
    before = open_descriptors()
    for _ in range(20):
        entry = find(pool, b"page")
        entry.lookups = 1
        held.append((entry, await openings.open_reading(entry)))
        with pytest.raises(StalePage):
            await openings.open_writing(entry, truncate=True)
        await files.rewrite(openings, find(pool, b"page"), OLD)
        await settled(pool)
    for reader, holding in held:
        assert os.pread(holding.read_fd, len(OLD), 0) == OLD
        openings.close_reading(reader)
        files.forget(pool, reader.number, 1)
    assert open_descriptors() == before
    assert len(pool.index) == 2
