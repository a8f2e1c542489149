"""What df shows of a pool with an SSD: a name counts once, wherever its bytes are."""

from __future__ import annotations

import pytest
import trio

from kvfs.pool import Pool
from kvfs.storage.storage import Storage
from tests.pool import files
from tests.pool.files import MIB, page, pattern, put, settled, wait_until
from tests.storage.disks import empty_dram

NEAR = MIB
"""Directories and attributes on the SSD."""


def used(pool: Pool) -> int:
    return pool.room().used_bytes


async def test_bytes_count_once_wherever_they_are(pool: Pool, storage: Storage) -> None:
    storage.demotions.unstored.settle_seconds = 1000
    empty = used(pool)
    draft = files.create(pool, b"page")
    put(draft, pattern(8 * MIB))
    assert 8 * MIB <= used(pool) - empty < 8 * MIB + NEAR, "being written"
    pool.remove_writer(draft)
    await settled(pool)
    assert 8 * MIB <= used(pool) - empty < 8 * MIB + NEAR, "in DRAM alone"
    assert await storage.demotions.copy(draft)
    assert 8 * MIB <= used(pool) - empty < 8 * MIB + NEAR, "in both"
    await empty_dram(pool)
    assert 8 * MIB <= used(pool) - empty < 8 * MIB + NEAR, "on the SSD alone"
    pool.remove_everywhere(draft)
    await wait_until(lambda: used(pool) - empty < NEAR)
    assert pool.room().total_bytes == storage.tier.room().total_bytes


@pytest.mark.parametrize("ssd", [16 * MIB], indirect=True)
async def test_an_ssd_smaller_than_dram_adds_to_it(pool: Pool, storage: Storage) -> None:
    dram = pool.tier.room().total_bytes
    assert pool.room().total_bytes == dram + storage.tier.room().total_bytes
    for number in range(5):
        await page(pool, b"%d" % number, pattern(6 * MIB, number))
        await storage.demotions.finish()  # one by one: together they would want more room than there is
    occupied = sum(pool.status(entry).st_blocks * 512 for entry in pool.index.root.children.values())
    assert occupied == 30 * MIB
    assert occupied <= used(pool) < occupied + NEAR
    room = pool.room()
    assert room.used_bytes + room.free_bytes == room.total_bytes


async def test_what_is_above_a_lowered_capacity_goes_at_once(pool: Pool, storage: Storage) -> None:
    entries = []
    for number in range(8):
        entries.append(await page(pool, b"%d" % number, pattern(4 * MIB, number)))
        await storage.demotions.finish()
        await empty_dram(pool)
    accounts = storage.tier.accounts
    await pool.lifetimes.pin(entries[0])
    accounts.capacity_bytes = 18 * MIB
    with trio.fail_after(20):
        await wait_until(lambda: not accounts.excess_bytes)
        await storage.history.settled()
    assert [entry.parent is not None for entry in entries] == [True, *[False] * 4, *[True] * 3]
    assert accounts.used_bytes <= 18 * MIB
    assert storage.space.evictions == 4
