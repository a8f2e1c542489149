"""Names in DRAM and on the SSD while that has not followed: a daemon that is killed then leaves no page in
the way of another."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from pyfuse3 import FUSEError

from kvfs.errors import NotSupported, TierFailed
from kvfs.fs.control import ControlFiles
from kvfs.fs.files import Files
from kvfs.fs.operations import Operations
from kvfs.index import SEALED, STORED
from kvfs.opening import Openings
from kvfs.pool import Pool
from kvfs.storage.described import RESIDENT
from kvfs.storage.storage import Storage
from kvfs.syscalls import RENAME_EXCHANGE
from tests.conftest import LogGuard
from tests.pool import files
from tests.pool.files import page, pattern, read, wait_until
from tests.storage.disks import demoted, on_ssd, stored

DATA, OTHER = pattern(100_000), pattern(70_000, 2)
CONTEXT: Any = SimpleNamespace(uid=0, gid=0, pid=1, umask=0o022)
A_WHILE = 0.1
ROOT = 1


@pytest.fixture
def operations(pool: Pool) -> Any:
    return Operations(pool, Files(pool), ControlFiles({}, (0, 0)))


class Hold:
    """An SSD that changes nothing before it is let go."""

    def __init__(self, storage: Storage) -> None:
        self._lock = storage.tier.lock
        self._lock.acquire()
        self._is_held = True

    def let_go(self) -> None:
        if self._is_held:
            self._is_held = False
            self._lock.release()


@pytest.fixture
def hold(storage: Storage) -> Iterator[Callable[[], Hold]]:
    made: list[Hold] = []

    def make() -> Hold:
        made.append(Hold(storage))
        return made[-1]

    yield make
    for one in made:
        one.let_go()


async def waits_for(held: Hold, call: Callable[[], Awaitable[Any]]) -> None:
    """A call that ends once the SSD goes on, and not before."""
    ended = trio.Event()

    async def run() -> None:
        await call()
        ended.set()

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await trio.sleep(A_WHILE)
            assert not ended.is_set()
            held.let_go()


async def does_not_wait(call: Callable[[], Awaitable[Any]]) -> None:
    with trio.fail_after(5):
        await call()


def rename(operations: Any, old: bytes, new: bytes, flags: int = 0) -> Callable[[], Awaitable[Any]]:
    return lambda: operations.rename(ROOT, old, ROOT, new, flags, CONTEXT)


def create(operations: Any, name: bytes) -> Callable[[], Awaitable[Any]]:
    async def create_and_close() -> None:
        info, _ = await operations.create(ROOT, name, 0o644, os.O_WRONLY, CONTEXT)
        await operations.release(info.fh)

    return create_and_close


NEW_NAMES: dict[str, Callable[[Any, int], Callable[[], Awaitable[Any]]]] = {
    "create": lambda operations, _: create(operations, b"page"),
    "mknod": lambda operations, _: lambda: operations.mknod(ROOT, b"page", 0o100644, 0, CONTEXT),
    "mkdir": lambda operations, _: lambda: operations.mkdir(ROOT, b"page", 0o40755, CONTEXT),
    "symlink": lambda operations, _: lambda: operations.symlink(ROOT, b"page", b"target", CONTEXT),
    "link": lambda operations, number: lambda: operations.link(number, ROOT, b"page", CONTEXT),
    "rename": lambda operations, _: rename(operations, b"other", b"page"),
}


@pytest.mark.parametrize("way", NEW_NAMES)
async def test_a_name_that_was_left_is_free_once_the_ssd_has_followed(
    pool: Pool, storage: Storage, operations: Any, hold: Callable[[], Hold], way: str
) -> None:
    await demoted(pool, b"page", DATA)
    other = await page(pool, b"other", OTHER)
    held = hold()
    await does_not_wait(rename(operations, b"page", b"moved"))
    await waits_for(held, NEW_NAMES[way](operations, other.number))
    assert on_ssd(pool, b"moved") == DATA
    await storage.history.settled()
    assert on_ssd(pool, b"moved") == DATA


async def test_the_name_of_a_directory_too(
    pool: Pool, storage: Storage, operations: Any, hold: Callable[[], Hold]
) -> None:
    directory = files.mkdir(pool, b"d")
    entry = await page(pool, b"page", DATA, directory)
    await storage.demotions.finish()
    await pool.evictor.evict(entry)
    held = hold()
    await does_not_wait(rename(operations, b"d", b"e"))
    await waits_for(held, lambda: operations.mkdir(ROOT, b"d", 0o40755, CONTEXT))
    await storage.history.settled()
    assert on_ssd(pool, b"e/page") == DATA


async def test_a_directory_takes_the_names_below_it(
    pool: Pool, storage: Storage, operations: Any, hold: Callable[[], Hold]
) -> None:
    """It comes over an empty one, whose page has just left it."""
    old, new, coming = (files.mkdir(pool, name) for name in (b"old", b"new", b"coming"))
    entry = await page(pool, b"page", DATA, old)
    await page(pool, b"page", OTHER, coming)
    await storage.demotions.finish()
    await pool.evictor.evict(entry)
    held = hold()
    await does_not_wait(lambda: operations.rename(old.number, b"page", new.number, b"page", 0, CONTEXT))
    await waits_for(held, rename(operations, b"coming", b"old"))
    await storage.history.settled()
    assert (on_ssd(pool, b"new/page"), on_ssd(pool, b"old/page")) == (DATA, OTHER)


async def test_all_other_names_are_free_at_once(
    pool: Pool, storage: Storage, operations: Any, hold: Callable[[], Hold]
) -> None:
    await demoted(pool, b"page", DATA)
    await stored(pool, b"gone", DATA)
    held = hold()
    await does_not_wait(rename(operations, b"page", b"moved"))
    await does_not_wait(lambda: operations.unlink(ROOT, b"gone", CONTEXT))
    await does_not_wait(lambda: operations.mkdir(ROOT, b"d", 0o40755, CONTEXT))
    for name in (b"new", b"gone"):
        await does_not_wait(create(operations, name))
    held.let_go()
    await storage.history.settled()


async def test_a_page_is_overwritten_once_its_new_link_is_there(
    pool: Pool, storage: Storage, operations: Any, hold: Callable[[], Hold]
) -> None:
    entry = await demoted(pool, b"page", DATA)
    await page(pool, b"new", OTHER)
    held = hold()
    await does_not_wait(lambda: operations.link(entry.number, ROOT, b"link", CONTEXT))
    await waits_for(held, rename(operations, b"new", b"page"))
    await storage.history.settled()
    assert on_ssd(pool, b"link") == DATA


async def test_a_page_leaves_dram_once_its_copy_has_its_name(
    pool: Pool, storage: Storage, operations: Any, hold: Callable[[], Hold]
) -> None:
    entry = await stored(pool, b"page", DATA)
    held = hold()
    await does_not_wait(rename(operations, b"page", b"moved"))
    assert await pool.evictor.free(len(DATA)) == 0
    assert entry.state == SEALED
    await waits_for(held, lambda: pool.evictor.evict(entry))
    assert (entry.state, on_ssd(pool, b"moved")) == (STORED, DATA)


async def test_who_needs_the_room_waits_for_that(
    pool: Pool, storage: Storage, operations: Any, hold: Callable[[], Hold]
) -> None:
    room = pool.room().free_bytes
    entry = await stored(pool, b"page", pattern(1 << 20))
    held = hold()
    await does_not_wait(rename(operations, b"page", b"moved"))
    await waits_for(held, lambda: pool.evictor.require(pool.tier.room().free_bytes + (1 << 19)))
    assert room
    assert entry.state == STORED


async def test_a_page_comes_to_dram_before_it_exchanges_its_name_with_one_there(
    pool: Pool, storage: Storage, operations: Any, openings: Openings, hold: Callable[[], Hold]
) -> None:
    below = await demoted(pool, b"below", DATA)
    above = await page(pool, b"above", OTHER)
    await storage.history.settled()
    await does_not_wait(rename(operations, b"below", b"above", RENAME_EXCHANGE))
    assert (below.state, below.name, above.name) == (SEALED, b"above", b"below")
    assert (await read(openings, below), await read(openings, above)) == (DATA, OTHER)
    await wait_until(lambda: below.stored == above.stored == RESIDENT)
    await storage.history.settled()
    assert (on_ssd(pool, b"above"), on_ssd(pool, b"below")) == (DATA, OTHER)


async def test_pages_that_are_only_on_the_ssd_exchange_their_names_there(
    pool: Pool, storage: Storage, operations: Any
) -> None:
    one, other = await demoted(pool, b"one", DATA), await demoted(pool, b"other", OTHER)
    await does_not_wait(rename(operations, b"one", b"other", RENAME_EXCHANGE))
    assert {one.state, other.state} == {STORED}
    await storage.history.settled()
    assert (on_ssd(pool, b"one"), on_ssd(pool, b"other")) == (OTHER, DATA)


async def test_directories_are_exchanged_when_dram_has_what_is_in_them(
    pool: Pool, storage: Storage, operations: Any, openings: Openings
) -> None:
    one, other = files.mkdir(pool, b"one"), files.mkdir(pool, b"other")
    entry = await page(pool, b"page", DATA, files.mkdir(pool, b"inner", one))
    await storage.demotions.finish()
    await pool.evictor.evict(entry)
    with pytest.raises(FUSEError) as refusal:
        await rename(operations, b"one", b"other", RENAME_EXCHANGE)()
    assert refusal.value.errno == NotSupported.errno == errno.EOPNOTSUPP
    assert (one.name, other.name) == (b"one", b"other")
    assert await read(openings, entry) == DATA
    await does_not_wait(rename(operations, b"one", b"other", RENAME_EXCHANGE))
    assert (one.name, other.name) == (b"other", b"one")
    await storage.history.settled()
    assert on_ssd(pool, b"other/inner/page") == DATA


async def test_while_the_ssd_does_not_follow_such_a_name_is_refused(
    pool: Pool, storage: Storage, operations: Any, monkeypatch: pytest.MonkeyPatch, expect_log: LogGuard
) -> None:
    expect_log("does not follow")
    await demoted(pool, b"page", DATA)

    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(storage.tier, "rename", fail)
    await does_not_wait(rename(operations, b"page", b"moved"))
    await wait_until(lambda: bool(storage.history.failure))
    with pytest.raises(FUSEError) as refusal:
        await create(operations, b"page")()
    assert refusal.value.errno == TierFailed.errno
    await does_not_wait(create(operations, b"new"))
    monkeypatch.undo()
    await storage.history.settled()
    await does_not_wait(create(operations, b"page"))
    assert on_ssd(pool, b"moved") == DATA


async def test_names_of_what_dram_has_are_never_waited_for(
    pool: Pool, storage: Storage, operations: Any, hold: Callable[[], Hold]
) -> None:
    """Programs write to a temporary and rename it, to the same names again and again."""
    await stored(pool, b"temporary", DATA)
    directory = files.mkdir(pool, b"d")
    await page(pool, b"page", DATA, directory)
    await storage.demotions.finish()
    held = hold()
    await does_not_wait(rename(operations, b"temporary", b"page"))
    await does_not_wait(create(operations, b"temporary"))
    await does_not_wait(rename(operations, b"d", b"e"))
    await does_not_wait(lambda: operations.mkdir(ROOT, b"d", 0o40755, CONTEXT))
    held.let_go()
    await storage.history.settled()
    assert on_ssd(pool, b"page") == on_ssd(pool, b"e/page") == DATA
