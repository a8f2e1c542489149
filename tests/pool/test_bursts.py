"""Files that take much of the pool each, written one after the other: room is made before they begin."""

from __future__ import annotations

import errno
import os
import threading
from typing import Any

import pytest
import trio

from kvfs import room, sealing
from kvfs.errors import OutOfRoom
from kvfs.index import DRAFT, SEALED, Entry
from kvfs.opening import Openings
from kvfs.page import Digest
from kvfs.pool import Pool
from tests.conftest import LogGuard
from tests.pool import files
from tests.pool.faces import KernelFace
from tests.pool.files import MIB, create, find, left, page, pages, pattern, put, settled, wait_until

POOL = 64 * MIB
DATA = pattern(MIB)

pytestmark = pytest.mark.parametrize("tier", [POOL], indirect=True)


async def begin(pool: Pool, name: bytes) -> Entry:
    """open(O_CREAT | O_EXCL), and the wait for room that goes with it."""
    entry = create(pool, name)
    await pool.evictor.expect_growth()
    return entry


async def write(pool: Pool, openings: Openings, name: bytes, size: int) -> None:
    entry = await begin(pool, name)
    for offset in range(0, size, MIB):
        put(entry, DATA, offset)
    pool.remove_writer(entry)


async def write_mapped(pool: Pool, openings: Openings, name: bytes, size: int) -> None:
    """The mapping lives on for a little after the last close."""
    entry = await begin(pool, name)
    await openings.resize(entry, size)
    with files.mapped(files.tier_file(pool, name, os.O_RDWR), size, writable=True) as mapping:
        for offset in range(0, size, MIB):
            mapping[offset : offset + MIB] = DATA
        pool.remove_writer(entry)
        await trio.sleep(0.02)


@pytest.mark.parametrize("how", [write, write_mapped])
@pytest.mark.parametrize("size", [17 * MIB, 30 * MIB, POOL // 2])
async def test_files_of_up_to_half_of_the_pool_are_all_served(
    pool: Pool, openings: Openings, how: Any, size: int
) -> None:
    for number in range(8):
        await how(pool, openings, b"%d" % number, size)
    await settled(pool)
    assert pool.counters.sealed == 8
    assert not pool.counters.failures
    assert left(pool)[-1] == b"7"
    assert files.content(pool, b"7") == DATA * (size // MIB)


async def test_a_page_that_is_overwritten_again_and_again_is_served(pool: Pool, openings: Openings) -> None:
    await write(pool, openings, b"a", 30 * MIB)
    await write(pool, openings, b"b", 30 * MIB)
    for number in range(6):
        entry = find(pool, b"ab"[number % 2 : number % 2 + 1])
        await openings.open_writing(entry, truncate=True)
        for offset in range(0, 30 * MIB, MIB):
            put(entry, DATA, offset)
        pool.remove_writer(entry)
    await settled(pool)
    assert not pool.counters.failures
    assert pool.counters.evictions == 0, "its own bytes make the room"
    assert left(pool) == [b"a", b"b"]


async def test_no_more_is_evicted_than_a_file_may_need(pool: Pool, openings: Openings) -> None:
    await pages(pool, 20)
    await write(pool, openings, b"large", 20 * MIB)
    await settled(pool)
    entry = await begin(pool, b"next")
    assert len(left(pool)) == 22, "24 MiB are free: it may have 20"
    pool.remove_writer(entry)
    await write(pool, openings, b"large too", 20 * MIB)
    entry = await begin(pool, b"last")
    evicted = 23 - (len(left(pool)) - 1)
    assert evicted == 17, "16 MiB more are needed, and a page so that the pool is not full"
    pool.remove_writer(entry)


async def test_several_files_at_once_are_expected_to_grow(pool: Pool, openings: Openings) -> None:
    pool.evictor.note_size(14 * MIB)
    first, second = create(pool, b"1"), create(pool, b"2")
    assert pool.evictor.reserve_bytes == 28 * MIB
    put(first, pattern(10 * MIB))
    assert pool.evictor.reserve_bytes == 18 * MIB
    put(first, pattern(10 * MIB), 10 * MIB)
    assert pool.evictor.reserve_bytes == 16 * MIB, "never below a quarter"
    third, fourth = create(pool, b"3"), create(pool, b"4")
    assert pool.evictor.reserve_bytes == 32 * MIB, "never above half"
    for entry in (first, second, third, fourth):
        pool.remove_writer(entry)
    assert pool.evictor.reserve_bytes == 16 * MIB
    await settled(pool)


async def test_what_met_a_full_pool_is_expected_to_be_larger(
    pool: Pool, face: KernelFace, expect_log: LogGuard
) -> None:
    expect_log("is dropped: the pool was full")
    entry = create(pool, b"larger than all before")
    put(entry, pattern(12 * MIB))
    face.marks[entry.number] = (True, False)
    pool.remove_writer(entry)
    await settled(pool)
    another = create(pool, b"another")
    assert pool.evictor.reserve_bytes == 24 * MIB
    pool.remove_writer(another)


# Waiting


class SlowDigest:
    """Computes digests only when ``go`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self._digest_file = sealing.digest_file
        monkeypatch.setattr(sealing, "digest_file", self.compute)

    def compute(self, fd: int) -> Digest:
        assert self.go.wait(10)
        return self._digest_file(fd)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowDigest:
    return SlowDigest(monkeypatch)


async def two_closed(pool: Pool) -> None:
    """Two files that leave no room for a third."""
    for name in (b"1", b"2"):
        entry = create(pool, name)
        put(entry, DATA * 30)
        pool.remove_writer(entry)


@pytest.mark.parametrize("asks", [True, False])
async def test_who_wants_room_waits_for_what_is_being_sealed(
    pool: Pool, openings: Openings, slow: SlowDigest, asks: bool
) -> None:
    await two_closed(pool)
    entry = create(pool, b"3")
    served = trio.Event()

    async def grow() -> None:
        if asks:
            await openings.resize(entry, 30 * MIB)
        else:
            await pool.evictor.expect_growth()
        served.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(grow)
        await trio.sleep(0.05)
        assert not served.is_set()
        slow.go.set()
        await served.wait()
    assert pool.tier.room().free_bytes >= (4 if asks else 30) * MIB
    assert len(left(pool)) < 3
    pool.remove_writer(entry)
    await settled(pool)


async def test_nobody_waits_for_ever(
    pool: Pool, openings: Openings, slow: SlowDigest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "SEALING_SECONDS", 0.05)
    await two_closed(pool)
    entry = create(pool, b"3")
    await pool.evictor.expect_growth()
    with pytest.raises(OutOfRoom):
        await openings.resize(entry, 30 * MIB)
    assert left(pool) == [b"1", b"2", b"3"]
    slow.go.set()
    pool.remove_writer(entry)
    await settled(pool)


async def test_nobody_waits_for_a_mapping_that_lives_on(
    pool: Pool, openings: Openings, expect_log: LogGuard
) -> None:
    expect_log("every page left is in use")
    entry = create(pool, b"mapped")
    await openings.resize(entry, 32 * MIB)
    with files.mapped(files.tier_file(pool, b"mapped", os.O_RDWR), 32 * MIB, writable=True):
        pool.remove_writer(entry)
        await wait_until(lambda: not pool.sealer.under_way)
        second = create(pool, b"2")
        await openings.resize(second, 20 * MIB)
        third = create(pool, b"3")
        with trio.fail_after(1):
            await pool.evictor.expect_growth()
            with pytest.raises(OutOfRoom):
                await openings.resize(third, 20 * MIB)
        await pool.evictor.keep_reserve()
        pool.remove_writer(second)
        pool.remove_writer(third)
    await settled(pool)


async def test_a_mapping_that_has_ended_is_noticed_when_room_is_wanted(
    pool: Pool, openings: Openings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing, "FIRST_RETRY", 0.3)
    entry = create(pool, b"mapped")
    await openings.resize(entry, 32 * MIB)
    with files.mapped(files.tier_file(pool, b"mapped", os.O_RDWR), 32 * MIB, writable=True):
        pool.remove_writer(entry)
        await wait_until(lambda: not pool.sealer.under_way)
    second = create(pool, b"2")
    await openings.resize(second, 20 * MIB)
    assert entry.state == DRAFT, "it would be tried again later"
    await pool.evictor.require(20 * MIB)
    assert entry.state == SEALED
    assert left(pool) == [b"2"]
    pool.remove_writer(second)
    await settled(pool)


# In vain


async def test_nothing_is_evicted_where_it_would_not_be_enough(
    pool: Pool, openings: Openings, face: KernelFace
) -> None:
    entries = await pages(pool, 40)
    held = [face.open_natively(entry) for entry in entries[5:]]
    with pytest.raises(OutOfRoom):
        await pool.evictor.require(30 * MIB)
    assert len(left(pool)) == 40
    assert pool.counters.evictions == 0
    await pool.evictor.require(29 * MIB)
    assert len(left(pool)) == 35
    for entry, fd in zip(entries[5:], held, strict=True):
        face.close_natively(pool, entry, fd)


async def test_looking_for_room_in_vain_is_not_repeated_at_once(
    pool: Pool, face: KernelFace, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.evictor.note_size(30 * MIB)
    entries = await pages(pool, 50)
    held = [face.open_natively(entry) for entry in entries]
    well, looks = pool.evictor._can_free, 0

    async def slowly(wanted: int) -> bool:
        nonlocal looks
        looks += 1
        await trio.sleep(0.1)
        return await well(wanted)

    monkeypatch.setattr(pool.evictor, "_can_free", slowly)
    entry = create(pool, b"draft")
    for _ in range(5):
        await pool.evictor.expect_growth()
    assert looks == 1
    for each, fd in zip(entries, held, strict=True):
        face.close_natively(pool, each, fd)
    await trio.sleep(0.15)
    await pool.evictor.expect_growth()
    assert looks == 2
    assert pool.tier.room().free_bytes > 30 * MIB
    pool.remove_writer(entry)
    await settled(pool)


async def test_a_pool_that_is_no_longer_full_is_not_called_so(pool: Pool) -> None:
    entry = await page(pool, b"page", DATA)
    assert await pool.evictor.free(2 * MIB) == MIB
    assert entry.parent is None
    assert pool.evictor.stuck
    await pool.evictor.keep_reserve()
    assert not pool.evictor.stuck


async def test_a_failure_to_make_room_is_not_that_of_the_writer(
    pool: Pool, openings: Openings, expect_log: LogGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_log("no room could be made for a writer: .*Too many open files")
    await write(pool, openings, b"1", 30 * MIB)
    await write(pool, openings, b"2", 30 * MIB)
    await settled(pool)

    async def fail(_wanted: int) -> bool:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(pool.evictor, "_can_free", fail)
        entry = await begin(pool, b"3")
    pool.remove_writer(entry)
    await settled(pool)
