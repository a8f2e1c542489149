"""What the pool tells the policy: which pages were used, came back, and were there at the start."""

from __future__ import annotations

from kvfs.opening import Openings
from kvfs.pool import Pool
from tests.pool.faces import KernelFace
from tests.pool.files import create, page, pattern, put, read, settled

DATA = pattern(100_000)


async def test_every_open_is_a_use(pool: Pool, openings: Openings) -> None:
    entry = await page(pool, b"page", DATA)
    assert pool.policy.uses(entry) == 1
    await read(openings, entry)
    assert pool.policy.uses(entry) == 2


async def test_what_the_channel_reports_at_once_is_one_use(pool: Pool, face: KernelFace) -> None:
    one, other = await page(pool, b"one", DATA), await page(pool, b"other", DATA)
    for entry in (one, other, one, one):
        face.close_natively(pool, entry, face.open_natively(entry))
    pool.uses.collect()
    assert [pool.policy.uses(entry) for entry in (one, other)] == [2, 2]
    assert [entry.hits for entry in (one, other)] == [3, 1]


async def test_a_page_that_was_evicted_is_known_again_by_its_name(pool: Pool, openings: Openings) -> None:
    entry = await page(pool, b"page", DATA)
    await read(openings, entry)
    await pool.evictor.free(1)
    assert pool.index.find(b"page") is None
    again = await page(pool, b"page", DATA)
    assert pool.policy.uses(again) == 3


async def test_a_name_counts_that_a_page_has_when_it_is_sealed(pool: Pool) -> None:
    """Programs write a temporary and rename it."""
    await page(pool, b"page", DATA)
    await pool.evictor.free(1)
    root = pool.index.root
    draft = create(pool, b"page.tmp")
    put(draft, DATA)
    pool.remove_writer(draft)
    pool.names.rename(root, b"page.tmp", root, b"page", 0)
    await settled(pool)
    assert pool.policy.uses(draft) == 2


async def test_a_page_that_somebody_removed_is_not_expected_back(pool: Pool, openings: Openings) -> None:
    entry = await page(pool, b"page", DATA)
    await read(openings, entry)
    pool.remove_everywhere(entry)
    again = await page(pool, b"page", DATA)
    assert pool.policy.uses(again) == 1
