"""What is damaged goes, what is whole stays, whatever else happens to a page meanwhile."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable

import pytest
import trio

from kvfs.errors import StalePage, TimedOut
from kvfs.index import SEALED, STORED, Entry
from kvfs.opening import Openings
from kvfs.page import Digest
from kvfs.pool import Pool
from kvfs.storage.described import RESIDENT
from kvfs.storage.storage import Copy, Storage
from kvfs.verification import Verifier
from tests.conftest import LogGuard
from tests.pool import files
from tests.pool.faces import KernelFace
from tests.pool.files import mapped, page, read, rewrite, settled, wait_until
from tests.pool.test_accounts import Programs
from tests.storage.damage import (
    DATA,
    OTHER,
    Damage,
    damages,
    harm_dram,
    harm_ssd,
    remove_dram,
    remove_ssd,
)
from tests.storage.disks import demoted, empty_dram, on_ssd, stored


@damages
async def test_what_is_damaged_in_dram_is_served_from_the_ssd(
    pool: Pool, storage: Storage, verifier: Verifier, expect_log: LogGuard, damage: Damage, reason: str
) -> None:
    expect_log("page leaves DRAM, the SSD has it whole")
    entry = await stored(pool, b"page", DATA)
    pool.names.link(entry, pool.index.root, b"link")
    entry.hits = 7
    mtime = pool.status(entry).st_mtime_ns
    harm_dram(pool, b"page", damage)
    await verifier.repair(entry)
    fresh = files.find(pool, b"page")
    assert fresh is files.find(pool, b"link")
    assert (fresh.state, fresh.hits, pool.status(fresh).st_mtime_ns) == (STORED, 7, mtime)
    assert pool.status(fresh).st_size == len(DATA)
    assert await verifier.verify(fresh) == {"ssd": "ok"}
    assert await read(Openings(pool), fresh) == DATA
    assert dict(pool.counters.misses) == {}


async def test_who_has_the_damaged_page_open_keeps_it(
    pool: Pool, openings: Openings, verifier: Verifier, expect_log: LogGuard
) -> None:
    expect_log("the SSD has it whole")
    entry = await stored(pool, b"page", DATA)
    holding = await openings.open_reading(entry)
    with mapped(os.dup(holding.read_fd), len(DATA), writable=False) as mapping:
        harm_dram(pool, b"page")
        await verifier.repair(entry)
        assert mapping[:100] == DATA[:100]
        assert os.fstat(holding.read_fd).st_nlink == 0
    assert await read(openings, files.find(pool, b"page")) == DATA
    openings.close_reading(entry)


async def test_a_file_that_vanished_from_dram_comes_back_from_the_ssd(
    pool: Pool, openings: Openings, verifier: Verifier, expect_log: LogGuard
) -> None:
    expect_log("the SSD has it whole: its file is gone")
    entry = await stored(pool, b"page", DATA)
    remove_dram(pool, b"page")
    await verifier.repair(entry)
    assert await read(openings, files.find(pool, b"page")) == DATA


@damages
async def test_a_damaged_copy_is_set_aside_and_made_again(
    pool: Pool, storage: Storage, verifier: Verifier, expect_log: LogGuard, damage: Damage, reason: str
) -> None:
    expect_log("page is quarantined")
    entry = await stored(pool, b"page", DATA)
    pool.names.link(entry, pool.index.root, b"link")
    await storage.history.settled()
    harm_ssd(storage, b"page", damage)
    await verifier.repair(entry)
    (one,) = storage.tier.list_quarantined()
    assert (one.path, one.reason) == (b"page", reason)
    await wait_until(lambda: entry.stored == RESIDENT)
    assert files.find(pool, b"page") is entry
    assert on_ssd(pool, b"page") == on_ssd(pool, b"link") == DATA
    assert await verifier.verify(entry) == {"dram": "ok", "ssd": "ok"}
    assert dict(pool.counters.misses) == {}


async def test_a_copy_that_is_gone_is_made_again(
    pool: Pool, storage: Storage, verifier: Verifier, expect_log: LogGuard
) -> None:
    expect_log("page is gone from the SSD behind our back")
    entry = await stored(pool, b"page", DATA)
    remove_ssd(storage, b"page")
    await verifier.repair(entry)
    await wait_until(lambda: entry.stored == RESIDENT)
    assert on_ssd(pool, b"page") == DATA


@pytest.mark.parametrize("where", ["dram", "ssd", "both"])
async def test_where_no_copy_is_whole_the_name_goes(
    pool: Pool, storage: Storage, verifier: Verifier, expect_log: LogGuard, where: str
) -> None:
    if where == "ssd":
        entry = await demoted(pool, b"page", DATA)
    elif where == "both":
        entry = await stored(pool, b"page", DATA)
    else:
        storage.demotions.unstored.settle_seconds = 1000
        entry = await page(pool, b"page", DATA)
    if where != "ssd":
        expect_log("page is damaged and dropped: its bytes do not match its digest")
        harm_dram(pool, b"page")
    if where != "dram":
        expect_log("page is quarantined")
        harm_ssd(storage, b"page")
    await verifier.repair(entry)
    assert pool.index.find(b"page") is None
    assert dict(pool.counters.misses) == {"corrupt": 1}
    await storage.history.settled()
    assert on_ssd(pool, b"page") is None
    assert len(storage.tier.list_quarantined()) == (where != "dram")
    assert pool.tier.list(b"") == []
    storage.demotions.unstored.settle_seconds = 0
    again = await stored(pool, b"page", DATA)
    assert await verifier.verify(again) == {"dram": "ok", "ssd": "ok"}


# What happens meanwhile


class Held:
    """A copy that waits in its thread until it is told to go on."""

    def __init__(self, copy: Copy) -> None:
        self._copy = copy
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, source_fd: int, target_fd: int, size: int) -> Digest:
        self.begun.set()
        self.go_on.wait(10)
        return self._copy(source_fd, target_fd, size)


@pytest.fixture
def held(storage: Storage) -> Held:
    held = Held(storage.read)
    storage.read = held
    return held


async def repair_while(verifier: Verifier, entry: Entry, held: Held, meanwhile: Callable[[], object]) -> None:
    """Repairs, and does something else while the SSD is read."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(verifier.repair, entry)
        await wait_until(held.begun.is_set)
        meanwhile()
        held.go_on.set()


@pytest.mark.parametrize("only_there", [True, False])
async def test_a_page_that_is_renamed_meanwhile(
    pool: Pool, storage: Storage, verifier: Verifier, held: Held, only_there: bool
) -> None:
    entry = await (demoted if only_there else stored)(pool, b"page", DATA)
    root = pool.index.root
    await repair_while(verifier, entry, held, lambda: pool.names.rename(root, b"page", root, b"new", 0))
    assert await verifier.verify(entry) == ({"ssd": "ok"} if only_there else {"dram": "ok", "ssd": "ok"})
    assert files.find(pool, b"new") is entry
    assert storage.tier.list_quarantined() == []


async def test_a_page_that_is_removed_meanwhile(
    pool: Pool, storage: Storage, verifier: Verifier, held: Held
) -> None:
    entry = await demoted(pool, b"page", DATA)
    await repair_while(verifier, entry, held, lambda: pool.remove_everywhere(entry))
    assert storage.tier.list_quarantined() == []
    assert dict(pool.counters.misses) == {}


async def test_a_damaged_page_that_is_written_anew_meanwhile_is_kept(
    pool: Pool, openings: Openings, storage: Storage, verifier: Verifier, held: Held
) -> None:
    """Its new bytes have nothing to do with the damage."""
    entry = await demoted(pool, b"page", DATA)
    harm_ssd(storage, b"page")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(verifier.repair, entry)
        await wait_until(held.begun.is_set)
        await rewrite(openings, entry, OTHER)
        held.go_on.set()
    await settled(pool)
    await wait_until(lambda: entry.stored == RESIDENT)
    assert await verifier.verify(entry) == {"dram": "ok", "ssd": "ok"}
    assert on_ssd(pool, b"page") == OTHER


async def test_pages_are_not_changed_in_place_while_they_are_looked_at(
    pool: Pool, openings: Openings, verifier: Verifier, held: Held, short_retry: None
) -> None:
    """So no page that is being written looks damaged."""
    entry = await stored(pool, b"page", DATA)

    async def write() -> None:
        with pytest.raises(StalePage):
            await openings.open_writing(entry, truncate=True)
        await rewrite(openings, files.find(pool, b"page"), OTHER)
        held.go_on.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(verifier.repair, entry)
        await wait_until(held.begun.is_set)
        nursery.start_soon(write)
    await settled(pool)
    fresh = files.find(pool, b"page")
    await wait_until(lambda: fresh.stored == RESIDENT)
    assert await verifier.verify(fresh) == {"dram": "ok", "ssd": "ok"}
    assert on_ssd(pool, b"page") == OTHER


async def test_a_disk_that_hangs_is_waited_for_so_long_and_no_longer(
    pool: Pool, storage: Storage, verifier: Verifier, held: Held, expect_log: LogGuard
) -> None:
    expect_log("the SSD tier fails: a page was not verified within")
    storage.io_timeout = 0.2
    entry = await demoted(pool, b"page", DATA)
    with pytest.raises(TimedOut):
        await verifier.verify(entry)
    assert files.find(pool, b"page").state == STORED
    held.go_on.set()


async def test_damage_in_dram_goes_although_the_disk_fails(
    pool: Pool, storage: Storage, verifier: Verifier, expect_log: LogGuard
) -> None:
    expect_log("page is damaged and dropped")
    entry = await stored(pool, b"page", DATA)
    harm_dram(pool, b"page")

    def fail(_source: int, _target: int, _size: int) -> Digest:
        raise OSError(5, "Input/output error")

    storage.read = fail
    with pytest.raises(OSError, match="Input/output error"):
        await verifier.repair(entry)
    assert pool.index.find(b"page") is None
    await storage.history.settled()


async def test_a_page_that_comes_up_meanwhile(
    pool: Pool, openings: Openings, storage: Storage, verifier: Verifier
) -> None:
    entries = [await stored(pool, b"%d" % number, DATA) for number in range(8)]
    await empty_dram(pool)
    async with trio.open_nursery() as nursery:
        for entry in entries:
            nursery.start_soon(read, openings, entry)
            nursery.start_soon(verifier.repair, entry)
    assert {entry.state for entry in entries} == {SEALED}
    for entry in entries:
        assert await verifier.verify(entry) == {"dram": "ok", "ssd": "ok"}


@pytest.mark.parametrize("tier", [16 << 20], indirect=True)
async def test_nothing_whole_is_ever_taken_for_damaged(
    pool: Pool,
    storage: Storage,
    openings: Openings,
    face: KernelFace,
    verifier: Verifier,
    short_retry: None,
    expect_log: LogGuard,
) -> None:
    """While files are written, renamed, linked, removed, evicted and read at random."""
    programs = Programs(pool, openings, face, random.Random(3))
    looks: Counter[str] = Counter()

    async def repair_everything() -> None:
        while True:
            for entry in list(pool.index.entries()):
                if entry.is_file and entry.parent is not None:
                    await verifier.repair(entry)
                    looks.update((await verifier.verify(entry)).values())
            await trio.sleep(0.001)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(repair_everything)
        for number in range(2000):
            await programs.step()
            if number % 10 == 9:
                await pool.evictor.free(1 << 20)
        nursery.cancel_scope.cancel()
    programs.close_all()
    await settled(pool)
    await storage.demotions.finish()
    assert set(looks) == {"ok"}
    assert looks["ok"] > 200
    assert storage.tier.list_quarantined() == []
    assert pool.counters.misses["corrupt"] == 0
    if expect_log.lines:  # as it happens
        expect_log("every page left is in use|is dropped: the pool was full")
