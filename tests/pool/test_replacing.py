"""A page that readers have gets a new draft under its names: what may happen meanwhile, and what may fail."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import trio

from kvfs import replacing
from kvfs.errors import OutOfRoom, StalePage
from kvfs.holding import Holding
from kvfs.index import SEALED, Entry
from kvfs.opening import Openings
from kvfs.page import OWNER
from kvfs.pool import Pool
from kvfs.tiers.dram import DramTier
from tests.pool import files
from tests.pool.checks import check_pool
from tests.pool.faces import KernelFace
from tests.pool.files import MIB, find, page, pattern, read, settled, wait_until

OLD = pattern(300_000)

pytestmark = pytest.mark.usefixtures("short_retry")


class SlowCopy:
    """Copies only when ``go`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.begun = False
        self._copy = replacing._copy
        monkeypatch.setattr(replacing, "_copy", self.copy)

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
    await replace_while(pool, openings, slow, entry, lambda: pool.names.unlink(pool.index.root, b"page"))
    assert pool.tier.list(b"") == []
    assert pool.tier.room().used_bytes == 0


async def test_a_page_renamed_meanwhile_is_replaced_under_its_new_name(
    pool: Pool, openings: Openings, slow: SlowCopy
) -> None:
    entry = await page(pool, b"page", OLD)
    root = pool.index.root
    await replace_while(
        pool, openings, slow, entry, lambda: pool.names.rename(root, b"page", root, b"new", 0)
    )
    assert pool.tier.list(b"") == [b"new"]
    assert find(pool, b"new") is not entry
    assert files.is_intact(pool, b"new", OLD)


async def test_a_page_whose_name_was_taken_meanwhile_leaves_it_alone(
    pool: Pool, openings: Openings, slow: SlowCopy
) -> None:
    entry = await page(pool, b"page", OLD)
    other = await page(pool, b"other", b"other bytes")
    root = pool.index.root
    await replace_while(
        pool, openings, slow, entry, lambda: pool.names.rename(root, b"other", root, b"page", 0)
    )
    assert find(pool, b"page") is other
    assert files.is_intact(pool, b"page", b"other bytes")


async def test_a_page_linked_meanwhile_has_its_new_link_moved_too(
    pool: Pool, openings: Openings, slow: SlowCopy
) -> None:
    entry = await page(pool, b"page", OLD)
    await replace_while(pool, openings, slow, entry, lambda: pool.names.link(entry, pool.index.root, b"link"))
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
        pool.names.link(entry, pool.index.root, name)
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
            replacing._copy(source, target, 4096)
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


async def test_who_looked_the_name_up_before_reads_the_old_page(pool: Pool, openings: Openings) -> None:
    """However slow they are: the kernel would send them back once only."""
    entry = await page(pool, b"page", OLD)
    entry.lookups = 2
    await openings.open_reading(entry)
    with pytest.raises(StalePage):
        await openings.open_writing(entry, truncate=True)
    openings.close_reading(entry)
    assert await read(openings, entry) == OLD
    files.forget(pool, entry.number, 1)
    assert await read(openings, entry) == OLD
    files.forget(pool, entry.number, 1)
    assert pool.index.by_number(entry.number) is None
    pool.remove_everywhere(pool.index.root.children[b"page"])
    assert pool.tier.room().used_bytes == 0
