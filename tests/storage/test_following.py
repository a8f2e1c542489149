"""An SSD that does not follow the mount: reads go on where nothing moved, and fail at once elsewhere."""

from __future__ import annotations

import errno
import os
import threading
import time
from functools import partial

import pytest
import trio

from kvfs.errors import TierFailed
from kvfs.fs.attributes import ExtendedAttributes
from kvfs.index import Entry
from kvfs.opening import Openings
from kvfs.pool import Pool
from kvfs.storage import history
from kvfs.storage.described import RESIDENT
from kvfs.storage.storage import Storage
from tests.conftest import LogGuard
from tests.pool import files
from tests.pool.files import page, pattern, read, wait_until
from tests.storage.disks import demoted, empty_dram, on_ssd

DATA = pattern(100_000)
AT_ONCE = 4.0
"""Seconds, on a machine that is busy; the SSD is waited for longer."""


def refuse(
    monkeypatch: pytest.MonkeyPatch,
    storage: Storage,
    name: str,
    number: int = errno.EROFS,
    while_there: bytes = b"",
) -> None:
    """One thing that the SSD does no more, or does not while it has a file."""
    work = getattr(storage.tier, name)

    def fail(*arguments: object) -> object:
        if os.path.exists(os.fsencode(storage.tier.directory) + b"/" + while_there):
            raise OSError(number, os.strerror(number))
        return work(*arguments)

    monkeypatch.setattr(storage.tier, name, fail)


def rename(pool: Pool, old: bytes, new: bytes) -> None:
    pool.names.rename(pool.index.root, old, pool.index.root, new, 0)


def change_names(pool: Pool, storage: Storage, entry: Entry) -> None:
    """A page gets an attribute, a directory, another name there, and a link outside."""
    storage.history.set_attribute(entry.path(), "user.note", b"note")
    directory = files.mkdir(pool, b"directory")
    assert entry.parent is not None
    pool.names.rename(entry.parent, entry.name, directory, b"page", 0)
    pool.names.link(entry, pool.index.root, b"link")


async def test_reads_of_what_did_not_move_go_on(
    pool: Pool, storage: Storage, openings: Openings, monkeypatch: pytest.MonkeyPatch, expect_log: LogGuard
) -> None:
    expect_log("does not follow")
    entries = {}
    for name in (b"moved", b"directory", b"other"):
        directory = files.mkdir(pool, name)
        entries[name] = await page(pool, b"page", DATA, directory)
    await storage.demotions.finish()
    await empty_dram(pool)
    refuse(monkeypatch, storage, "rename")
    rename(pool, b"moved", b"elsewhere")
    with trio.fail_after(AT_ONCE):
        assert await read(openings, entries[b"directory"]) == DATA
    await wait_until(lambda: bool(storage.history.failure))
    with trio.fail_after(AT_ONCE):
        assert await read(openings, entries[b"other"]) == DATA
        with pytest.raises(TierFailed, match="does not follow the mount: Read-only file system"):
            await read(openings, entries[b"moved"])
    assert pool.counters.misses == {}
    monkeypatch.undo()
    await storage.history.settled()
    assert await read(openings, entries[b"moved"]) == DATA
    assert on_ssd(pool, b"elsewhere/page") == DATA


@pytest.mark.parametrize("name", ["make_directory", "rename", "link", "set_attribute"])
async def test_a_step_that_the_disk_has_no_room_for_goes_after_the_coldest_pages(
    pool: Pool, storage: Storage, openings: Openings, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    cold, warm = await demoted(pool, b"cold", pattern(2 << 20)), await demoted(pool, b"warm", DATA)
    refuse(monkeypatch, storage, name, errno.ENOSPC, while_there=b"cold")
    change_names(pool, storage, warm)
    with trio.fail_after(20):
        await storage.history.settled()
    assert (cold.parent, on_ssd(pool, b"cold")) == (None, None)
    assert on_ssd(pool, b"directory/page") == on_ssd(pool, b"link") == DATA
    assert await read(openings, warm) == DATA
    assert storage.degraded() == []


@pytest.mark.parametrize("name", ["make_directory", "rename", "link", "set_attribute"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EPERM, errno.ENOMEM])
async def test_no_step_is_dropped_that_the_disk_may_do_later(
    pool: Pool,
    storage: Storage,
    openings: Openings,
    monkeypatch: pytest.MonkeyPatch,
    expect_log: LogGuard,
    name: str,
    number: int,
) -> None:
    expect_log("does not follow")
    entry = await demoted(pool, b"page", DATA)
    refuse(monkeypatch, storage, name, number)
    change_names(pool, storage, entry)
    await wait_until(lambda: bool(storage.history.failure))
    assert any("does not follow: " + os.strerror(number) in line for line in storage.degraded())
    if name != "link":  # the page has its first name
        with trio.fail_after(AT_ONCE), pytest.raises(TierFailed):
            await read(openings, entry)
    monkeypatch.undo()
    with trio.fail_after(20):
        await storage.history.settled()
    assert await read(openings, entry) == DATA
    assert on_ssd(pool, b"directory/page") == on_ssd(pool, b"link") == DATA
    assert pool.counters.misses == {}
    assert storage.degraded() == []


@pytest.mark.parametrize("ssd", [8 << 20], indirect=True)
async def test_names_change_on_an_ssd_that_has_used_all_that_it_may(
    pool: Pool, storage: Storage, openings: Openings
) -> None:
    entry = await demoted(pool, b"page", DATA)
    storage.tier.accounts.capacity_bytes = storage.tier.accounts.used_bytes
    change_names(pool, storage, entry)
    await storage.history.settled()
    assert on_ssd(pool, b"directory/page") == on_ssd(pool, b"link") == DATA
    assert await read(openings, entry) == DATA


async def test_attributes_are_those_that_were_set_last(pool: Pool, storage: Storage) -> None:
    entry, other = await demoted(pool, b"page", DATA), await demoted(pool, b"other", DATA)
    attributes = ExtendedAttributes(pool)
    for number in range(20):
        await attributes.set(entry, "user.note", b"%d" % number)
        assert await attributes.get(entry, "user.note") == b"%d" % number
    assert await attributes.list(other)


async def test_a_disk_that_hangs_while_it_follows_keeps_nobody_waiting_for_long(
    pool: Pool, storage: Storage, openings: Openings, expect_log: LogGuard
) -> None:
    expect_log("does not follow: it did not answer within 1 s")
    moved, other = await demoted(pool, b"moved", DATA), await demoted(pool, b"other", DATA)
    storage.io_timeout = 1.0
    released = threading.Event()
    storage.history.append(lambda: released.wait(20))
    try:
        rename(pool, b"moved", b"elsewhere")
        with trio.fail_after(8):
            assert await read(openings, other) == DATA
            for _ in range(2):
                with pytest.raises(TierFailed, match="it did not answer within"):
                    await read(openings, moved)
        assert not storage.is_following
        assert any("did not answer" in line for line in storage.degraded())
    finally:
        released.set()
    await storage.history.settled()
    assert await read(openings, moved) == DATA
    assert storage.degraded() == []


async def test_a_slow_disk_is_no_disk_that_hangs(
    pool: Pool, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "TURN_SECONDS", 0.1)
    storage.io_timeout = 2.0
    done: list[int] = []

    def work(number: int) -> None:
        time.sleep(0.1)
        done.append(number)

    for number in range(30):
        storage.history.append(partial(work, number))
    with trio.fail_after(60):
        await storage.history.caught_up()
    assert done == list(range(30))


async def test_nobody_waits_for_a_copy_that_cannot_get_its_name(
    pool: Pool, storage: Storage, monkeypatch: pytest.MonkeyPatch, expect_log: LogGuard
) -> None:
    expect_log("does not follow|was not copied")
    refuse(monkeypatch, storage, "publish_page")
    entry = await page(pool, b"page", DATA)
    with trio.fail_after(AT_ONCE):
        assert not await storage.demotions.copy(entry)
        assert not await storage.demotions.copy(entry)
    monkeypatch.undo()
    await wait_until(lambda: entry.stored == RESIDENT)
    assert on_ssd(pool, b"page") == DATA
    assert storage.demotions.written == 1


async def test_a_copy_that_gets_one_of_two_names_goes(
    pool: Pool, storage: Storage, monkeypatch: pytest.MonkeyPatch, expect_log: LogGuard
) -> None:
    expect_log("was not copied")
    storage.demotions.unstored.settle_seconds = 1000
    entry = await page(pool, b"page", DATA)
    pool.names.link(entry, pool.index.root, b"link")
    refuse(monkeypatch, storage, "_link_over", errno.ENOSPC)
    assert not await storage.demotions.copy(entry)
    pool.remove_everywhere(entry)
    await storage.history.settled()
    assert on_ssd(pool, b"page") is None
    assert on_ssd(pool, b"link") is None


async def test_what_is_removed_before_its_copy_has_a_name_never_appears(
    pool: Pool, storage: Storage, monkeypatch: pytest.MonkeyPatch, expect_log: LogGuard
) -> None:
    expect_log("does not follow|was not copied")
    refuse(monkeypatch, storage, "publish_page", errno.EIO)
    entry = await page(pool, b"page", DATA)
    await wait_until(lambda: bool(storage.history.failure))
    pool.remove_everywhere(entry)
    again = await page(pool, b"page", DATA[::-1])
    monkeypatch.undo()
    await wait_until(lambda: again.stored == RESIDENT)
    assert on_ssd(pool, b"page") == DATA[::-1]
