"""Pages that are pinned stay in DRAM, pages that expire are gone; both outlive the daemon."""

from __future__ import annotations

import errno
import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from pyfuse3 import FUSEError

from kvfs import adoption
from kvfs.errors import PageInUse, StalePage, TooManyPins
from kvfs.fs.control import ControlFiles
from kvfs.fs.files import Files
from kvfs.fs.operations import Operations
from kvfs.index import DRAFT, SEALED, Directory, Entry
from kvfs.opening import Openings
from kvfs.page import PIN, TTL, Lifetime, Owner
from kvfs.pool import Pool
from kvfs.tiers.dram import DramTier
from tests.conftest import LogGuard
from tests.pool import files
from tests.pool.checks import check_pool
from tests.pool.conftest import ROOT_OWNER
from tests.pool.faces import KernelFace
from tests.pool.files import MIB, OWNER, create, page, pages, pattern, put, read, rewrite, settled, wait_until
from tests.pool.test_adoption import Left

DATA = pattern(100_000)
BUDGET = 16 * MIB
PIN_NAME, TTL_NAME = b"user.kvfs.pin", b"user.kvfs.ttl"
NOBODY = 65534


@pytest.fixture
def operations(pool: Pool) -> Any:
    return Operations(pool, Files(pool), ControlFiles({}, (0, 0)))


def caller(uid: int) -> Any:
    return SimpleNamespace(uid=uid)


async def get(operations: Any, entry: Entry, name: bytes) -> bytes:
    answer = await operations.getxattr(entry.number, name, caller(NOBODY))
    assert isinstance(answer, bytes)
    return answer


async def ask(operations: Any, entry: Entry, name: bytes, value: bytes, uid: int = 0) -> None:
    await operations.setxattr(entry.number, name, value, caller(uid))


async def refused(call: Any) -> int:
    with pytest.raises(FUSEError) as answer:
        await call
    number: int = answer.value.errno
    return number


async def gone(entry: Entry, seconds: float = 5) -> None:
    await wait_until(lambda: entry.parent is None, seconds)


# Pins


async def test_a_pinned_page_is_never_evicted(pool: Pool, openings: Openings) -> None:
    kept, *others = await pages(pool, 10)
    await pool.lifetimes.pin(kept)
    await pool.lifetimes.pin(kept)
    assert pool.lifetimes.statistics()["pinned"] == {"pages": 1, "bytes": MIB, "budget_bytes": BUDGET}
    await pool.evictor.free(64 * MIB)
    assert pool.pages == 1
    assert kept.parent is not None
    assert all(entry.parent is None for entry in others)
    with pytest.raises(PageInUse, match="pinned"):
        await pool.evictor.evict(kept)
    assert await read(openings, kept) == pattern(MIB, 0)
    pool.lifetimes.unpin(kept)
    pool.lifetimes.unpin(kept)
    assert pool.lifetimes.pinned_bytes == 0
    await pool.evictor.evict(kept)
    assert kept.parent is None


async def test_beyond_the_budget_nothing_is_pinned(pool: Pool) -> None:
    assert pool.lifetimes.budget_bytes == BUDGET
    entries = await pages(pool, 17)
    for entry in entries[:16]:
        await pool.lifetimes.pin(entry)
    with pytest.raises(TooManyPins, match=r"may take 16\.0 MiB, of which 16\.0 MiB are taken"):
        await pool.lifetimes.pin(entries[16])
    assert PIN not in pool.tier.list_attributes(entries[16].path())
    fd = pool.names.unlink(pool.index.root, entries[0].name)
    os.close(fd)
    await pool.lifetimes.pin(entries[16])
    assert pool.lifetimes.pinned_bytes == BUDGET


async def test_a_draft_is_pinned_once_it_is_a_page(pool: Pool, expect_log: LogGuard) -> None:
    small, large = create(pool, b"small"), create(pool, b"large")
    for draft in (small, large):
        put(draft, DATA)
        await pool.lifetimes.pin(draft)
        assert not pool.lifetimes.is_pinned(draft)
    put(large, pattern(BUDGET + 1))
    pool.remove_writer(small)
    await settled(pool)
    assert pool.lifetimes.is_pinned(small)
    expect_log("large is pinned no longer")
    pool.remove_writer(large)
    await settled(pool)
    assert large.state == SEALED
    assert not pool.lifetimes.is_pinned(large)
    assert PIN not in pool.tier.list_attributes(b"large")


async def test_a_page_that_grows_beyond_the_budget_loses_its_pin(
    pool: Pool, openings: Openings, expect_log: LogGuard
) -> None:
    entry = await page(pool, b"page", DATA)
    await pool.lifetimes.pin(entry)
    expect_log("page is pinned no longer")
    await rewrite(openings, entry, pattern(BUDGET + 1))
    await settled(pool)
    assert entry.state == SEALED
    assert not pool.lifetimes.is_pinned(entry)
    assert pool.lifetimes.pinned_bytes == 0


async def test_a_pin_is_of_the_file_as_long_as_it_lives(
    pool: Pool, openings: Openings, short_retry: None
) -> None:
    entry = await page(pool, b"page", DATA)
    await pool.lifetimes.pin(entry)
    await rewrite(openings, entry, b"other")
    assert entry.state == DRAFT
    assert pool.lifetimes.pinned_bytes == 0
    await settled(pool)
    assert pool.lifetimes.is_pinned(entry)
    assert pool.lifetimes.pinned_bytes == 5
    await openings.open_reading(entry)
    with pytest.raises(StalePage):
        await rewrite(openings, entry, DATA)
    fresh = files.find(pool, b"page")
    await rewrite(openings, fresh, DATA)
    openings.close_reading(entry)
    await settled(pool)
    assert not pool.lifetimes.is_pinned(entry)
    assert pool.lifetimes.is_pinned(fresh), "the copy that took its place has its attributes"
    other = await page(pool, b"other", b"other")
    fd = pool.names.rename(pool.index.root, b"other", pool.index.root, b"page", 0)
    if fd >= 0:
        os.close(fd)
    assert not pool.lifetimes.is_pinned(other)
    assert pool.lifetimes.pinned_bytes == 0


# Expiring


async def test_a_page_expires_so_long_after_it_was_sealed(pool: Pool) -> None:
    draft = create(pool, b"draft")
    put(draft, DATA)
    await pool.lifetimes.set_ttl(draft, 1.5)
    await trio.sleep(1.6)
    kept = await page(pool, b"kept", DATA)
    pool.remove_writer(draft)
    await settled(pool)
    sealed = time.time()
    assert pool.lifetimes.statistics()["expiring"] == {"pages": 1}
    await gone(draft)
    assert 1.4 < time.time() - sealed < 4
    assert dict(pool.counters.misses) == {"expired": 1}
    assert kept.parent is not None
    assert pool.lifetimes.statistics()["expiring"] == {"pages": 0}
    assert pool.tier.list(b"") == [b"kept"]


async def test_who_reads_a_page_keeps_it_when_it_expires(pool: Pool, openings: Openings) -> None:
    entry = await page(pool, b"page", DATA)
    holding = await openings.open_reading(entry)
    await pool.lifetimes.set_ttl(entry, 0.001)
    await gone(entry)
    assert os.pread(holding.read_fd, len(DATA), 0) == DATA
    openings.close_reading(entry)


async def test_a_directory_gives_it_to_what_is_sealed_below_from_then_on(pool: Pool) -> None:
    top = files.mkdir(pool, b"top")
    below = pool.names.create_directory(top, b"below", files.DIRECTORY)
    nearer = pool.names.create_directory(top, b"nearer", files.DIRECTORY)
    assert isinstance(below, Directory)
    assert isinstance(nearer, Directory)
    before = await page(pool, b"before", DATA, below)
    await pool.lifetimes.set_ttl(top, 5)
    await pool.lifetimes.set_ttl(nearer, 1000)
    inherits = await page(pool, b"inherits", DATA, below)
    other = await page(pool, b"other", DATA, nearer)
    own = create(pool, b"own", below)
    await pool.lifetimes.set_ttl(own, 2000)
    put(own, DATA)
    pool.remove_writer(own)
    await settled(pool)

    def seconds(entry: Entry) -> float:
        return Lifetime.parse(pool.tier.get_attribute(entry.path(), TTL)).seconds

    assert TTL not in pool.tier.list_attributes(before.path())
    assert (seconds(inherits), seconds(other), seconds(own)) == (5, 1000, 2000)
    pool.lifetimes.remove_ttl(top)
    assert TTL not in pool.tier.list_attributes((await page(pool, b"after", DATA, below)).path())
    assert pool.lifetimes.statistics()["expiring"] == {"pages": 3}


async def test_what_is_pinned_does_not_expire_until_it_is_unpinned(pool: Pool) -> None:
    entry = await page(pool, b"page", DATA)
    await pool.lifetimes.pin(entry)
    await pool.lifetimes.set_ttl(entry, 0.001)
    await trio.sleep(2.2)
    assert entry.parent is not None
    expired = pool.lifetimes.expired()
    assert (expired["count"], expired["bytes"]) == (1, len(DATA))
    assert expired["files"][0]["path"] == "page"
    assert expired["files"][0]["pinned"]
    pool.lifetimes.unpin(entry)
    await gone(entry)
    assert pool.lifetimes.expired() == {"count": 0, "bytes": 0, "files": []}


async def test_it_can_be_taken_back(pool: Pool) -> None:
    entry = await page(pool, b"page", DATA)
    await pool.lifetimes.set_ttl(entry, 1)
    pool.lifetimes.remove_ttl(entry)
    await trio.sleep(2.2)
    assert entry.parent is not None


async def test_many_expire_at_once_and_nobody_waits_for_that(pool: Pool) -> None:
    directory = files.mkdir(pool, b"directory")
    await pool.lifetimes.set_ttl(directory, 1)
    entries = [await page(pool, b"%d" % number, b"x", directory) for number in range(300)]
    await wait_until(lambda: all(entry.parent is None for entry in entries))
    assert pool.counters.misses["expired"] == 300
    pool.names.remove_directory(pool.index.root, b"directory")
    assert pool.lifetimes._defaults == {}


# As attributes


async def test_programs_pin_through_an_attribute(pool: Pool, operations: Any) -> None:
    entry = await page(pool, b"page", DATA)
    directory = files.mkdir(pool, b"directory")
    assert await refused(get(operations, entry, PIN_NAME)) == errno.ENODATA
    assert await refused(ask(operations, entry, PIN_NAME, b"1", NOBODY)) == errno.EPERM
    assert await refused(ask(operations, entry, PIN_NAME, b"yes")) == errno.EINVAL
    assert await refused(ask(operations, directory, PIN_NAME, b"1")) == errno.EOPNOTSUPP
    await ask(operations, entry, PIN_NAME, b"1", OWNER.uid)
    assert await get(operations, entry, PIN_NAME) == b"1"
    assert PIN_NAME in await operations.listxattr(entry.number, caller(NOBODY))
    assert pool.lifetimes.is_pinned(entry)
    assert await refused(operations.removexattr(entry.number, PIN_NAME, caller(NOBODY))) == errno.EPERM
    await operations.removexattr(entry.number, PIN_NAME, caller(OWNER.uid))
    assert not pool.lifetimes.is_pinned(entry)
    assert await refused(operations.removexattr(entry.number, PIN_NAME, caller(0))) == errno.ENODATA
    await ask(operations, entry, PIN_NAME, b"1")
    await ask(operations, entry, PIN_NAME, b"0")
    await ask(operations, entry, PIN_NAME, b"0")
    assert not pool.lifetimes.is_pinned(entry)
    assert PIN_NAME not in await operations.listxattr(entry.number, caller(NOBODY))


async def test_beyond_the_budget_they_hear_enospc(pool: Pool, operations: Any) -> None:
    entries = await pages(pool, 3, 8 * MIB)
    for entry in entries[:2]:
        await ask(operations, entry, PIN_NAME, b"1")
    assert await refused(ask(operations, entries[2], PIN_NAME, b"1")) == errno.ENOSPC


@pytest.mark.parametrize(
    ("value", "shown"), [(b"1h", b"3600s"), (b"90", b"90s"), (b"1.5s", b"1.5s"), (b"30d", b"2592000s")]
)
async def test_programs_set_a_lifetime_through_an_attribute(
    pool: Pool, operations: Any, value: bytes, shown: bytes
) -> None:
    entry, directory = await page(pool, b"page", DATA), files.mkdir(pool, b"directory")
    draft = create(pool, b"draft")
    for one in (entry, directory, draft):
        await ask(operations, one, TTL_NAME, value)
        assert await get(operations, one, TTL_NAME) == shown
        assert TTL_NAME in await operations.listxattr(one.number, caller(NOBODY))
        await ask(operations, one, TTL_NAME, shown)
        assert await get(operations, one, TTL_NAME) == shown, "what is read can be set, as cp -a does"
        await operations.removexattr(one.number, TTL_NAME, caller(0))
        assert await refused(get(operations, one, TTL_NAME)) == errno.ENODATA
    pool.remove_writer(draft)


@pytest.mark.parametrize("value", [b"", b"0", b"-1", b"never", b"1w", b"0.0001s", b"999999d", b"\xff"])
async def test_a_lifetime_that_means_nothing_is_refused(pool: Pool, operations: Any, value: bytes) -> None:
    entry = await page(pool, b"page", DATA)
    assert await refused(ask(operations, entry, TTL_NAME, value)) == errno.EINVAL
    assert await refused(ask(operations, entry, TTL_NAME, b"1h", NOBODY)) == errno.EPERM
    link = pool.names.create_other(pool.index.root, b"link", Owner(0o120777, 0, 0), b"page")
    assert await refused(ask(operations, link, TTL_NAME, b"1h")) == errno.EOPNOTSUPP


# The next daemon


async def test_both_outlive_the_daemon(tier: DramTier, face: KernelFace) -> None:
    left, now = Left(tier), time.time_ns()
    left.directory(b"top")
    for path in (b"top/inherited", b"pinned", b"expired", b"damaged", b"plain"):
        left.page(path)
    tier.set_attribute(b"", TTL, Lifetime(3000).format().encode())
    tier.set_attribute(b"top", TTL, Lifetime(1000).format().encode())
    tier.set_attribute(b"top/inherited", TTL, Lifetime(1000, now).format().encode())
    tier.set_attribute(b"expired", TTL, Lifetime(1000, now - 1001 * 10**9).format().encode())
    tier.set_attribute(b"damaged", TTL, b"some time")
    tier.set_attribute(b"pinned", PIN, b"1")
    pool = Pool(tier, ROOT_OWNER)
    adoption.adopt(pool)
    pool.attach_face(face)
    async with trio.open_nursery() as nursery:
        pool.start(nursery)
        await gone(files.find(pool, b"expired"))
        assert dict(pool.counters.misses) == {"expired": 1}
        assert pool.lifetimes.is_pinned(files.find(pool, b"pinned"))
        assert pool.lifetimes.statistics()["expiring"] == {"pages": 1}
        for name, seconds in ((b"top", 1000.0), (b"", 3000.0)):
            directory = files.find(pool, name)
            assert isinstance(directory, Directory)
            assert pool.lifetimes._default(directory) == seconds
        await pool.evictor.free(64 * MIB)
        assert sorted(pool.index.root.children) == [b"pinned", b"top"]
        check_pool(pool, face)
        nursery.cancel_scope.cancel()
    pool.close()
    face.end()


async def test_a_smaller_pool_pins_what_its_budget_allows(
    tier: DramTier, pool: Pool, expect_log: LogGuard
) -> None:
    for entry in await pages(pool, 4, 2 * MIB):
        await pool.lifetimes.pin(entry)
    expect_log("is pinned no longer")
    face = KernelFace()
    after = Pool(tier, ROOT_OWNER, pin_percent=10)
    adoption.adopt(after)
    after.attach_face(face)
    assert after.lifetimes.pinned_bytes == 6 * MIB
    check_pool(after, face)
    after.close()
    face.end()
