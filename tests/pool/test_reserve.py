"""Room that is kept free, and room that is made for what the daemon allocates."""

from __future__ import annotations

import dataclasses
import os

import pytest
import trio
import trio.lowlevel

from kvfs import adoption
from kvfs.errors import OutOfRoom
from kvfs.opening import Openings
from kvfs.pool import Pool
from kvfs.tiers.base import Room
from kvfs.tiers.dram import DramTier
from tests.pool import files
from tests.pool.checks import check_pool
from tests.pool.conftest import ROOT_OWNER
from tests.pool.faces import KernelFace
from tests.pool.files import KIB, MIB, create, left, names, pages, pattern, put, read, settled

DATA = pattern(MIB)


@pytest.mark.parametrize("tier", [64 * MIB], indirect=True)
async def test_the_reserve_is_a_share_of_the_pool_and_covers_the_largest_page(pool: Pool) -> None:
    assert pool.evictor.reserve_bytes == 16 * MIB, "never more than a quarter"
    pool.tier.target_bytes = 1 << 30
    assert pool.evictor.reserve_bytes == 64 * MIB
    pool.tier.target_bytes = 100 << 30
    assert pool.evictor.reserve_bytes == 5 << 30
    pool.tier.target_bytes = 1 << 30
    pool.evictor.note_size(200 * MIB)
    pool.evictor.note_size(1)
    assert pool.evictor.reserve_bytes == 200 * MIB
    pool.tier.target_bytes = 64 * MIB


@pytest.mark.parametrize("tier", [64 * MIB], indirect=True)
async def test_the_reserve_is_made_free_and_no_more(pool: Pool) -> None:
    await pages(pool, 46)
    await pool.evictor.keep_reserve()
    assert len(left(pool)) == 46
    fd = files.tier_file(pool, b"45", os.O_RDWR)
    os.posix_fallocate(fd, 0, 6 * MIB)  # it grows by 5 MiB, and three are missing then
    os.close(fd)
    await pool.evictor.keep_reserve()
    assert left(pool) == names(*range(3, 46))


@pytest.mark.parametrize("tier", [64 * MIB], indirect=True)
async def test_writers_never_meet_a_full_pool_while_there_are_cold_pages(pool: Pool) -> None:
    for number in range(150):
        entry = create(pool, b"%03d" % number)
        put(entry, DATA)
        await trio.lowlevel.checkpoint()
        pool.remove_writer(entry)
        if number % 8 == 7:
            await trio.sleep(0.004)
        assert pool.tier.room().used_bytes <= 64 * MIB
    await settled(pool)
    assert pool.counters.sealed == 150
    assert not pool.counters.failures
    kept = left(pool)
    assert kept[0] >= b"%03d" % (150 - len(kept) - 5), "the oldest are gone"
    await pool.evictor.keep_reserve()
    assert pool.tier.room().free_bytes >= 16 * MIB
    assert len(left(pool)) >= 47, "no more is evicted than the reserve needs"


def with_inodes(pool: Pool, monkeypatch: pytest.MonkeyPatch, total: int) -> None:
    """Lets the tier look as if it had so few inodes."""
    well = type(pool.tier).room

    def room() -> Room:
        seen = well(pool.tier)
        used = seen.total_inodes - seen.free_inodes
        return dataclasses.replace(seen, total_inodes=total, free_inodes=total - used)

    monkeypatch.setattr(pool.tier, "room", room)


async def test_inodes_are_kept_free_too(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    await pages(pool, 99, size=100)
    room = pool.tier.room()
    used = room.total_inodes - room.free_inodes  # attributes count too
    with_inodes(pool, monkeypatch, used + 5)
    await pool.evictor.keep_reserve()
    assert len(left(pool)) == 99
    with_inodes(pool, monkeypatch, used)
    await pool.evictor.keep_reserve()
    assert pool.tier.room().free_inodes >= used // 64
    assert left(pool) == names(*range(used // 64, 99))


async def test_a_new_name_evicts_only_what_it_lacks(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    await pages(pool, 40)
    await pool.evictor.for_a_name()
    assert len(left(pool)) == 40, "nothing is missing"
    room = pool.tier.room()
    with_inodes(pool, monkeypatch, room.total_inodes - room.free_inodes + 59)
    await pool.evictor.for_a_name()
    assert len(left(pool)) == 35


# Room for what the daemon allocates itself


@pytest.mark.parametrize("tier", [64 * MIB], indirect=True)
async def test_room_is_made_for_what_is_asked(pool: Pool) -> None:
    await pages(pool, 40)
    await pool.evictor.require(24 * MIB - 4 * KIB)
    assert len(left(pool)) == 40
    await pool.evictor.require(24 * MIB)
    assert left(pool) == names(*range(1, 40)), "a full pool would spoil what is being written"
    await pool.evictor.require(26 * MIB - 4 * KIB)
    assert left(pool) == names(*range(2, 40))
    with pytest.raises(OutOfRoom):
        await pool.evictor.require(64 * MIB + 1)
    assert left(pool) == names(*range(2, 40)), "nothing is evicted in vain"
    await pool.evictor.require(64 * MIB)
    assert left(pool) == []


async def test_what_is_asked_at_once_is_made_free_one_after_the_other(pool: Pool) -> None:
    await pages(pool, 40)
    freed: list[int] = []

    async def free() -> None:
        freed.append(await pool.evictor.free(3 * MIB))

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(free)
    assert freed == [3 * MIB] * 5
    assert left(pool) == names(*range(15, 40))


async def test_pages_that_change_during_an_eviction_are_no_trouble(
    pool: Pool, openings: Openings, face: KernelFace
) -> None:
    entries = await pages(pool, 200, size=64 * KIB, prefix=b"p")

    async def disturb() -> None:
        for entry in entries[::-1]:
            await trio.lowlevel.checkpoint()
            if entry.parent is None:
                continue
            match entry.number % 4:
                case 0:
                    await read(openings, entry)
                case 1:
                    fd = pool.names.unlink(pool.index.root, entry.name)
                    if fd >= 0:
                        os.close(fd)
                case 2:
                    await files.rewrite(openings, entry, b"other bytes")
                case 3:
                    pool.names.rename(pool.index.root, entry.name, pool.index.root, b"moved " + entry.name, 0)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(disturb)
        for _ in range(10):
            nursery.start_soon(pool.evictor.free, 10 * 64 * KIB)
    await settled(pool)
    check_pool(pool, face)
    used = sum(found.blocks * 512 for found in pool.tier.walk())
    assert pool.tier.room().used_bytes == used


# A smaller pool


@pytest.mark.parametrize("in_use", [False, True])
async def test_a_smaller_pool_evicts_what_is_cold(tier: DramTier, face: KernelFace, in_use: bool) -> None:
    first = Pool(tier, ROOT_OWNER)
    async with trio.open_nursery() as nursery:
        first.start(nursery)
        for number, entry in enumerate(await pages(first, 40)):
            first.set_times(entry, number * 10**9, number * 10**9)
        nursery.cancel_scope.cancel()
    first.close()
    with pytest.raises(OutOfRoom):
        tier.resize(16 * MIB)
    assert tier.oversized
    second = Pool(tier, ROOT_OWNER)
    adoption.adopt(second)
    second.attach_face(face)
    held = [os.open(tier.directory / os.fsdecode(name), os.O_RDONLY) for name in names(*range(30))]
    if not in_use:
        while held:
            os.close(held.pop())
    try:
        async with trio.open_nursery() as nursery:
            second.start(nursery)
            if in_use:
                with pytest.raises(OutOfRoom):
                    await second.evictor.shrink()
            else:
                await second.evictor.shrink()
            nursery.cancel_scope.cancel()
        if not in_use:
            assert tier.room().total_bytes == 16 * MIB
            assert left(second) == names(*range(40 - len(left(second)), 40))
            assert 11 <= len(left(second)) <= 12, "and its reserve is free"
        check_pool(second, face)
    finally:
        for fd in held:
            os.close(fd)
