"""What programs ask through attributes of a pool that is DRAM alone."""

from __future__ import annotations

import errno
import os

import pytest

from kvfs.errors import NotSupported, PageInUse
from kvfs.fs.requests import EVICT, LEFTOVERS, PREFETCH, VERIFY, Requests
from kvfs.opening import Openings
from kvfs.pool import Pool
from tests.conftest import LogGuard
from tests.pool import files
from tests.pool.files import MIB, page, pages, pattern, read

DATA = pattern(MIB)


@pytest.fixture
def requests(pool: Pool) -> Requests:
    return Requests(pool)


async def test_a_damaged_page_is_a_miss(pool: Pool, requests: Requests, expect_log: LogGuard) -> None:
    expect_log("page is damaged and dropped: its bytes do not match its digest")
    entry = await page(pool, b"page", DATA)
    assert await requests.get(entry, VERIFY) == b"dram=ok"
    await requests.set(entry, VERIFY, b"repair", 0)
    assert files.find(pool, b"page") is entry
    fd = pool.tier.open(b"page", os.O_RDWR)
    os.pwrite(fd, b"?", 1000)
    os.close(fd)
    assert await requests.get(entry, VERIFY) == b"dram=bytes"
    await requests.set(entry, VERIFY, b"repair", 0)
    assert pool.index.find(b"page") is None
    assert dict(pool.counters.misses) == {"corrupt": 1}
    assert pool.tier.list(b"") == []


async def test_an_evicted_page_is_gone(pool: Pool, openings: Openings, requests: Requests) -> None:
    entries = await pages(pool, 4)
    holding = await openings.open_reading(entries[2])
    with pytest.raises(PageInUse):
        await requests.set(entries[2], EVICT, b"1", 0)
    await requests.set(entries[3], EVICT, b"1", 0)
    assert files.left(pool) == files.names(0, 1, 2)
    assert pool.counters.evictions == 1
    assert os.pread(holding.read_fd, 4, 0) == pattern(MIB, 2)[:4]
    openings.close_reading(entries[2])


async def test_prefetching_finds_it_there(pool: Pool, openings: Openings, requests: Requests) -> None:
    entry = await page(pool, b"page", DATA)
    assert await requests.get(entry, PREFETCH) == b"dram"
    assert pool.counters.hits == 0
    assert await read(openings, entry) == DATA


async def test_there_is_no_ssd_to_look_after(pool: Pool, requests: Requests) -> None:
    for name, value in ((VERIFY, b"recount"), (LEFTOVERS, b"delete")):
        with pytest.raises(NotSupported) as refused:
            await requests.set(pool.index.root, name, value, 0)
        assert refused.value.errno == errno.EOPNOTSUPP
