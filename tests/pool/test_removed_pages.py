"""Pages and drafts that were removed or replaced while somebody has them open."""

from __future__ import annotations

import os

import pytest

from kvfs.errors import StalePage
from kvfs.opening import Openings
from kvfs.pool import Pool
from tests.pool import files
from tests.pool.faces import KernelFace
from tests.pool.files import page, pattern, put, settled
from tests.pool.readers import Reader

OLD = pattern(300_000)


pytestmark = pytest.mark.usefixtures("short_retry")


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_removed_page_that_is_still_open_keeps_its_bytes(
    pool: Pool, openings: Openings, face: KernelFace, kind_of_reader: type[Reader], replaced: bool
) -> None:
    """A writer had looked its name up, and was overtaken."""
    entry = await page(pool, b"page", OLD)
    entry.lookups = 1
    reader = kind_of_reader(pool, openings, face, entry)
    await reader.open()
    if replaced:
        await page(pool, b"temporary", b"other bytes")
        fd = pool.names.rename(pool.index.root, b"temporary", pool.index.root, b"page", 0)
    else:
        fd = pool.names.unlink(pool.index.root, b"page")
    if fd >= 0:
        os.close(fd)
    for call in (openings.open_writing(entry, truncate=True), openings.resize(entry, 5)):
        with pytest.raises(StalePage):
            await call
    assert reader.content() == OLD
    reader.close()
    files.forget(pool, entry.number, 1)
    assert pool.tier.room().used_bytes == (4096 if replaced else 0)


async def test_a_removed_draft_can_be_opened_again(pool: Pool, openings: Openings) -> None:
    entry = files.create(pool, b"draft")
    put(entry, OLD)
    assert pool.names.unlink(pool.index.root, b"draft") == -1
    await openings.open_writing(entry, truncate=False)
    await openings.resize(entry, 10)
    pool.remove_writer(entry)
    pool.remove_writer(entry)
    assert pool.tier.room().used_bytes == 0
    await settled(pool)


async def test_a_removed_page_is_not_among_the_idle_ones(
    pool: Pool, openings: Openings, face: KernelFace
) -> None:
    pool.idle.limit = 2
    entry = await page(pool, b"page", OLD)
    entry.lookups = 1
    fd = face.open_natively(entry)
    pool.names.unlink(pool.index.root, b"page")
    holding = await openings.open_reading(entry)
    face.close_natively(pool, entry, fd)
    for number in range(5):
        await page(pool, b"%d" % number, b"bytes")
    assert os.pread(holding.read_fd, len(OLD), 0) == OLD
    openings.close_reading(entry)
    files.forget(pool, entry.number, 1)
