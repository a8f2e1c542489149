"""Pins and expiring of pages that are on the SSD, and on the next host."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import trio

from kvfs import lifetimes
from kvfs.errors import TooManyPins
from kvfs.fs.attributes import ExtendedAttributes
from kvfs.index import SEALED, STORED, Directory
from kvfs.opening import Openings
from kvfs.page import PIN, TTL, Lifetime
from kvfs.policy.admission import Admission
from kvfs.pool import Pool
from kvfs.storage.described import RESIDENT
from kvfs.storage.storage import Storage
from kvfs.storage.unstored import NOT_REUSED
from kvfs.verification import Verifier
from tests.conftest import LogGuard
from tests.pool import files
from tests.pool.conftest import ROOT_OWNER  # noqa: F401
from tests.pool.files import MIB, page, pattern, read, rewrite, wait_until
from tests.storage.disks import demoted, empty_dram, on_ssd, stored
from tests.storage.test_restart import base, daemon  # noqa: F401
from tests.storage.test_restart import storage as storage_of_pool

DATA = pattern(100_000)


async def test_pinning_brings_a_page_into_dram_and_keeps_it(
    pool: Pool, storage: Storage, openings: Openings
) -> None:
    entry = await demoted(pool, b"page", DATA)
    await pool.lifetimes.pin(entry)
    assert (entry.state, entry.stored) == (SEALED, RESIDENT)
    await empty_dram(pool)
    assert entry.state == SEALED
    await storage.history.settled()
    assert storage.tier.get_attribute(b"page", PIN) == b"1"
    assert await read(openings, entry) == DATA
    pool.lifetimes.unpin(entry)
    await empty_dram(pool)
    assert entry.state == STORED
    await storage.history.settled()
    assert PIN not in storage.tier.list_attributes(b"page")


async def test_what_is_beyond_the_budget_is_not_even_brought_up(pool: Pool) -> None:
    entry = await demoted(pool, b"page", pattern(17 * MIB))
    with pytest.raises(TooManyPins):
        await pool.lifetimes.pin(entry)
    assert entry.state == STORED


async def test_a_pinned_page_is_copied_whatever_the_policy(pool: Pool, storage: Storage) -> None:
    await storage.walked.wait()
    storage.demotions._admission = Admission("reuse")
    entry = await page(pool, b"page", DATA)
    await wait_until(lambda: storage.demotions.unstored.is_left_out(entry, NOT_REUSED))
    await pool.lifetimes.pin(entry)
    await wait_until(lambda: entry.stored == RESIDENT)
    assert storage.tier.get_attribute(b"page", PIN) == b"1"


@pytest.mark.parametrize("ssd", [8 * MIB], indirect=True)
async def test_a_full_ssd_keeps_what_is_pinned(pool: Pool, storage: Storage) -> None:
    entry = await stored(pool, b"pinned", pattern(MIB))
    await pool.lifetimes.pin(entry)
    for number in range(20):
        await demoted(pool, b"%02d" % number, pattern(MIB, number))
    assert (entry.state, entry.stored) == (SEALED, RESIDENT)
    assert on_ssd(pool, b"pinned") == pattern(MIB)


async def test_a_page_on_the_ssd_expires(pool: Pool, storage: Storage) -> None:
    entry = await demoted(pool, b"page", DATA)
    await pool.lifetimes.set_ttl(entry, 1000)
    await storage.history.settled()
    lifetime = Lifetime.parse(storage.tier.get_attribute(b"page", TTL))
    assert lifetime.seconds == 1000
    assert abs(lifetime.sealed_ns - time.time_ns()) < 20 * 10**9
    await pool.lifetimes.set_ttl(entry, 0.5)
    await wait_until(lambda: entry.parent is None)
    await storage.history.settled()
    assert on_ssd(pool, b"page") is None
    assert dict(pool.counters.misses) == {"expired": 1}


async def test_it_goes_down_and_comes_up_with_the_page(
    pool: Pool, storage: Storage, openings: Openings
) -> None:
    entry = files.create(pool, b"page")
    await pool.lifetimes.set_ttl(entry, 1000)
    files.put(entry, DATA)
    pool.remove_writer(entry)
    await wait_until(lambda: entry.stored == RESIDENT)
    lifetime = pool.tier.get_attribute(b"page", TTL)
    await empty_dram(pool)
    assert await pool.lifetimes.read_attribute(entry, TTL) == lifetime
    await read(openings, entry)
    assert pool.tier.get_attribute(b"page", TTL) == lifetime
    await empty_dram(pool)
    pool.lifetimes.remove_ttl(entry)
    await storage.history.settled()
    assert TTL not in storage.tier.list_attributes(b"page")
    assert pool.lifetimes.statistics()["expiring"] == {"pages": 0}


async def test_a_pinned_page_that_is_damaged_in_dram_comes_back(
    pool: Pool, storage: Storage, monkeypatch: pytest.MonkeyPatch, expect_log: LogGuard
) -> None:
    monkeypatch.setattr(lifetimes, "RETRY_SECONDS", 0.05)
    expect_log("the SSD has it whole")
    entry = await stored(pool, b"page", DATA)
    await pool.lifetimes.set_ttl(entry, 1000)
    await pool.lifetimes.pin(entry)
    second = pool.lifetimes.said_of(entry)[1]
    await storage.history.settled()
    fd = pool.tier.open(b"page", os.O_RDWR)
    os.pwrite(fd, bytes([DATA[0] ^ 1]), 0)
    os.close(fd)
    await Verifier(pool).repair(entry)
    fresh = files.find(pool, b"page")
    assert fresh is not entry
    assert pool.lifetimes.said_of(fresh) == (True, second)
    assert not pool.lifetimes.is_pinned(entry)
    await wait_until(lambda: fresh.state == SEALED)
    assert files.is_intact(pool, b"page", DATA)
    assert pool.tier.get_attribute(b"page", PIN) == b"1"


async def test_a_page_that_is_written_from_nothing_keeps_what_was_said_of_it(
    pool: Pool, storage: Storage, openings: Openings
) -> None:
    entry = await stored(pool, b"page", DATA)
    pool.names.link(entry, pool.index.root, b"link")
    await ExtendedAttributes(pool).set(entry, "user.name", b"value")
    await pool.lifetimes.set_ttl(entry, 1000)
    await empty_dram(pool)
    assert entry.state == STORED
    async with trio.open_nursery() as nursery:
        for _ in range(3):  # some of whom find that it is a draft already
            nursery.start_soon(openings.open_writing, entry, True)
    files.put(entry, b"new")
    for _ in range(3):
        pool.remove_writer(entry)
    await wait_until(lambda: entry.stored == RESIDENT)
    for path in (b"page", b"link"):
        assert pool.tier.get_attribute(path, "user.name") == b"value"
        assert on_ssd(pool, path) == b"new"
    assert Lifetime.parse(storage.tier.get_attribute(b"page", TTL)).seconds == 1000
    assert pool.lifetimes.statistics()["expiring"] == {"pages": 1}


async def test_a_disk_that_fails_keeps_nobody_from_writing_from_nothing(
    pool: Pool, storage: Storage, openings: Openings, monkeypatch: pytest.MonkeyPatch, expect_log: LogGuard
) -> None:
    expect_log("the SSD tier fails")
    entry = await demoted(pool, b"page", DATA)

    def fail(_path: bytes) -> list[str]:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(storage.tier, "list_attributes", fail)
        await rewrite(openings, entry, b"new")
    storage.health.succeeded()
    await wait_until(lambda: entry.stored == RESIDENT)
    assert on_ssd(pool, b"page") == b"new"


async def test_all_of_it_outlives_the_host(
    base: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with daemon(base) as pool:
        directory = files.mkdir(pool, b"directory")
        await pool.lifetimes.set_ttl(directory, 1000)
        await pool.lifetimes.set_ttl(pool.index.root, 3000)
        await page(pool, b"inherits", DATA, directory)
        await pool.lifetimes.pin(await stored(pool, b"pinned", DATA))
        expired = await demoted(pool, b"expired", DATA)
        assert not pool.lifetimes.is_pinned(expired)
        await pool.lifetimes.set_ttl(expired, 1.5)
        await storage_of_pool(pool).demotions.finish()
    await trio.sleep(1.6)
    async with daemon(base) as pool:
        pinned = files.find(pool, b"pinned")
        assert pool.lifetimes.is_pinned(pinned)
        await wait_until(lambda: pinned.state == SEALED)
        await wait_until(lambda: pool.index.find(b"expired") is None)
        assert pool.lifetimes.statistics()["expiring"] == {"pages": 2}, "what was pinned is one of them"
        again = files.find(pool, b"directory")
        assert isinstance(again, Directory)
        assert pool.lifetimes._default(again) == 1000
        assert pool.lifetimes._default(pool.index.root) == 3000
        await storage_of_pool(pool).demotions.finish()


async def test_a_pinned_page_that_cannot_be_brought_up_is_tried_again(
    base: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    expect_log: LogGuard,
) -> None:
    monkeypatch.setattr(lifetimes, "RETRY_SECONDS", 0.05)
    async with daemon(base) as pool:
        await pool.lifetimes.pin(await stored(pool, b"pinned", DATA))
        await storage_of_pool(pool).demotions.finish()
    expect_log("a pinned page is not in DRAM|the SSD tier fails")
    async with daemon(base) as pool:
        storage, pinned = storage_of_pool(pool), files.find(pool, b"pinned")
        well = storage.read

        def fail(_source: int, _target: int, _size: int) -> None:
            raise OSError(5, "Input/output error")

        storage.read = fail  # type: ignore[assignment]
        await wait_until(lambda: storage.health.is_failed or pinned.state == SEALED)
        storage.read = well
        await wait_until(lambda: pinned.state == SEALED)
