"""The directory of the SSD is removed or moved while it is in use."""

from __future__ import annotations

import shutil

import pytest
import trio

from kvfs.index import SEALED
from kvfs.opening import Openings
from kvfs.pool import Pool
from kvfs.storage import place
from kvfs.storage.described import RESIDENT
from kvfs.storage.storage import Storage
from tests.conftest import LogGuard
from tests.pool.files import page, pattern, read, wait_until
from tests.storage.disks import demoted, empty_dram, stored

DATA = pattern(100_000)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "INTERVAL", 0.05)


async def test_what_is_moved_away_is_read_from_and_used_again_when_it_is_back(
    pool: Pool, storage: Storage, openings: Openings, expect_log: LogGuard
) -> None:
    expect_log("the SSD tier takes no pages: .*/ssd is not there any more: it was moved or unmounted")
    there = await demoted(pool, b"there", DATA)
    root = storage.tier.directory
    elsewhere = root.with_name("elsewhere")
    root.rename(elsewhere)
    await wait_until(lambda: bool(storage.place.problem))
    assert [line for line in storage.degraded() if "is not there any more" in line]
    new = await page(pool, b"new", DATA)
    await trio.sleep(0.3)
    assert new.stored is None
    assert await read(openings, there) == DATA
    root.mkdir()  # another one is not the same
    await trio.sleep(0.2)
    assert storage.place.problem
    root.rmdir()
    elsewhere.rename(root)
    await wait_until(lambda: new.stored == RESIDENT)
    assert storage.degraded() == []
    assert len(expect_log.lines) == 1


async def test_what_is_removed_is_given_up(
    pool: Pool, storage: Storage, openings: Openings, expect_log: LogGuard
) -> None:
    expect_log("the SSD tier is given up until the next mount: .*/ssd was removed")
    there, both = await demoted(pool, b"there", DATA), await stored(pool, b"both", DATA)
    shutil.rmtree(storage.tier.directory)
    await wait_until(lambda: storage.history.is_lost)
    assert there.parent is None
    assert (both.state, both.stored) == (SEALED, None)
    assert await read(openings, both) == DATA
    new = await page(pool, b"new", DATA)
    pool.names.rename(pool.index.root, b"new", pool.index.root, b"newer", 0)
    await empty_dram(pool)
    assert new.parent is None, "as without an SSD"
    (line,) = storage.degraded()
    assert line.endswith("was removed")
    with trio.fail_after(1):
        await storage.demotions.finish()
    assert len(expect_log.lines) == 1
    storage.tier.directory.mkdir()
