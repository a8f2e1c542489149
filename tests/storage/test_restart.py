"""What the next daemon finds: pages that only the SSD has, pages that both have, and where the two differ."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from kvfs import adoption
from kvfs.errors import StalePage
from kvfs.fs.attributes import ExtendedAttributes
from kvfs.index import STORED, UNCHECKED
from kvfs.opening import Openings
from kvfs.page import Owner
from kvfs.pool import Pool
from kvfs.storage.described import RESIDENT
from kvfs.storage.storage import Storage
from kvfs.tiers.dram import DramTier
from tests.conftest import LogGuard
from tests.pool import files
from tests.pool.checks import check_pool
from tests.pool.conftest import ROOT_OWNER
from tests.pool.faces import KernelFace
from tests.pool.files import MIB, page, pattern, read
from tests.storage.disks import check_storage, demoted, empty_dram, on_ssd, storage_of, stored
from tests.tiers.ssds import attach

OLD, NEW = pattern(100_000), pattern(MIB, 2)


@asynccontextmanager
async def daemon(base: Path, *, keep_dram: bool = False) -> AsyncIterator[Pool]:
    """One daemon from its start, at which it takes over what is there, to its end, of which it hears nothing.
    Without ``keep_dram`` the machine goes down with it."""
    tier = DramTier.attach(base / "dram", 64 * MIB, "prefer", "")
    ssd = attach(base / "ssd", 256 * MIB)
    face = KernelFace()
    pool = Pool(tier, ROOT_OWNER)
    try:
        storage_of(pool, ssd)
        adoption.adopt(pool)
        pool.attach_face(face)
        async with trio.open_nursery() as nursery:
            pool.start(nursery)
            await storage(pool).walked.wait()
            yield pool
            nursery.cancel_scope.cancel()
        check_pool(pool, face)
        check_storage(pool)
    finally:
        pool.close()
        face.end()
        ssd.close()
        tier.close(keep=keep_dram)


def flip(path: Path) -> None:
    """One bit of one byte."""
    with path.open("r+b") as file:
        byte = file.read(1)[0]
        file.seek(0)
        file.write(bytes([byte ^ 1]))


def storage(pool: Pool) -> Storage:
    assert pool.storage is not None
    return pool.storage


@pytest.fixture
def base(open_files: None, tmp_path: Path) -> Path:
    return tmp_path


async def test_pages_outlive_the_host(base: Path) -> None:
    owner = Owner(files.OWNER.mode, 7, 8)
    async with daemon(base) as pool:
        directory = files.mkdir(pool, b"directory")
        entry = await page(pool, b"page", OLD, directory)
        pool.set_owner(entry, owner)
        await ExtendedAttributes(pool).set(entry, "user.name", b"value")
        await demoted(pool, b"top", NEW)
        pool.names.link(files.find(pool, b"top"), directory, b"link")
        await storage(pool).demotions.finish()
    async with daemon(base) as pool:
        assert pool.pages == 0
        assert len(storage(pool).order) == 2
        entry = files.find(pool, b"directory/page")
        assert entry.state == STORED
        status = pool.status(entry)
        assert (status.st_size, status.st_uid, status.st_gid) == (len(OLD), 7, 8)
        assert files.find(pool, b"directory").owner == files.DIRECTORY
        assert files.find(pool, b"top") is files.find(pool, b"directory/link")
        openings = Openings(pool)
        assert await read(openings, entry) == OLD
        assert pool.tier.get_attribute(b"directory/page", "user.name") == b"value"
        assert await read(openings, files.find(pool, b"directory/link")) == NEW


async def test_what_dram_kept_is_served_from_there(base: Path) -> None:
    async with daemon(base, keep_dram=True) as pool:
        await stored(pool, b"both", OLD)
        storage(pool).demotions.unstored.settle_seconds = 1000
        await page(pool, b"dram", OLD)
    async with daemon(base) as pool:
        both, dram = files.find(pool, b"both"), files.find(pool, b"dram")
        assert (both.state, both.stored) == (UNCHECKED, RESIDENT)
        assert dram.state == UNCHECKED
        assert await read(Openings(pool), both) == OLD
        assert storage(pool).promotions.read == 0
        await storage(pool).demotions.finish()
        assert on_ssd(pool, b"dram") == OLD, "what had no copy gets one"


async def test_where_the_two_differ_dram_is_right(base: Path) -> None:
    async with daemon(base, keep_dram=True) as pool:
        entry = await stored(pool, b"page", OLD)
        await storage(pool).history.settled()
        # The daemon is killed before the SSD follows.
        storage(pool).history.is_lost = True
        await files.rewrite(Openings(pool), entry, NEW)
        await files.settled(pool)
        storage(pool).history.is_lost = False
        assert on_ssd(pool, b"page") == OLD
        entry.stored = RESIDENT
    async with daemon(base) as pool:
        assert await read(Openings(pool), files.find(pool, b"page")) == NEW
        await storage(pool).demotions.finish()
        assert on_ssd(pool, b"page") == NEW


async def test_links_that_the_ssd_did_not_follow_are_made_there(base: Path) -> None:
    async with daemon(base, keep_dram=True) as pool:
        for name in (b"0", b"1"):
            await stored(pool, name, OLD)
        await storage(pool).history.settled()
    for number in range(2):  # the daemon is killed right after it made them in DRAM
        os.link(base / "dram" / str(number), base / "dram" / f"link of {number}")
    async with daemon(base) as pool:
        await empty_dram(pool)
        for path in (b"link of 0", b"0", b"1", b"link of 1"):
            assert on_ssd(pool, path) == OLD
            assert await read(Openings(pool), files.find(pool, path)) == OLD


async def test_pages_leave_in_the_order_of_their_last_use(base: Path) -> None:
    async with daemon(base) as pool:
        for number in range(5):
            entry = await page(pool, b"%d" % number, OLD)
            pool.set_times(entry, (9 - number) * 10**9, 10**9)
        await storage(pool).demotions.finish()
    async with daemon(base) as pool:
        assert [entry.name for entry in storage(pool).order.victims()] == [b"4", b"3", b"2", b"1", b"0"]


async def test_hits_and_the_time_of_the_last_use_are_known_again(base: Path) -> None:
    async with daemon(base) as pool:
        entries = [await stored(pool, b"%d" % number, OLD) for number in range(3)]
        for _ in range(5):
            await read(Openings(pool), entries[0])
        await storage(pool).demotions.finish()
    async with daemon(base) as pool:
        assert [files.find(pool, b"%d" % number).hits for number in range(3)] == [5, 0, 0]
        assert [entry.name for entry in storage(pool).order.victims()] == [b"1", b"2", b"0"]


async def test_a_page_damaged_meanwhile_is_a_miss(base: Path, expect_log: LogGuard) -> None:
    expect_log("quarantined")
    async with daemon(base) as pool:
        await demoted(pool, b"page", OLD)
        await demoted(pool, b"other", NEW)
    flip(base / "ssd" / "page")
    async with daemon(base) as pool:
        openings = Openings(pool)
        with pytest.raises(StalePage):
            await read(openings, files.find(pool, b"page"))
        assert pool.index.find(b"page") is None
        assert await read(openings, files.find(pool, b"other")) == NEW
        await storage(pool).history.settled()


async def test_pages_found_damaged_at_the_start_are_misses(base: Path, expect_log: LogGuard) -> None:
    expect_log("quarantined")
    async with daemon(base) as pool:
        for number in range(3):
            await demoted(pool, b"%d" % number, OLD)
    os.truncate(base / "ssd" / "0", 10)
    (base / "ssd" / "1").rename(base / "ssd" / "moved")
    async with daemon(base) as pool:
        assert set(pool.index.root.children) == {b"2"}
        assert pool.counters.misses == {"corrupt": 2}
        assert dict(storage(pool).tier.damaged) == {"size": 1, "name": 1}


async def test_files_of_others_are_left_alone(base: Path, expect_log: LogGuard) -> None:
    expect_log("not ours")
    async with daemon(base) as pool:
        await demoted(pool, b"page", OLD)
    (base / "ssd" / "mine.txt").write_text("mine")
    async with daemon(base) as pool:
        assert pool.index.find(b"mine.txt") is None
        await stored(pool, b"another", OLD)
        await empty_dram(pool)
    assert (base / "ssd" / "mine.txt").read_text() == "mine"
    assert (base / "ssd" / "another").read_bytes() == OLD
