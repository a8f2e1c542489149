"""What programs ask through attributes: the answers, who may ask, and what makes no sense."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import Any

import pyfuse3
import pytest
import trio
import trio.testing
from pyfuse3 import FUSEError

from kvfs.fs.control import ControlFiles
from kvfs.fs.files import Files
from kvfs.fs.operations import Operations
from kvfs.index import SEALED, STORED, Entry
from kvfs.opening import Openings
from kvfs.pool import Pool
from kvfs.storage.storage import Storage
from tests.conftest import LogGuard
from tests.pool import files
from tests.pool.files import OWNER, create, mapped, page, pattern, put, settled
from tests.storage.disks import demoted, stored

DATA = pattern(100_000)
VERIFY, EVICT, PREFETCH, LEFTOVERS = (
    b"user.kvfs.verify",
    b"user.kvfs.evict",
    b"user.kvfs.prefetch",
    b"user.kvfs.leftovers",
)
NOBODY = 65534


@pytest.fixture
def operations(pool: Pool) -> Any:
    return Operations(pool, Files(pool), ControlFiles({}, (0, 0)))


async def get(operations: Any, entry: Entry, name: bytes, uid: int = NOBODY) -> bytes:
    answer = await operations.getxattr(entry.number, name, SimpleNamespace(uid=uid))
    assert isinstance(answer, bytes)
    return answer


async def ask(operations: Any, entry: Entry, name: bytes, value: bytes, uid: int = 0) -> None:
    await operations.setxattr(entry.number, name, value, SimpleNamespace(uid=uid))


async def refused(call: Any) -> int:
    with pytest.raises(FUSEError) as answer:
        await call
    number: int = answer.value.errno
    return number


async def test_verifying(pool: Pool, storage: Storage, operations: Any, expect_log: LogGuard) -> None:
    expect_log("quarantined")
    assert await get(operations, await demoted(pool, b"ssd", DATA), VERIFY) == b"ssd=ok"
    entry = await stored(pool, b"page", DATA)
    assert await get(operations, entry, VERIFY) == b"dram=ok ssd=ok"
    fd = storage.tier.open(b"page", os.O_RDWR)
    os.ftruncate(fd, 1)
    os.close(fd)
    assert await get(operations, entry, VERIFY) == b"dram=ok ssd=size"
    await ask(operations, entry, VERIFY, b"repair", OWNER.uid)
    await files.wait_until(lambda: entry.stored == b"")
    assert await get(operations, entry, VERIFY) == b"dram=ok ssd=ok"
    draft = create(pool, b"draft")
    put(draft, DATA)
    assert await get(operations, draft, VERIFY) == b"draft"
    pool.remove_writer(draft)
    await settled(pool)


async def test_evicting_copies_a_page_first(pool: Pool, storage: Storage, operations: Any) -> None:
    storage.demotions.unstored.settle_seconds = 1000
    entry = await page(pool, b"page", DATA)
    await ask(operations, entry, EVICT, b"1", OWNER.uid)
    assert entry.state == STORED
    await ask(operations, entry, EVICT, b"1", OWNER.uid)
    assert await get(operations, entry, VERIFY) == b"ssd=ok"


async def test_pages_in_use_are_not_evicted(pool: Pool, openings: Openings, operations: Any) -> None:
    draft = create(pool, b"draft")
    put(draft, DATA)
    assert await refused(ask(operations, draft, EVICT, b"1")) == errno.EBUSY
    pool.remove_writer(draft)
    entry = await stored(pool, b"page", DATA)
    holding = await openings.open_reading(entry)
    mapping = mapped(os.dup(holding.read_fd), len(DATA), writable=False)
    assert await refused(ask(operations, entry, EVICT, b"1")) == errno.EBUSY
    with mapping as bytes_of_page:
        openings.close_reading(entry)
        assert await refused(ask(operations, entry, EVICT, b"1")) == errno.EBUSY
        assert bytes_of_page[:10] == DATA[:10]
    await ask(operations, entry, EVICT, b"1")
    assert entry.state == STORED


async def test_what_becomes_a_page_meanwhile_was_in_use(
    pool: Pool, storage: Storage, operations: Any
) -> None:
    """A draft when it was asked about, a page when others are done with evicting: no failure of the disk."""
    storage.demotions.unstored.settle_seconds = 1000
    draft = create(pool, b"draft")
    put(draft, DATA)
    async with trio.open_nursery() as nursery, pool.evictor._lock:
        nursery.start_soon(refused_as, operations, draft, errno.EBUSY)
        await trio.testing.wait_all_tasks_blocked()
        pool.remove_writer(draft)
        await settled(pool)
        assert draft.state == SEALED


async def refused_as(operations: Any, entry: Entry, number: int) -> None:
    assert await refused(ask(operations, entry, EVICT, b"1")) == number


async def test_an_empty_file_is_not_in_use(pool: Pool, operations: Any) -> None:
    entry = create(pool, b"empty")
    assert await refused(ask(operations, entry, EVICT, b"1")) == errno.EBUSY
    pool.remove_writer(entry)
    await ask(operations, entry, EVICT, b"1")
    assert pool.index.find(b"empty") is entry


async def test_a_page_that_the_ssd_does_not_take_stays(
    pool: Pool, storage: Storage, operations: Any, expect_log: LogGuard
) -> None:
    expect_log("a page was not copied to the SSD")
    expect_log("the SSD tier takes no pages|was not copied")
    await storage.walked.wait()

    def fail(_source: int, _target: int, _size: int) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    storage.write = fail
    entry = await page(pool, b"page", DATA)
    assert await refused(ask(operations, entry, EVICT, b"1")) == errno.EIO
    assert entry.state == SEALED
    assert files.is_intact(pool, b"page", DATA)


async def test_prefetching_is_no_hit(pool: Pool, storage: Storage, operations: Any) -> None:
    entry = await demoted(pool, b"page", DATA)
    times = pool.status(entry).st_atime_ns
    for _ in range(2):
        assert await get(operations, entry, PREFETCH) == b"dram"
        assert entry.state == SEALED
    assert (pool.counters.hits, entry.hits, storage.promotions.read) == (0, 0, 1)
    assert pool.status(entry).st_atime_ns == times


async def test_what_the_whole_mount_is_asked(pool: Pool, storage: Storage, operations: Any) -> None:
    root = pool.index.root
    storage.tier.accounts.changed(0, 0, 12345)
    used = storage.tier.accounts.used_bytes
    await ask(operations, root, VERIFY, b"recount", root.owner.uid)
    assert storage.tier.accounts.used_bytes == used - 12345
    await ask(operations, root, LEFTOVERS, b"delete", root.owner.uid)


async def test_only_the_owner_and_root_take_anything_away(pool: Pool, operations: Any) -> None:
    entry, root = await stored(pool, b"page", DATA), pool.index.root
    for target, name, value in (
        (entry, VERIFY, b"repair"),
        (entry, EVICT, b"1"),
        (root, VERIFY, b"recount"),
        (root, LEFTOVERS, b"delete"),
    ):
        assert await refused(ask(operations, target, name, value, NOBODY)) == errno.EPERM
    assert entry.state == SEALED


async def test_requests_that_mean_nothing(pool: Pool, operations: Any) -> None:
    entry, root = await stored(pool, b"page", DATA), pool.index.root
    for target, name, value in (
        (entry, VERIFY, b"1"),
        (entry, VERIFY, b"recount"),
        (entry, EVICT, b""),
        (entry, PREFETCH, b"1"),
        (entry, LEFTOVERS, b"delete"),
        (root, EVICT, b"1"),
        (root, VERIFY, b"repair"),
        (files.mkdir(pool, b"directory"), VERIFY, b"recount"),
    ):
        assert await refused(ask(operations, target, name, value)) == errno.EINVAL
    for target, name in ((entry, EVICT), (entry, LEFTOVERS), (root, VERIFY), (root, PREFETCH)):
        assert await refused(get(operations, target, name)) == pyfuse3.ENOATTR
    for name in (VERIFY, EVICT, PREFETCH, LEFTOVERS):
        assert name not in await operations.listxattr(entry.number, None)
        assert await refused(operations.removexattr(entry.number, name, None)) == errno.EOPNOTSUPP


async def test_a_page_that_was_removed_is_stale(pool: Pool, openings: Openings, operations: Any) -> None:
    """So that the kernel asks again about what has the name now."""
    entry = await stored(pool, b"page", DATA)
    await openings.open_reading(entry)
    pool.remove_everywhere(entry)
    for name in (VERIFY, PREFETCH):
        assert await refused(get(operations, entry, name)) == errno.ESTALE
    assert await refused(ask(operations, entry, EVICT, b"1")) == errno.ESTALE
    openings.close_reading(entry)
