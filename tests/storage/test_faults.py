"""A disk that hangs, fails or is full: whoever needs it hears so in time, and nobody else notices."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import trio

from kvfs import room
from kvfs.errors import TierFailed, TimedOut
from kvfs.index import SEALED, STORED, Entry
from kvfs.opening import Openings
from kvfs.pool import Pool
from kvfs.storage import promotion, writing
from kvfs.storage.described import RESIDENT
from kvfs.storage.storage import Storage
from tests.conftest import LogGuard
from tests.pool import files
from tests.pool.files import MIB, page, pattern, read, settled, wait_until
from tests.storage.disks import demoted, empty_dram, on_ssd, stored

OLD = pattern(100_000)


class Stuck:
    """A copy that does not come back before ``release``."""

    def __init__(self, copy: Callable[..., Any]) -> None:
        self._copy = copy
        self._released = threading.Event()
        self.calls = 0

    def __call__(self, source_fd: int, target_fd: int, size: int) -> Any:
        self.calls += 1
        self._released.wait(20)
        return self._copy(source_fd, target_fd, size)

    def release(self) -> None:
        self._released.set()


def failing(number: int) -> Callable[..., Any]:
    def fail(_source: int, _target: int, _size: int) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.fixture
def quick(storage: Storage) -> None:
    """Time-outs of a fraction of a second."""
    storage.io_timeout = 0.2


async def test_a_read_that_hangs_fails_at_its_deadline_and_others_go_on(
    pool: Pool, storage: Storage, openings: Openings, expect_log: LogGuard, quick: object
) -> None:
    expect_log("could not be read within|does not follow")
    entry = await demoted(pool, b"page", OLD)
    well = storage.read
    stuck = Stuck(well)
    storage.read = stuck
    began = trio.current_time()
    for kind in (TimedOut, TierFailed):
        with pytest.raises(kind):
            await read(openings, entry)
    assert 0.2 <= trio.current_time() - began < 1, "the second one is not tried at all"
    assert stuck.calls == 1
    assert entry.state == STORED
    assert pool.status(entry).st_size == len(OLD)
    other = await page(pool, b"other", OLD)
    assert await read(openings, other) == OLD
    assert any("could not be read" in line for line in storage.degraded())
    stuck.release()
    storage.read = well
    await wait_until(lambda: storage.jobs.abandoned == 0)
    storage.health.succeeded()
    assert await read(openings, entry) == OLD
    assert storage.degraded() == []


async def test_who_waits_for_a_thread_hears_at_once_that_the_disk_hangs(
    pool: Pool, storage: Storage, openings: Openings, expect_log: LogGuard, quick: object
) -> None:
    """The time of a read begins when the disk is asked: of more reads than there are threads none is late for
    that alone, and none waits for the disk in its turn."""
    expect_log("could not be read within|does not follow")
    entries = [await demoted(pool, b"%d" % number, OLD) for number in range(3 * promotion.READERS)]
    well = storage.read
    storage.read = stuck = Stuck(well)
    errors: list[Exception] = []

    async def read_one(entry: Entry) -> None:
        with pytest.raises((TimedOut, TierFailed)) as caught:
            await read(openings, entry)
        errors.append(caught.value)

    with trio.fail_after(2 * storage.io_timeout):
        async with trio.open_nursery() as nursery:
            for entry in entries:
                nursery.start_soon(read_one, entry)
    assert stuck.calls == promotion.READERS
    assert sum(isinstance(error, TierFailed) for error in errors) == 2 * promotion.READERS
    stuck.release()
    storage.read = well
    await wait_until(lambda: storage.jobs.abandoned == 0)
    storage.health.succeeded()
    for entry in entries:
        assert await read(openings, entry) == OLD


async def test_many_reads_of_a_slow_disk_are_no_failure(
    pool: Pool, storage: Storage, openings: Openings
) -> None:
    """Each takes half of its time: the last ones wait for longer than all of theirs."""
    storage.io_timeout = 0.4
    entries = [await demoted(pool, b"%d" % number, OLD) for number in range(4 * promotion.READERS)]
    well = storage.read

    def slowly(source_fd: int, target_fd: int, size: int) -> Any:
        time.sleep(0.2)
        return well(source_fd, target_fd, size)

    storage.read = slowly

    async def read_one(entry: Entry) -> None:
        assert await read(openings, entry) == OLD

    async with trio.open_nursery() as nursery:
        for entry in entries:
            nursery.start_soon(read_one, entry)
    assert storage.degraded() == []


async def test_who_waits_to_be_written_hears_at_once_that_the_disk_hangs(
    pool: Pool, storage: Storage, monkeypatch: pytest.MonkeyPatch, expect_log: LogGuard, quick: object
) -> None:
    expect_log("could not be written within|was not copied")
    monkeypatch.setattr(writing, "BATCH_PAGES", 2)
    storage.demotions.unstored.settle_seconds = 1000
    entries = [await page(pool, b"%d" % number, OLD) for number in range(8)]
    well = storage.write
    storage.write = stuck = Stuck(well)
    with trio.fail_after(2 * storage.io_timeout):
        await storage.demotions.copy_all(entries)
    assert stuck.calls == 1
    assert {entry.stored for entry in entries} == {None}
    assert storage.tier.accounts.reserved_bytes <= 2 * (len(OLD) + (1 << 20)), "of what is stuck alone"
    stuck.release()
    storage.write = well
    await wait_until(lambda: storage.jobs.abandoned == 0)
    storage.demotions.health.succeeded()
    await storage.demotions.copy_all(entries)
    assert {entry.stored for entry in entries} == {RESIDENT}
    assert storage.tier.accounts.reserved_bytes == 0


async def test_many_writes_to_a_slow_disk_are_no_failure(pool: Pool, storage: Storage) -> None:
    """What is handed to the thread together has the time of all."""
    storage.io_timeout = 0.4
    storage.demotions._copying.bytes_per_second = len(OLD) / 0.2
    well = storage.write

    def slowly(source_fd: int, target_fd: int, size: int) -> Any:
        time.sleep(0.2)
        return well(source_fd, target_fd, size)

    storage.write = slowly
    for number in range(8):
        await page(pool, b"%d" % number, OLD)
    await storage.demotions.finish()
    assert storage.demotions.written == 8
    assert storage.degraded() == []


async def test_a_write_that_hangs_keeps_nobody_from_evicting(
    pool: Pool, storage: Storage, expect_log: LogGuard, quick: object
) -> None:
    expect_log("could not be written within|was not copied|does not follow")
    stuck = Stuck(storage.write)
    storage.demotions.unstored.settle_seconds = 1000
    pages = [await page(pool, b"%d" % number, OLD) for number in range(8)]
    well, storage.write = storage.write, stuck
    with trio.fail_after(5):
        await empty_dram(pool)
    gone = [entry for entry in pages if entry.parent is None]
    assert len(gone) >= 6, "they are lost, as without an SSD"
    assert stuck.calls <= 2, "and not each of them is tried"
    stuck.release()
    storage.write = well
    await wait_until(lambda: storage.jobs.abandoned == 0)
    storage.demotions.health.succeeded()
    again = await page(pool, b"again", OLD)
    await empty_dram(pool)
    assert again.state == STORED


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS])
async def test_a_disk_that_fails_to_write_is_left_alone_for_a_while(
    pool: Pool, storage: Storage, openings: Openings, expect_log: LogGuard, number: int
) -> None:
    expect_log("the SSD tier takes no pages|was not copied")
    kept = await demoted(pool, b"kept", OLD)
    well, storage.write = storage.write, failing(number)
    entry = await page(pool, b"page", OLD)
    await wait_until(lambda: bool(storage.demotions.failures))
    assert entry.stored is None
    assert not storage.statistics()["working"]
    assert dict(storage.demotions.failures) == {"io-error": 1}
    assert storage.demotions.unstored.waiting_bytes == len(OLD), "it still has to be copied"
    assert any("takes no pages" in line for line in storage.degraded())
    assert await read(openings, kept) == OLD, "what is there can be read"
    storage.write = well
    await wait_until(lambda: entry.stored == RESIDENT)
    assert storage.degraded() == []
    assert storage.demotions.unstored.waiting_bytes == 0


async def test_a_disk_that_fails_to_read_is_an_error_and_not_a_miss(
    pool: Pool, storage: Storage, openings: Openings, expect_log: LogGuard
) -> None:
    expect_log("the SSD tier fails")
    entry = await demoted(pool, b"page", OLD)
    well, storage.read = storage.read, failing(errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        await read(openings, entry)
    assert entry.state == STORED
    assert pool.index.find(b"page") is entry
    storage.read = well
    storage.health.succeeded()
    assert await read(openings, entry) == OLD


async def test_names_follow_once_the_disk_works_again(
    pool: Pool, storage: Storage, monkeypatch: pytest.MonkeyPatch, expect_log: LogGuard
) -> None:
    expect_log("does not follow")
    await stored(pool, b"page", OLD)
    with monkeypatch.context() as patch:

        def fail(_path: bytes) -> os.stat_result:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        patch.setattr(storage.tier, "stat", fail)
        pool.names.rename(pool.index.root, b"page", pool.index.root, b"moved", 0)
        await wait_until(lambda: bool(storage.history.failure))
        assert storage.degraded()
    await storage.history.settled()
    assert on_ssd(pool, b"moved") == OLD
    assert on_ssd(pool, b"page") is None


@pytest.mark.parametrize("ssd", [8 * MIB], indirect=True)
async def test_a_small_ssd_keeps_the_pages_used_last(
    pool: Pool, storage: Storage, openings: Openings
) -> None:
    for number in range(30):
        await page(pool, b"%02d" % number, pattern(MIB, number))
        await storage.demotions.finish()
        await empty_dram(pool)
        assert storage.tier.accounts.used_bytes <= 8 * MIB
    left = sorted(pool.index.root.children)
    assert 4 <= len(left) <= 8
    assert left == files.names(*range(30 - len(left), 30))
    assert storage.space.evictions == 30 - len(left)
    for name in left:
        assert await read(openings, files.find(pool, name)) == pattern(MIB, int(name))
    await settled(pool)
    assert {entry.state for entry in pool.policy.victims()} == {SEALED}


async def test_creating_a_file_does_not_wait_long_for_a_disk_that_hangs(
    pool: Pool, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "SEALING_SECONDS", 0.2)
    storage.demotions.unstored.settle_seconds = 1000
    stuck = Stuck(storage.write)
    well, storage.write = storage.write, stuck
    for number in range(14):
        await page(pool, b"%d" % number, pattern(4 * MIB, number))
    await wait_until(lambda: stuck.calls > 0)
    began = trio.current_time()
    for number in range(8):
        entry = files.create(pool, b"new-%d" % number)
        await pool.evictor.expect_growth()
        files.put(entry, OLD)
        pool.remove_writer(entry)
    assert trio.current_time() - began < 2
    stuck.release()
    storage.write = well
    await wait_until(lambda: storage.jobs.abandoned == 0)
    await settled(pool)
