"""Random operations while pages are pinned, unpinned and expire: what is pinned stays, and the sums agree."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
import trio

from kvfs import opening
from kvfs.errors import AttributeMissing, OutOfRoom, StalePage, TooManyPins
from kvfs.index import DRAFT, STORED, Entry
from kvfs.opening import Openings
from kvfs.page import PIN, TTL
from kvfs.pool import Pool
from kvfs.storage.storage import Storage
from tests.conftest import LogGuard
from tests.pool.checks import check_pool
from tests.pool.faces import KernelFace
from tests.pool.files import MIB, read, settled
from tests.pool.test_accounts import Programs
from tests.storage.disks import check_storage


async def decide(pool: Pool, programs: Programs, chance: random.Random) -> None:
    """Pins or unpins a file, or says how long it lives."""
    found = programs.some_file()
    if found is None:
        return
    *_, entry = found
    with suppress(TooManyPins, AttributeMissing, StalePage, OutOfRoom):
        kind = chance.randrange(4)
        if kind == 0:
            await pool.lifetimes.pin(entry)
        elif kind == 1:
            pool.lifetimes.unpin(entry)
        elif kind == 2:
            await pool.lifetimes.set_ttl(entry, chance.choice((0.001, 0.5, 1, 1000)))
        else:
            pool.lifetimes.remove_ttl(entry)


async def said_of(pool: Pool, entry: Entry, name: str) -> bool:
    with suppress(AttributeMissing):
        return bool(await pool.lifetimes.read_attribute(entry, name))
    return False


@pytest.mark.parametrize("tier", [16 * MIB], indirect=True)
@pytest.mark.parametrize("ssd", [8 * MIB], indirect=True)
async def test_random_lifetimes(
    pool: Pool,
    storage: Storage,
    openings: Openings,
    face: KernelFace,
    monkeypatch: pytest.MonkeyPatch,
    expect_log: LogGuard,
) -> None:
    monkeypatch.setattr(opening, "RETRY_SECONDS", 0.02)
    chance = random.Random(4)
    programs = Programs(pool, openings, face, chance)
    for number in range(1500):
        await programs.step()
        if number % 5 == 0:
            await decide(pool, programs, chance)
        if number % 25 == 24:
            await pool.evictor.free(MIB)
        if number % 300 == 299:
            await settled(pool)
            assert face.faults == []
    programs.close_all()
    await settled(pool)
    await storage.demotions.finish()
    await trio.sleep(2.2)  # what is left has long to live, or is pinned
    await pool.evictor.free(16 * MIB)
    check_pool(pool, face)
    check_storage(pool)
    assert pool.counters.misses["expired"] > 5
    for entry in list(pool.index.entries()):
        if entry.is_file and entry.parent is not None and entry.state != DRAFT:
            assert pool.lifetimes.is_pinned(entry) == await said_of(pool, entry, PIN)
            assert (pool.lifetimes._expiry.get(entry.number) > 0) == await said_of(pool, entry, TTL)
            assert entry.state == STORED or pool.lifetimes.is_pinned(entry)
            assert await read(openings, entry) == programs.bytes_of[entry]
    programs.forget()
    if expect_log.lines:  # as it happens
        expect_log("every page left is in use|is dropped: the pool was full|is pinned no longer")
