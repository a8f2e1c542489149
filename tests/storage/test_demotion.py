"""When pages go down, which ones, and what becomes of those that the SSD refuses."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
import trio

from kvfs.errors import NotStorable, StalePage, TierFull
from kvfs.index import SEALED, STORED
from kvfs.interleaved import Work
from kvfs.opening import Openings
from kvfs.page import Digest
from kvfs.policy.admission import Admission
from kvfs.pool import Pool
from kvfs.storage import demotion
from kvfs.storage.described import RESIDENT
from kvfs.storage.storage import Storage
from kvfs.storage.unstored import COLD, NOT_REUSED, NOT_STORABLE
from tests.conftest import LogGuard
from tests.pool import files
from tests.pool.files import MIB, page, pattern, read, rewrite, settled, wait_until
from tests.storage.disks import empty_dram, on_ssd, stored

OLD = pattern(100_000)
SMALL_SSD = 8 * MIB


class Refusing:
    """A disk that refuses pages until it is told otherwise."""

    def __init__(self, storage: Storage, error: Callable[[], Exception]) -> None:
        self._well = storage.write
        self._error: Callable[[], Exception] | None = error
        self.calls = 0
        storage.write = self

    def __call__(self, source_fd: int, target_fd: int, size: int) -> Work[Digest]:
        self.calls += 1
        if self._error is not None:
            raise self._error()
        return self._well(source_fd, target_fd, size)

    def recover(self) -> None:
        self._error = None


def _os_error(number: int) -> Callable[[], Exception]:
    return lambda: OSError(number, os.strerror(number))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demotion, "FIRST_PAUSE", 0.05)


@pytest.fixture
def reuse(storage: Storage) -> None:
    storage.demotions._admission = Admission("reuse")


# What is refused


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (_os_error(errno.EIO), "io-error"),
        (_os_error(errno.ENOSPC), "full"),
        (lambda: TierFull("full"), "full"),
    ],
)
async def test_what_is_refused_for_now_waits_and_is_tried_again(
    pool: Pool,
    storage: Storage,
    expect_log: LogGuard,
    quick: None,
    error: Callable[[], Exception],
    reason: str,
) -> None:
    expect_log("takes no pages|was not copied")
    disk = Refusing(storage, error)
    storage.demotions._pause = 0.05
    entry = await page(pool, b"page", OLD)
    await wait_until(lambda: bool(storage.demotions.failures))
    assert entry in storage.demotions.unstored
    assert storage.statistics()["unstored_bytes"] == len(OLD)
    assert set(storage.demotions.failures) == {reason}
    disk.recover()
    await wait_until(lambda: entry.stored == RESIDENT)
    assert on_ssd(pool, b"page") == OLD
    assert storage.statistics()["unstored_bytes"] == 0


async def test_pauses_grow_until_the_disk_takes_a_page(
    pool: Pool, storage: Storage, expect_log: LogGuard
) -> None:
    expect_log("was not copied")
    disk = Refusing(storage, lambda: TierFull("full"))
    storage.demotions._pause = 0.1
    one, other = await page(pool, b"one", OLD), await page(pool, b"other", OLD)
    began = trio.current_time()
    await wait_until(lambda: storage.demotions._pause >= 0.8)
    # At 0, 0.1 and 0.3 s, each time once for each of two writers, and once more after making room.
    assert 3 <= disk.calls <= 12
    assert trio.current_time() - began > 0.2
    disk.recover()
    await wait_until(lambda: one.stored == other.stored == RESIDENT)
    assert storage.demotions._pause == demotion.FIRST_PAUSE


async def test_one_page_that_cannot_be_stored_keeps_no_other_from_it(
    pool: Pool, storage: Storage, expect_log: LogGuard
) -> None:
    expect_log("cannot be copied")
    disk = Refusing(storage, lambda: NotStorable("its name does not fit"))
    entry = await page(pool, b"page", OLD)
    await wait_until(lambda: storage.demotions.unstored.is_left_out(entry, NOT_STORABLE))
    assert storage.statistics()["unstored"] == 0
    assert storage.statistics()["left_out"] == {NOT_STORABLE: {"pages": 1, "bytes": len(OLD)}}
    assert dict(storage.demotions.failures) == {NOT_STORABLE: 1}
    disk.recover()
    await stored(pool, b"other", OLD)
    await trio.sleep(0.05)
    assert entry.stored is None
    assert disk.calls == 2, "it is not tried again"
    assert storage.room(pool.tier.room()).used_bytes >= storage.tier.accounts.used_bytes + len(OLD)


async def test_what_was_refused_is_tried_once_more_at_the_end(
    pool: Pool, storage: Storage, expect_log: LogGuard
) -> None:
    expect_log("takes no pages|was not copied")
    disk = Refusing(storage, _os_error(errno.EIO))
    entry = await page(pool, b"page", OLD)
    await wait_until(lambda: bool(storage.demotions.failures))
    storage.demotions._rest_until = trio.current_time() + 1000
    calls = disk.calls
    await storage.demotions.finish()
    assert disk.calls > calls, "it was tried"
    assert entry.stored is None
    disk.recover()
    await storage.demotions.finish()
    assert entry.stored == RESIDENT


async def test_a_page_rewritten_while_it_is_copied_is_copied_again(
    pool: Pool, storage: Storage, openings: Openings
) -> None:
    async def write_anew(data: bytes) -> None:
        with suppress(StalePage):  # the copy reads it: the name has a new draft
            await rewrite(openings, files.find(pool, b"page"), data)
            return
        await rewrite(openings, files.find(pool, b"page"), data)

    await page(pool, b"page", OLD)
    new = pattern(50_000, 2)
    for _ in range(20):
        entry = files.find(pool, b"page")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(storage.demotions.copy, entry)
            nursery.start_soon(write_anew, new)
        await settled(pool)
        await wait_until(lambda: files.find(pool, b"page").stored == RESIDENT)
        assert on_ssd(pool, b"page") == new
        new = new[::-1]


# When


async def test_pages_that_are_removed_soon_are_never_written(
    pool: Pool, storage: Storage, openings: Openings
) -> None:
    storage.demotions.unstored.delay_seconds = 1.5
    began = trio.current_time()
    kept = await page(pool, b"kept", OLD)
    gone = await page(pool, b"gone", OLD)
    await page(pool, b"temporary", OLD)
    await trio.sleep(0.1)
    os.close(pool.names.unlink(pool.index.root, b"gone"))
    pool.names.rename(pool.index.root, b"temporary", pool.index.root, b"page", 0)
    assert gone.parent is None
    assert storage.demotions.written == 0
    await wait_until(lambda: storage.demotions.written == 2)
    assert 0.4 < trio.current_time() - began < 1.5, "as late as can be, and in time"
    assert kept.stored == RESIDENT
    assert on_ssd(pool, b"page") == OLD
    assert storage.statistics()["written_bytes"] == 2 * len(OLD)


async def test_under_pressure_they_are_written_at_once(pool: Pool, storage: Storage) -> None:
    await storage.walked.wait()
    storage.demotions.unstored.delay_seconds = 1000
    entry = await page(pool, b"page", OLD)
    await empty_dram(pool)
    assert entry.state == STORED


async def test_others_wait_for_eviction_and_so_it_is_not_idle(pool: Pool, storage: Storage) -> None:
    well, at_once = storage.write, []

    def note(source_fd: int, target_fd: int, size: int) -> Work[Digest]:
        at_once.append(size)
        return well(source_fd, target_fd, size)

    storage._write_at_once = note
    await stored(pool, b"one", OLD)
    assert at_once == []
    storage.demotions.unstored.delay_seconds = 1000
    await page(pool, b"other", OLD)
    await empty_dram(pool)
    assert at_once == [len(OLD)]


# Which


async def test_with_reuse_a_page_goes_down_at_its_second_touch(
    pool: Pool, storage: Storage, openings: Openings, reuse: None
) -> None:
    entry = await page(pool, b"page", OLD)
    await wait_until(lambda: storage.demotions.unstored.is_left_out(entry, NOT_REUSED))
    assert storage.statistics()["unstored_bytes"] == 0
    assert storage.statistics()["left_out"] == {NOT_REUSED: {"pages": 1, "bytes": len(OLD)}}
    assert await read(openings, entry) == OLD
    await wait_until(lambda: entry.stored == RESIDENT)
    assert storage.statistics()["left_out"][NOT_REUSED] == {"pages": 0, "bytes": 0}


async def test_with_reuse_the_same_name_or_bytes_are_a_second_touch(
    pool: Pool, storage: Storage, reuse: None
) -> None:
    storage.demotions.unstored.settle_seconds = 0.1  # until each has the name that it is to keep
    for number, (name, seed, wanted) in enumerate(
        [(b"same", 1, False), (b"same", 2, True), (b"other", 2, True), (b"third", 3, False)]
    ):
        temporary = b"temporary-%d" % number
        entry = await page(pool, temporary, pattern(100_000, seed))
        if (fd := pool.names.rename(pool.index.root, temporary, pool.index.root, name, 0)) >= 0:
            os.close(fd)
        await wait_until(lambda entry=entry: not storage.demotions.unstored.is_settling(entry))  # type: ignore[misc]
        assert storage.demotions.unstored.is_left_out(entry, NOT_REUSED) != wanted


async def test_with_reuse_what_nobody_read_is_dropped(
    pool: Pool, storage: Storage, openings: Openings, reuse: None
) -> None:
    await storage.walked.wait()
    storage.demotions.unstored.settle_seconds = 1000
    unread = await page(pool, b"unread", OLD)
    was_read = await page(pool, b"read", pattern(100_000, 2))
    assert await read(openings, was_read) == pattern(100_000, 2)
    await empty_dram(pool)
    assert unread.parent is None
    assert was_read.state == STORED
    assert storage.demotions.written == 1


@pytest.mark.parametrize("ssd", [SMALL_SSD], indirect=True)
async def test_an_ssd_smaller_than_dram_is_not_written_in_circles(
    pool: Pool, storage: Storage, openings: Openings
) -> None:
    entries = []
    for number in range(30):
        entries.append(await page(pool, b"%02d" % number, pattern(MIB, number)))
        await storage.demotions.finish()
    written = storage.demotions.written
    assert written <= 30
    have = [entry for entry in entries if entry.stored == RESIDENT]
    assert 4 <= len(have) <= 8
    assert have == entries[-len(have) :], "the warmest"
    cold = storage.demotions.unstored.left_out_as(COLD)
    assert cold == set(entries) - set(have)
    assert storage.statistics()["left_out"][COLD]["bytes"] == len(cold) * MIB
    assert storage.statistics()["unstored_bytes"] == 0
    for _ in range(3):
        for entry in entries:
            await read(openings, entry)
        await storage.demotions.finish()
    assert storage.demotions.written <= written + 8
    assert {entry.state for entry in entries} == {SEALED}


@pytest.mark.parametrize("ssd", [SMALL_SSD], indirect=True)
async def test_once_the_ssd_has_room_it_gets_what_was_too_cold(
    pool: Pool, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demotion, "RECONSIDER_SECONDS", 0.1)
    entries = [await stored(pool, b"%02d" % number, pattern(MIB, number)) for number in range(20)]
    await trio.sleep(0.5)
    kept = [entry for entry in entries if entry.stored == RESIDENT]
    assert 4 <= len(kept) <= 8
    assert storage.demotions.written == 20, "what is full stays as it is"
    for entry in kept[:4]:
        os.close(pool.names.unlink(pool.index.root, entry.name))
    await wait_until(lambda: storage.demotions.written >= 22)
    cold = [entry for entry in entries if entry.parent is not None and entry not in kept]
    found = [entry for entry in cold if entry.stored == RESIDENT]
    assert found == cold[-len(found) :], "the warmest of them"
    written = storage.demotions.written
    await trio.sleep(0.5)
    assert storage.demotions.written <= written + 2
    assert storage.statistics()["unstored"] == 0


@pytest.mark.parametrize("ssd", [SMALL_SSD], indirect=True)
async def test_at_the_end_the_ssd_gets_the_warmest(pool: Pool, storage: Storage, openings: Openings) -> None:
    entries = [await stored(pool, b"%02d" % number, pattern(MIB, number)) for number in range(20)]
    warm = [entry for entry in entries[:10] if entry.stored is None][:4]
    assert len(warm) == 4
    for _ in range(3):
        for entry in warm:
            await read(openings, entry)
    await storage.demotions.finish()
    assert [entry.stored for entry in warm] == [RESIDENT] * 4


async def test_what_nobody_reads_is_counted_by_age(pool: Pool, storage: Storage, openings: Openings) -> None:
    now_ns = time.time_ns()
    ages = {b"new": 0, b"hours": 5, b"days": 50, b"weeks": 500}
    for name, hours in ages.items():
        entry = await stored(pool, name, OLD)
        pool.set_times(entry, now_ns, now_ns - hours * 3600 * 10**9)
    one = files.find(pool, b"hours")
    await empty_dram(pool)
    for name in (b"read", b"other"):
        await stored(pool, name, OLD)
        await read(openings, files.find(pool, name))
    await page(pool, b"unstored", OLD)
    await storage.wear.count()
    found = storage.statistics()["never_read"]
    assert found["<1d"] == found["<7d"] == found["older"] == {"pages": 1, "bytes": len(OLD)}
    assert found["<1h"]["pages"] in (1, 2), "the last one may have been copied meanwhile"
    await read(openings, one)
    await storage.wear.count()
    assert storage.statistics()["never_read"]["<1d"] == {"pages": 0, "bytes": 0}
