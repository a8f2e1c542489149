"""Writers that are overtaken again and again: the kernel looks a name up twice, and then gives up."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from pyfuse3 import FUSEError

from kvfs.errors import StalePage
from kvfs.fs.control import ControlFiles
from kvfs.fs.files import Files
from kvfs.fs.operations import Operations
from kvfs.index import DRAFT, SEALED, Entry
from kvfs.opening import Openings
from kvfs.pool import Pool
from tests.pool import files
from tests.pool.faces import KernelFace
from tests.pool.files import find, page, pattern, put, settled
from tests.pool.readers import Mapping, Reader

OLD = pattern(300_000)
pytestmark = pytest.mark.usefixtures("short_retry")

OVERWRITE = os.O_WRONLY | os.O_TRUNC


async def replaced(pool: Pool, name: bytes) -> Entry:
    """A page whose name another one took, after the kernel had looked it up."""
    entry = await page(pool, name, OLD)
    entry.lookups += 1
    await page(pool, b"new", b"bytes")
    fd = pool.names.rename(pool.index.root, b"new", pool.index.root, name, 0)
    assert fd == -1
    assert entry.parent is None
    return entry


async def open_as(operations: Any, entry: Entry, flags: int, task: int) -> int:
    """The handle, or the error negative."""
    try:
        info = await operations.open(entry.number, flags, SimpleNamespace(pid=task))
    except FUSEError as error:
        return -int(error.errno)
    return int(info.fh)


@pytest.fixture
def operations(pool: Pool) -> Any:
    return Operations(pool, Files(pool), ControlFiles({}, (0, 0)))


async def test_who_was_sent_back_once_is_served(pool: Pool, openings: Openings, operations: Any) -> None:
    first, second = await replaced(pool, b"first"), await replaced(pool, b"second")
    assert await open_as(operations, first, OVERWRITE, 7) == -errno.ESTALE
    assert await open_as(operations, second, OVERWRITE, 8) == -errno.ESTALE, "another program"
    handle = await open_as(operations, second, OVERWRITE, 7)
    assert handle > 0
    assert second.state == DRAFT
    put(second, b"what nobody will find")
    await operations.release(handle)
    assert second.holding is None
    assert await files.read(openings, pool.index.root.children[b"second"]) == b"bytes"
    assert await open_as(operations, first, OVERWRITE, 7) == -errno.ESTALE, "that was another open"
    assert await open_as(operations, first, os.O_WRONLY, 7) == -errno.ESTALE, "its old bytes"
    for entry in (first, second):
        files.forget(pool, entry.number, entry.lookups)
    await settled(pool)


async def test_readers_find_what_replaced_a_page(pool: Pool, openings: Openings, operations: Any) -> None:
    """The kernel may still take the name for the old page when the writer has long closed the new one."""
    entry = await under_a_reader(pool, openings)
    assert await open_as(operations, entry, OVERWRITE, 7) == -errno.ESTALE
    assert await open_as(operations, entry, os.O_RDONLY, 8) == -errno.ESTALE
    new = find(pool, b"page")
    await operations.release(await open_as(operations, new, OVERWRITE, 7))
    handle = await open_as(operations, new, os.O_RDONLY, 8)
    assert handle > 0
    await operations.release(handle)
    assert await open_as(operations, entry, os.O_RDONLY, 8) == -errno.ESTALE, "that was another open"
    handle = await open_as(operations, entry, os.O_RDONLY, 8)
    assert handle > 0, "the kernel sends nobody back twice"
    await operations.release(handle)
    openings.close_reading(entry)
    for one in (entry, new):
        files.forget(pool, one.number, one.lookups)
    await settled(pool)


async def under_a_reader(pool: Pool, openings: Openings) -> Entry:
    entry = await page(pool, b"page", OLD)
    entry.lookups = 9
    await openings.open_reading(entry)
    return entry


async def write(pool: Pool, openings: Openings, entry: Entry, task: int) -> None:
    await openings.open_writing(entry, truncate=False, task=task)
    put(entry, b"NEW")
    pool.remove_writer(entry)


async def test_the_draft_waits_for_everybody_who_was_sent_back(pool: Pool, openings: Openings) -> None:
    entry = await under_a_reader(pool, openings)
    for task in (1, 2, 3):
        with pytest.raises(StalePage):
            await openings.open_writing(entry, truncate=False, task=task)
    draft = find(pool, b"page")
    for task in (4, 3, 1):
        await write(pool, openings, draft, task)
        await trio.sleep(0.012)
        assert draft.state == DRAFT
    await write(pool, openings, draft, 2)
    await settled(pool)
    assert find(pool, b"page") is draft
    assert draft.state == SEALED
    openings.close_reading(entry)


@pytest.mark.parametrize("is_read", [False, True])
async def test_what_became_a_page_meanwhile_is_a_draft_for_who_comes_late(
    pool: Pool, openings: Openings, is_read: bool
) -> None:
    """They looked up what was replaced a while ago: what they find then must not send them back too."""
    entry = await under_a_reader(pool, openings)
    with pytest.raises(StalePage):
        await openings.open_writing(entry, truncate=False, task=1)
    second = find(pool, b"page")
    await write(pool, openings, second, 1)
    await settled(pool)
    assert second.state == SEALED
    if is_read:
        second.lookups = 1
        await openings.open_reading(second)
    with pytest.raises(StalePage):
        await openings.resize(entry, 5, task=2)
    third = find(pool, b"page")
    assert (third is second) == (not is_read)
    assert third.state == DRAFT
    await openings.resize(third, 5, task=2)
    await settled(pool)
    assert files.is_intact(pool, b"page", b"NEW" + OLD[3:5])
    openings.close_reading(entry)
    if is_read:
        openings.close_reading(second)


async def test_who_is_sent_back_and_never_comes_leaves_the_page_as_it_was(
    pool: Pool, openings: Openings
) -> None:
    entry = await under_a_reader(pool, openings)
    for task in (1, 2):
        with pytest.raises(StalePage):
            await openings.open_writing(entry, truncate=True, task=task)
    draft = find(pool, b"page")
    await openings.open_writing(draft, truncate=True, task=1)
    put(draft, b"NEW")
    pool.remove_writer(draft)
    await settled(pool)
    assert find(pool, b"page") is draft
    assert files.is_intact(pool, b"page", b"NEW")
    openings.close_reading(entry)


async def test_those_who_have_it_open_or_mapped_keep_it(
    pool: Pool, openings: Openings, face: KernelFace, kind_of_reader: type[Reader]
) -> None:
    entry = await page(pool, b"page", OLD)
    entry.lookups = 1
    reader = kind_of_reader(pool, openings, face, entry)
    await reader.open()
    if (fd := pool.names.unlink(pool.index.root, b"page")) >= 0:
        os.close(fd)
    if kind_of_reader is Mapping:
        openings.open_nameless(entry)
        put(entry, b"other bytes")
        pool.remove_writer(entry)
    else:
        with pytest.raises(StalePage):
            openings.open_nameless(entry)
    assert reader.content() == OLD
    reader.close()
    files.forget(pool, entry.number, 1)
    assert pool.tier.room().used_bytes == 0


async def test_a_name_that_is_there_is_none_of_its_business(pool: Pool, openings: Openings) -> None:
    entry = await page(pool, b"page", OLD)
    with pytest.raises(StalePage):
        openings.open_nameless(entry)
    assert await files.read(openings, entry) == OLD
