"""Bringing a page into DRAM, and what is in the way there."""

from __future__ import annotations

import errno
import os

import pytest

from kvfs.errors import OutOfRoom
from kvfs.index import STORED
from kvfs.opening import Openings
from kvfs.page import DIGEST
from kvfs.pool import Pool
from kvfs.storage import promotion
from kvfs.syscalls import fallocate
from kvfs.tiers.dram import DramTier
from tests.pool import files
from tests.pool.files import pattern, read
from tests.storage.disks import demoted

OLD = pattern(100_000)


async def test_a_file_may_have_the_name_that_a_fetch_would_take(pool: Pool, openings: Openings) -> None:
    entry = await demoted(pool, b"page", OLD)
    taken = [files.create(pool, b".kvfs-promotion-%d" % number) for number in (1, 2)]
    assert await read(openings, entry) == OLD
    assert [files.find(pool, one.path()) for one in taken] == taken
    for one in taken:
        files.put(one, OLD)
        pool.remove_writer(one)
        assert await read(openings, one) == OLD
        pool.remove_everywhere(one)


async def test_a_pool_that_is_full_is_no_failure_of_the_disk(
    pool: Pool, openings: Openings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer took what was made free for the page, again and again."""
    entry = await demoted(pool, b"page", OLD)

    def refuse(_fd: int, _mode: int, _offset: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(promotion, "fallocate", refuse)
        with pytest.raises(OutOfRoom):
            await read(openings, entry)
    assert pool.storage is not None
    assert not pool.storage.health.is_failed
    assert await read(openings, entry) == OLD


async def test_a_fetch_makes_room_again_where_a_writer_was_faster(
    pool: Pool, openings: Openings, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = await demoted(pool, b"page", OLD)
    refusals = [errno.ENOSPC] * (promotion.ATTEMPTS - 1)

    def refuse(fd: int, mode: int, offset: int, size: int) -> None:
        if refusals:
            raise OSError(refusals[-1], os.strerror(refusals.pop()))
        fallocate(fd, mode, offset, size)

    monkeypatch.setattr(promotion, "fallocate", refuse)
    assert await read(openings, entry) == OLD
    assert not refusals


async def test_a_page_that_dram_has_no_room_to_describe_stays_on_the_ssd(
    pool: Pool, openings: Openings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its names are not left behind there, in the way of the next attempt."""
    entry = await demoted(pool, b"page", OLD)
    pool.names.link(entry, pool.index.root, b"link")
    set_attribute = DramTier.set_attribute

    def refuse(tier: DramTier, target: bytes | int, name: str, value: bytes) -> None:
        if name == DIGEST:
            raise OSError(28, "No space left on device")
        set_attribute(tier, target, name, value)

    with monkeypatch.context() as patch:
        patch.setattr(DramTier, "set_attribute", refuse)
        with pytest.raises(OSError, match="No space left"):
            await read(openings, entry)
    assert entry.state == STORED
    assert pool.tier.list(b"") == []
    assert await read(openings, entry) == OLD
    assert sorted(pool.tier.list(b"")) == [b"link", b"page"]
