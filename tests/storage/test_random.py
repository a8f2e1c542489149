"""Thousands of random operations over both tiers: nobody reads other bytes, and the SSD follows."""

from __future__ import annotations

import random

import pytest

from kvfs import opening
from kvfs.index import STORED, Directory
from kvfs.opening import Openings
from kvfs.pool import Pool
from kvfs.storage.storage import Storage
from tests.conftest import LogGuard
from tests.pool.checks import check_pool
from tests.pool.faces import KernelFace
from tests.pool.files import MIB, read, settled
from tests.pool.test_accounts import Programs
from tests.storage.disks import check_storage, on_ssd


@pytest.mark.parametrize("tier", [16 * MIB], indirect=True)
@pytest.mark.parametrize("ssd", [8 * MIB, 256 * MIB], indirect=True)
@pytest.mark.parametrize("seed", [1, 2])
async def test_random_operations(
    pool: Pool,
    storage: Storage,
    openings: Openings,
    face: KernelFace,
    monkeypatch: pytest.MonkeyPatch,
    expect_log: LogGuard,
    seed: int,
) -> None:
    monkeypatch.setattr(opening, "RETRY_SECONDS", 0.02)
    pool.idle.limit = 10
    programs = Programs(pool, openings, face, random.Random(seed))
    for number in range(3000):
        await programs.step()
        if number % 20 == 19:
            await pool.evictor.free(MIB)
        if number % 500 == 499:
            await settled(pool)
            assert face.faults == []
    programs.close_all()
    await settled(pool)
    await storage.demotions.finish()
    programs.forget()
    check_pool(pool, face)
    check_storage(pool)
    assert {entry.state for entry in storage.order.victims()} <= {STORED}
    assert storage.promotions.read > 0
    assert storage.tier.accounts.used_bytes <= storage.tier.accounts.capacity_bytes
    for entry in list(pool.index.entries()):
        if entry.is_file and entry.parent is not None:
            assert await read(openings, entry) == programs.bytes_of[entry]
            if entry.stored is not None:
                assert on_ssd(pool, entry.path()) == programs.bytes_of[entry]
    for directory in programs.directories()[::-1]:
        for name in list(directory.children):
            if not isinstance(directory.children[name], Directory):
                programs.let_go(pool.names.unlink(directory, name))
    programs.forget()
    await storage.history.settled()
    assert pool.tier.room().used_bytes == 0
    assert pool.pages == len(storage.order) == 0
    if expect_log.lines:  # as it happens
        expect_log("every page left is in use|is dropped: the pool was full")
