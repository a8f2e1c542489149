"""Sealing: what happens while a digest is computed, and failures that must not end the mount."""

from __future__ import annotations

import errno
import os
import threading
from typing import Any

import pytest
import trio

from kvfs import sealing
from kvfs.errors import AttributeMissing
from kvfs.index import DRAFT, SEALED
from kvfs.opening import Openings
from kvfs.page import DIGEST, Digest, digest_of
from kvfs.pool import Pool
from tests.conftest import LogGuard
from tests.pool import files
from tests.pool.checks import check_pool
from tests.pool.faces import KernelFace
from tests.pool.files import create, page, pattern, put, settled, wait_until


class SlowDigest:
    """Computes digests only when ``go`` is set; ``begun`` counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.begun = 0
        self._digest_file = sealing.digest_file
        monkeypatch.setattr(sealing, "digest_file", self.compute)
        monkeypatch.setattr(sealing, "INLINE_BYTES", -1)

    def compute(self, fd: int) -> Digest:
        digest = self._digest_file(fd)
        self.begun += 1
        assert self.go.wait(10)
        return digest


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowDigest:
    return SlowDigest(monkeypatch)


async def being_sealed(pool: Pool, slow: SlowDigest, name: bytes = b"page") -> Any:
    entry = create(pool, name)
    put(entry, b"some bytes")
    pool.remove_writer(entry)
    await wait_until(lambda: slow.begun == 1)
    return entry


async def test_a_writer_that_comes_and_goes_meanwhile_begins_it_anew(
    pool: Pool, openings: Openings, slow: SlowDigest
) -> None:
    entry = await being_sealed(pool, slow)
    await files.rewrite(openings, entry, b"OTHER", truncate=False)
    slow.go.set()
    await settled(pool)
    assert slow.begun == 2
    assert files.is_intact(pool, b"page", b"OTHERbytes")
    assert pool.counters.sealed == 1


async def test_a_writer_that_stays_ends_it(pool: Pool, openings: Openings, slow: SlowDigest) -> None:
    entry = await being_sealed(pool, slow)
    await openings.open_writing(entry, truncate=True)
    slow.go.set()
    await wait_until(lambda: pool.unsealed == 0)
    assert entry.state == DRAFT
    put(entry, b"new")
    pool.remove_writer(entry)
    await settled(pool)
    assert files.is_intact(pool, b"page", b"new")


async def test_a_change_of_size_meanwhile_begins_it_anew(
    pool: Pool, openings: Openings, slow: SlowDigest
) -> None:
    entry = await being_sealed(pool, slow)
    await openings.resize(entry, 4)
    slow.go.set()
    await settled(pool)
    assert files.is_intact(pool, b"page", b"some")


async def test_a_file_removed_meanwhile_is_gone(pool: Pool, slow: SlowDigest) -> None:
    await being_sealed(pool, slow)
    fd = pool.names.unlink(pool.index.root, b"page")
    os.close(fd)
    new = create(pool, b"page")
    slow.go.set()
    await settled(pool)
    assert pool.counters.sealed == 0
    assert new.state == DRAFT
    with pytest.raises(AttributeMissing):
        pool.tier.get_attribute(b"page", DIGEST)
    pool.remove_writer(new)


async def test_a_file_renamed_meanwhile_is_sealed_under_its_new_name(pool: Pool, slow: SlowDigest) -> None:
    entry = await being_sealed(pool, slow, b"temporary")
    pool.names.rename(pool.index.root, b"temporary", files.mkdir(pool, b"d"), b"final", 0)
    slow.go.set()
    await settled(pool)
    assert entry.state == SEALED
    assert files.is_intact(pool, b"d/final", b"some bytes")


async def test_a_file_replaced_meanwhile_leaves_its_name_to_the_new_one(pool: Pool, slow: SlowDigest) -> None:
    await being_sealed(pool, slow)
    new = create(pool, b"new")
    put(new, b"new bytes")
    os.close(pool.names.rename(pool.index.root, b"new", pool.index.root, b"page", 0))
    pool.remove_writer(new)
    slow.go.set()
    await settled(pool)
    assert files.is_intact(pool, b"page", b"new bytes")
    assert pool.counters.sealed == 1


async def test_a_file_linked_meanwhile_is_sealed_under_both_names(pool: Pool, slow: SlowDigest) -> None:
    entry = await being_sealed(pool, slow)
    pool.names.link(entry, pool.index.root, b"also")
    slow.go.set()
    await settled(pool)
    assert files.is_intact(pool, b"page", b"some bytes")
    assert files.is_intact(pool, b"also", b"some bytes")


async def test_a_file_removed_before_its_sealing_begins_is_no_trouble(pool: Pool) -> None:
    for number in range(200):
        entry = create(pool, b"%d" % number)
        put(entry, b"bytes")
        pool.remove_writer(entry)
        os.close(pool.names.unlink(pool.index.root, b"%d" % number))
        if number % 7 == 0:
            await trio.lowlevel.checkpoint()
    await settled(pool)
    assert pool.tier.room().used_bytes == 0
    assert len(pool.index) == 1


async def test_many_files_at_once(pool: Pool, face: KernelFace) -> None:
    entries = [create(pool, b"%d" % number) for number in range(300)]
    for number, entry in enumerate(entries):
        put(entry, pattern(number * 17 + 1, number))
    for entry in entries:
        pool.remove_writer(entry)
    await settled(pool)
    assert pool.pages == 300
    for number in range(300):
        assert files.stored_digest(pool, b"%d" % number) == digest_of(pattern(number * 17 + 1, number))
    check_pool(pool, face)


# Failures that must not end the mount


class FailingThenWell:
    """Raises an OSError the first ``times`` times that it is called, then does what it stands for."""

    def __init__(self, well: Any, number: int, times: int = 3) -> None:
        self.well = well
        self.left = times
        self.error = OSError(number, os.strerror(number))

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if self.left:
            self.left -= 1
            raise self.error
        return self.well(*arguments, **keywords)


async def test_sealing_waits_where_too_many_files_are_open(
    pool: Pool, expect_log: LogGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_log("a draft cannot be sealed now: .*Too many open files")
    entry = create(pool, b"page")
    put(entry, b"bytes")
    monkeypatch.setattr(os, "dup", FailingThenWell(os.dup, errno.EMFILE))
    pool.remove_writer(entry)
    await settled(pool)
    assert files.is_intact(pool, b"page", b"bytes")


async def test_sealing_waits_where_there_is_no_room_for_attributes(
    pool: Pool, expect_log: LogGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_log("a draft cannot be sealed now: .*No space left")
    entry = create(pool, b"page")
    put(entry, b"bytes")
    monkeypatch.setattr(pool.tier, "set_attribute", FailingThenWell(pool.tier.set_attribute, errno.ENOSPC))
    pool.remove_writer(entry)
    await settled(pool)
    assert files.is_intact(pool, b"page", b"bytes")


async def test_a_bug_in_sealing_costs_one_draft(
    pool: Pool, openings: Openings, expect_log: LogGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_log("sealing failed: the draft stays one")

    def fail(_fd: int) -> Digest:
        raise ZeroDivisionError

    entry = create(pool, b"unlucky")
    put(entry, b"bytes")
    with monkeypatch.context() as patch:
        patch.setattr(sealing, "digest_file", fail)
        pool.remove_writer(entry)
        await settled(pool)
    assert entry.state == DRAFT
    assert await files.read(openings, entry) == b"bytes"
    await page(pool, b"lucky", b"bytes")


async def test_drafts_that_end_soon_after_one_another_are_sealed_together(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing, "FIRST_RETRY", 0.2)
    batches: list[int] = []
    finish = sealing.Sealer._finish

    async def counted(sealer: sealing.Sealer, batch: list[Any]) -> None:
        batches.append(len(batch))
        await finish(sealer, batch)

    monkeypatch.setattr(sealing.Sealer, "_finish", counted)
    for number in range(6):
        entry = create(pool, b"page-%d" % number)
        put(entry, b"some bytes")
        pool.remove_writer(entry)
        await trio.sleep(0.01)
    await settled(pool)
    assert sum(batches) == pool.counters.sealed == 6
    assert len(batches) <= 2  # a step of the clock may end in between
