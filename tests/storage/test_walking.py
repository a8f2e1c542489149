"""What the mount answers while a walk over the SSD has not ended, because the disk hangs or fails."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import trio

from kvfs.fs.control import ControlFiles
from kvfs.fs.files import Files
from kvfs.fs.operations import Operations
from kvfs.index import ROOT_NUMBER
from kvfs.opening import Openings
from kvfs.pool import Pool
from kvfs.storage import walk
from kvfs.storage.storage import Storage
from kvfs.tiers.ssd import SsdTier
from kvfs.tiers.ssd_scan import Scan, Stored
from tests.conftest import LogGuard
from tests.pool.files import page, pattern, read
from tests.storage.disks import on_ssd
from tests.tiers.ssds import store

DATA = pattern(10_000)


@pytest.fixture
def stuck(ssd: SsdTier, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The walk over an SSD with two pages finds nothing before this is set."""
    released = threading.Event()
    genuine = Scan.next_batch

    def wait(scan: Scan) -> list[Stored]:
        released.wait(20)
        return genuine(scan)

    store(ssd, b"one", DATA)
    store(ssd, b"two", DATA)
    monkeypatch.setattr(Scan, "next_batch", wait)
    monkeypatch.setattr(walk, "STALLED_SECONDS", 0.3)
    yield released
    released.set()


async def test_a_listing_waits_for_a_walk_only_while_that_gets_on(
    stuck: threading.Event, pool: Pool, storage: Storage, openings: Openings
) -> None:
    operations: Any = Operations(pool, Files(pool), ControlFiles({}, (0, 0)))
    await page(pool, b"new", DATA)
    with trio.fail_after(15):
        for _ in range(20):
            await operations.opendir(ROOT_NUMBER, None)
    assert not storage.walked.is_set()
    one = await storage.walk.find(pool.index.root, b"one")
    assert one is not None
    assert await read(openings, one) == DATA
    assert set(pool.index.root.children) == {b"new", b"one"}
    stuck.set()
    await storage.walked.wait()
    assert set(pool.index.root.children) == {b"new", b"one", b"two"}


async def test_names_that_a_failing_disk_may_have_are_free(
    stuck: threading.Event,
    pool: Pool,
    storage: Storage,
    openings: Openings,
    monkeypatch: pytest.MonkeyPatch,
    expect_log: LogGuard,
) -> None:
    expect_log("the SSD tier fails: Input/output error")

    def fail(*_arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(walk, "look", fail)
        for _ in range(2):
            with trio.fail_after(4):
                assert await storage.walk.find(pool.index.root, b"one") is None
        new = await page(pool, b"one", DATA[::-1])
    storage.succeeded()
    stuck.set()
    await storage.walked.wait()
    await storage.history.settled()
    assert pool.index.find(b"one") is new
    assert await read(openings, new) == DATA[::-1]
    await storage.demotions.finish()
    assert on_ssd(pool, b"one") == DATA[::-1]


async def test_a_walk_that_hangs_for_too_long_is_given_up(
    stuck: threading.Event, pool: Pool, storage: Storage, expect_log: LogGuard
) -> None:
    expect_log("the SSD tier is given up until the next mount: a walk over it found nothing new for 0.3 s")
    storage.io_timeout = 0.3
    with trio.fail_after(15):
        await storage.walked.wait()
    assert storage.history.is_lost
    assert [line for line in storage.degraded() if "given up" in line]
    new = await page(pool, b"new", DATA)
    stuck.set()
    await trio.sleep(0.3)
    assert list(pool.index.root.children) == [b"new"]
    assert new.stored is None
    with trio.fail_after(15):
        await storage.demotions.finish()
