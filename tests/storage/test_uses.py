"""What the policy learns of pages that go to the SSD and come back."""

from __future__ import annotations

from kvfs.index import SEALED
from kvfs.opening import Openings
from kvfs.pool import Pool
from kvfs.storage.storage import Storage
from tests.pool.files import pattern, read
from tests.storage.disks import demoted

DATA = pattern(100_000)


async def test_the_open_that_brings_a_page_back_is_one_use(pool: Pool, storage: Storage) -> None:
    openings = Openings(pool)
    entry = await demoted(pool, b"page", DATA)
    assert entry not in pool.policy
    assert entry in storage.order
    assert await read(openings, entry) == DATA
    assert entry.state == SEALED
    assert entry not in storage.order
    assert (pool.policy.uses(entry), entry.hits) == (2, 1)
    await read(openings, entry)
    assert (pool.policy.uses(entry), entry.hits) == (3, 2)
