"""Pages are compared with their digests wherever they are, and nothing else changes."""

from __future__ import annotations

import os

from kvfs.copies.direct import DirectCopier
from kvfs.opening import Openings
from kvfs.page import Digest
from kvfs.pool import Pool
from kvfs.storage.described import RESIDENT
from kvfs.storage.storage import Storage
from kvfs.syscalls import RENAME_EXCHANGE, renameat2
from kvfs.verification import Verifier
from tests.pool import files
from tests.pool.files import create, page, pattern, put, read, rewrite, settled, wait_until
from tests.storage.damage import (
    AT_FDCWD,
    DATA,
    OTHER,
    Damage,
    damages,
    harm_dram,
    harm_ssd,
    remove_dram,
    remove_ssd,
)
from tests.storage.disks import demoted, stored


async def test_whole_pages(pool: Pool, storage: Storage, verifier: Verifier) -> None:
    assert await verifier.verify(await demoted(pool, b"ssd", DATA)) == {"ssd": "ok"}
    assert await verifier.verify(await stored(pool, b"both", DATA)) == {"dram": "ok", "ssd": "ok"}
    storage.demotions.unstored.settle_seconds = 1000
    assert await verifier.verify(await page(pool, b"dram", DATA)) == {"dram": "ok"}


async def test_drafts_and_directories_have_no_digest(pool: Pool, verifier: Verifier) -> None:
    entry = create(pool, b"draft")
    put(entry, DATA)
    assert await verifier.verify(entry) == {}
    await verifier.repair(entry)
    assert await verifier.verify(files.mkdir(pool, b"directory")) == {}
    pool.remove_writer(entry)
    await settled(pool)


@damages
async def test_damage_in_dram_is_seen(pool: Pool, verifier: Verifier, damage: Damage, reason: str) -> None:
    entry = await stored(pool, b"page", DATA)
    harm_dram(pool, b"page", damage)
    assert await verifier.verify(entry) == {"dram": reason, "ssd": "ok"}
    assert files.find(pool, b"page") is entry, "looking changes nothing"


@damages
async def test_damage_on_the_ssd_is_seen(
    pool: Pool, storage: Storage, verifier: Verifier, damage: Damage, reason: str
) -> None:
    both, ssd = await stored(pool, b"both", DATA), await demoted(pool, b"ssd", DATA)
    await read(Openings(pool), both)
    for name in (b"both", b"ssd"):
        harm_ssd(storage, name, damage)
    assert await verifier.verify(both) == {"dram": "ok", "ssd": reason}
    assert await verifier.verify(ssd) == {"ssd": reason}
    assert storage.tier.list_quarantined() == []
    assert files.find(pool, b"ssd") is ssd


async def test_files_that_are_gone_are_seen(pool: Pool, storage: Storage, verifier: Verifier) -> None:
    entry = await stored(pool, b"page", DATA)
    remove_ssd(storage, b"page")
    assert await verifier.verify(entry) == {"dram": "ok", "ssd": "gone"}
    remove_dram(pool, b"page")
    assert await verifier.verify(entry) == {"dram": "gone", "ssd": "gone"}
    assert files.find(pool, b"page") is entry
    pool.remove_everywhere(entry)


async def test_pages_that_were_swapped_are_seen(pool: Pool, storage: Storage, verifier: Verifier) -> None:
    one, other = await stored(pool, b"one", DATA), await stored(pool, b"other", OTHER)
    root = storage.tier.directory
    renameat2(AT_FDCWD, os.fsencode(root / "one"), AT_FDCWD, os.fsencode(root / "other"), RENAME_EXCHANGE)
    for entry in (one, other):
        assert await verifier.verify(entry) == {"dram": "ok", "ssd": "name"}


async def test_an_older_copy_is_not_the_page(pool: Pool, storage: Storage, verifier: Verifier) -> None:
    """Whole by itself, and of other bytes than the page has in DRAM."""
    entry = await stored(pool, b"page", DATA)
    kept = storage.tier.open(b"page", os.O_RDONLY)
    record = storage.tier.records.record(kept)
    os.close(kept)
    await rewrite(Openings(pool), entry, OTHER)
    await settled(pool)
    await wait_until(lambda: entry.stored == RESIDENT)
    path = storage.tier.directory / "page"
    path.write_bytes(DATA)
    storage.tier.records.write(os.fsencode(path), record)
    assert await verifier.verify(entry) == {"dram": "ok", "ssd": "bytes"}


async def test_a_damaged_further_name_is_seen(pool: Pool, storage: Storage, verifier: Verifier) -> None:
    entry = await stored(pool, b"page", DATA)
    pool.names.link(entry, pool.index.root, b"link")
    await storage.history.settled()
    assert await verifier.verify(entry) == {"dram": "ok", "ssd": "ok"}
    remove_ssd(storage, b"link")
    assert await verifier.verify(entry) == {"dram": "ok", "ssd": "gone"}
    (storage.tier.directory / "link").write_bytes(DATA)
    assert await verifier.verify(entry) == {"dram": "ok", "ssd": "name"}
    remove_ssd(storage, b"link")
    pool.remove_everywhere(entry)


async def test_looking_is_no_use_of_a_page(pool: Pool, storage: Storage, verifier: Verifier) -> None:
    storage.read = DirectCopier().read
    entries = [await stored(pool, b"%d" % number, pattern(100_000, number)) for number in range(6)]
    for entry in entries[:3]:
        await pool.evictor.evict(entry)

    def everything() -> list[object]:
        return [
            [entry.name for entry in pool.policy.victims()],
            [entry.name for entry in storage.order.victims()],
            [(entry.state, entry.hits, entry.stored) for entry in entries],
            [pool.status(entry).st_atime_ns for entry in entries],
            [storage.tier.stat(entry.path()).st_atime_ns for entry in entries],
            (pool.counters.hits, dict(pool.counters.misses), storage.promotions.read, len(pool.idle)),
            sorted(pool.tier.list(b"")),
        ]

    before = everything()
    for entry in (entries[3], *entries, entries[0]):
        assert set((await verifier.verify(entry)).values()) == {"ok"}
        await verifier.repair(entry)
    assert everything() == before


async def test_it_reads_in_the_way_in_which_pages_come_up(
    pool: Pool, storage: Storage, verifier: Verifier
) -> None:
    entry = await demoted(pool, b"page", DATA)
    sizes = []
    well = storage.read

    def counting(source: int, target: int, size: int) -> Digest:
        sizes.append(size)
        return well(source, target, size)

    storage.read = counting
    assert await verifier.verify(entry) == {"ssd": "ok"}
    assert sizes == [len(DATA)]
