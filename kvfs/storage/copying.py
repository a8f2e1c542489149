"""One copy of one page on the SSD: its bytes in a temporary, and then its names.

The bytes are written in a thread, which whoever waits may leave behind; that the copy appears under the names
that the page has by then is a step of the history.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from kvfs.counters import LimitedLog
from kvfs.errors import TierFull, TimedOut
from kvfs.index import SEALED, UNCHECKED, Entry
from kvfs.page import DIGEST, OWNER, PIN, SPARSE, TTL, USER, Digest
from kvfs.steps import step
from kvfs.storage.described import RESIDENT
from kvfs.tiers.ssd_accounts import Reservation
from kvfs.tiers.ssd_health import Health
from kvfs.tiers.ssd_pages import NewPage, WrittenPage
from kvfs.tiers.ssd_record import HITS

if TYPE_CHECKING:
    from kvfs.storage.storage import Storage

log = logging.getLogger("kvfs.storage.copying")

_UNSEEN = os.O_RDONLY | os.O_NOATIME
"""Copying a page is no use of it."""
WRITERS = 2
"""Pages that are written at once: enough to keep a disk busy, few enough that readers hardly notice."""
AT_ONCE = 2 * WRITERS
"""Pages that are on their way at once: while some are written, others get their names."""
EXPECTED_SPEED = 100e6
"""Bytes a second, until it is known how fast the disk takes pages."""
_WEIGHT = 0.2
"""Of the last page in what is known of the speed."""


class Copying:
    """Belongs to the event loop."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._threads = trio.CapacityLimiter(WRITERS)
        self._unpublished: list[WrittenPage] = []
        self._serial = 0
        self._log = LimitedLog(log)
        self.bytes_per_second = EXPECTED_SPEED
        """How fast the disk took a page lately."""
        self.health = Health("SSD tier")
        """Of writing: a disk that takes nothing any more may serve what it has."""
        self.written = 0
        self.written_bytes = 0

    def close(self) -> None:
        """The loop has ended: what got no name is deleted."""
        for written in self._unpublished:
            self._storage.tier.abandon_page(written)
        self._unpublished.clear()

    async def copy(self, entry: Entry, *, idle: bool) -> bool:
        """Gives a page its copy; says whether it has one then. It has none where it is no page any more, or
        another one.

        Raises what `SsdPages` and `Space.reserve` raise, TimedOut and OSError where the disk fails, and
        AttributeMissing and ValueError where the page is damaged in DRAM.
        """
        pool = self._storage.pool
        if entry.state not in (SEALED, UNCHECKED) or entry.parent is None:
            self._storage.demotions.forget(entry)
            return False
        if entry.stored is not None:  # nobody waited until it had its name
            await self._storage.history.wait_for(lambda: entry.stored in (None, RESIDENT))
            return entry.stored == RESIDENT
        try:
            fd = pool.tier.open(entry.path(), _UNSEEN)
        except FileNotFoundError:
            pool.vanished(entry)
            return False
        try:
            step("demote.begun")
            written = await self._write(entry, fd, idle)
        finally:
            os.close(fd)
        step("demote.written")
        return await self._publish(entry, written)

    async def _write(self, entry: Entry, fd: int, idle: bool) -> WrittenPage:
        """The bytes in a temporary. Where the disk is fuller than thought, pages are evicted, once."""
        storage, page = self._storage, self._describe(entry, fd)
        reservation = await storage.space.reserve(page.digest.size, entry)
        try:
            return await self._write_in_thread(page, fd, reservation, idle)
        except TierFull as error:
            await storage.space.make(error.missing_bytes, error.missing_inodes, entry)
        reservation = await storage.space.reserve(page.digest.size, entry)
        return await self._write_in_thread(page, fd, reservation, idle)

    async def _write_in_thread(
        self, page: NewPage, fd: int, reservation: Reservation, idle: bool
    ) -> WrittenPage:
        storage, left_behind = self._storage, threading.Event()
        copy, began = storage.write if idle else storage.write_at_once, trio.current_time()
        handed: list[WrittenPage] = []
        """What the thread gives: it belongs to who takes it out."""

        def write(source: int) -> None:
            handed.append(storage.tier.write_page(page, source, copy, reservation))
            if left_behind.is_set():
                with suppress(IndexError):
                    storage.tier.abandon_page(handed.pop())

        try:
            job = storage.jobs.new(write, fd)
        except (OSError, TimedOut):
            reservation.release()
            raise
        try:
            with trio.move_on_after(storage.io_timeout):
                await trio.to_thread.run_sync(job.run, limiter=self._threads, abandon_on_cancel=True)
                self._succeeded(page.digest.size, trio.current_time() - began)
                return handed.pop()
        except OSError as error:
            self._failed(error.strerror or str(error))
            raise
        finally:
            left_behind.set()
            with suppress(IndexError):
                self._abandon(handed.pop())
            if job.abandon():
                reservation.release()
        raise self._failed(f"a page could not be written within {storage.io_timeout:g} s")

    def _succeeded(self, size: int, seconds: float) -> None:
        """The disk took a page."""
        self.bytes_per_second += _WEIGHT * (size / max(seconds, 1e-6) - self.bytes_per_second)
        if self.health.succeeded():
            log.info("the SSD tier takes pages again")

    def _failed(self, reason: str) -> TimedOut:
        """The disk failed, or did not answer: it is asked less from now on, until it works. An error to raise
        where nothing else says so."""
        if self.health.failed(reason, trio.current_time()):
            self._log.warning("failed", f"the SSD tier takes no pages: {reason}")
        return TimedOut(f"the SSD tier: {reason}")

    def _describe(self, entry: Entry, fd: int) -> NewPage:
        tier, status = self._storage.pool.tier, os.fstat(fd)
        attributes = {
            name: tier.get_attribute(fd, name)
            for name in tier.list_attributes(fd)
            if name in (SPARSE, OWNER, PIN, TTL) or name.startswith(USER)
        }
        attributes[HITS] = b"%d" % entry.hits
        digest = Digest.parse(tier.get_attribute(fd, DIGEST))
        return NewPage(digest, attributes, status.st_atime_ns, status.st_mtime_ns)

    async def _publish(self, entry: Entry, written: WrittenPage) -> bool:
        """The copy gets the names and attributes that the page has now, unless it is another page by now."""
        storage = self._storage
        now = self._describe_again(entry)
        if now is None or now.digest != written.page.digest:
            self._abandon(written)
            return False
        self._unpublished.append(written)
        before, written.page = written.page, now
        names = [(parent.child_path(name), storage.parents(parent)) for parent, name in entry.names()]
        results: list[Exception | bool] = []
        self._serial += 1
        entry.stored = token = b"on its way %d" % self._serial  # this copy, and no later one

        def done(error: Exception | None) -> None:
            results.append(self._published(entry, token, written, error))

        storage.history.append(lambda: storage.tier.publish_page(written, names), done)
        if (now.atime_ns, now.mtime_ns) != (before.atime_ns, before.mtime_ns):
            storage.history.set_times(names[0][0], now.atime_ns, now.mtime_ns)
        await storage.history.wait_for(lambda: bool(results))
        if isinstance(results[0], Exception):
            raise results[0]
        return results[0]

    def _published(
        self, entry: Entry, token: bytes, written: WrittenPage, error: Exception | None
    ) -> Exception | bool:
        """The history came to the copy, whoever waits for that still: whether the page has it now, or why
        not."""
        storage = self._storage
        step("demote.published")
        self._unpublished.remove(written)
        if error is not None:
            self._abandon(written)
        if entry.stored != token:  # rewritten or removed since, which the history has undone
            return False
        if error is not None:
            if written.is_named:  # but not by all: nobody would remove the others with the page
                storage.forget_names(entry)
            entry.stored = None
            return error
        entry.stored = RESIDENT
        storage.demotions.forget(entry)
        self.written += 1
        self.written_bytes += written.page.digest.size
        storage.wear.wrote(written.page.digest.size)
        return True

    def _abandon(self, written: WrittenPage) -> None:
        """Deletes what gets no name, in its turn; if the history does not come to it, ``close`` does."""
        self._unpublished.append(written)

        def done(error: Exception | None) -> None:
            if error is None:
                self._unpublished.remove(written)

        self._storage.history.append(lambda: self._storage.tier.abandon_page(written), done)

    def _describe_again(self, entry: Entry) -> NewPage | None:
        """What a page is once its bytes are written; None where it is none any more, or has a copy."""
        if entry.state not in (SEALED, UNCHECKED) or entry.parent is None or entry.stored is not None:
            return None
        fd = self._storage.pool.tier.open(entry.path(), _UNSEEN)
        try:
            return self._describe(entry, fd)
        finally:
            os.close(fd)
