"""Drafts that were closed and entries that were forgotten, of which the pool hears in batches."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pyfuse3
import pytest
import trio

from kvfs.fs.channel import KILLED_HANDLE
from kvfs.fs.control import ControlFiles
from kvfs.fs.files import Files
from kvfs.fs.operations import Operations
from kvfs.index import SEALED
from kvfs.leaving import MUCH_FREED
from kvfs.pool import Pool
from tests.conftest import LogGuard
from tests.pool import files
from tests.pool.faces import KernelFace
from tests.pool.files import MIB, page, pattern, put, settled, wait_until

ROOT = pyfuse3.ROOT_INODE
CONTEXT: Any = SimpleNamespace(uid=1000, gid=1000, pid=1, umask=0o022)
DATA = pattern(MIB)


@pytest.fixture
def given(pool: Pool) -> Files:
    return Files(pool)


@pytest.fixture
def operations(pool: Pool, given: Files) -> Any:
    return Operations(pool, given, ControlFiles({}, (0, 0)))


async def create(operations: Any, name: bytes) -> tuple[int, int]:
    """A file with bytes that is open: its handle and its number."""
    info, attributes = await operations.create(ROOT, name, 0o644, os.O_WRONLY, CONTEXT)
    entry = operations._pool.index.by_number(attributes.st_ino)
    put(entry, DATA)
    return info.fh, attributes.st_ino


@pytest.mark.parametrize("asked", ["getattr", "create", "release"])
async def test_what_was_closed_before_a_request_is_heard_of_before_it(
    pool: Pool, operations: Any, given: Files, face: KernelFace, asked: str
) -> None:
    handle, number = await create(operations, b"page")
    other, _ = await create(operations, b"other")
    face.ended = ([handle], [])
    if asked == "getattr":
        await operations.getattr(number, CONTEXT)
    elif asked == "create":
        await operations.release((await create(operations, b"another"))[0])
    await operations.release(other)
    assert pool.writing == set()
    assert len(given) == 0
    await settled(pool)
    assert pool.pages == len(pool.index.root.children)


async def test_a_draft_that_was_closed_and_removed_goes_at_once(
    pool: Pool, operations: Any, face: KernelFace
) -> None:
    handle, number = await create(operations, b"page")
    entry = pool.index.by_number(number)
    assert entry is not None
    face.ended = ([handle], [])
    await operations.unlink(ROOT, b"page", CONTEXT)
    assert entry.holding is None, "nobody had it open when it was removed"


async def test_it_is_heard_of_while_nobody_asks(
    pool: Pool, operations: Any, given: Files, face: KernelFace
) -> None:
    handle, number = await create(operations, b"page")
    entry = pool.index.by_number(number)
    assert entry is not None
    news, later = os.pipe()
    os.set_blocking(news, False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(given.run, news)
        await trio.sleep(0.01)
        assert pool.writing == {entry}
        face.ended = ([handle], [])
        os.write(later, bytes(8))
        await wait_until(lambda: entry.state == SEALED)
        nursery.cancel_scope.cancel()
    os.close(news)
    os.close(later)


async def test_a_killed_writer_is_heard_of_as_such(
    pool: Pool, operations: Any, given: Files, face: KernelFace, expect_log: LogGuard
) -> None:
    expect_log("page is dropped: its writer was ended by a signal")
    handle, _ = await create(operations, b"page")
    face.ended = ([handle | KILLED_HANDLE], [])
    given.catch_up()
    await settled(pool)
    assert b"page" not in pool.index.root.children
    assert pool.counters.failures == {"killed": 1}


async def test_what_goes_wrong_with_one_is_no_trouble_of_the_others(
    pool: Pool, operations: Any, given: Files, face: KernelFace, expect_log: LogGuard
) -> None:
    expect_log("the end of an open file was not heard of")
    handle, number = await create(operations, b"page")
    face.ended = ([4711, handle], [(1 << 40, 1), (number, 1)])
    assert (await operations.getattr(ROOT, CONTEXT)).st_ino == ROOT
    assert pool.writing == set()
    entry = pool.index.by_number(number)
    assert entry is not None
    assert entry.lookups == 0
    await settled(pool)


@pytest.mark.parametrize("size", [MIB, MUCH_FREED + MIB])
async def test_the_memory_of_what_is_forgotten_is_free(
    pool: Pool, given: Files, face: KernelFace, size: int
) -> None:
    old = await page(pool, b"page", pattern(size))
    old.lookups = 2
    new = await page(pool, b"new", DATA)
    assert pool.names.rename(pool.index.root, b"new", pool.index.root, b"page", 0) == -1
    assert pool.index.find(b"page") is new
    face.ended = ([], [(old.number, 1)])
    given.catch_up()
    assert pool.index.by_number(old.number) is old
    face.ended = ([], [(old.number, 1)])
    given.catch_up()
    assert pool.index.by_number(old.number) is None
    await wait_until(lambda: pool.tier.room().used_bytes == len(DATA))
    assert files.find(pool, b"page") is new
