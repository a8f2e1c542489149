"""One copy of one page on the SSD: its bytes in a temporary, and then its names.

The bytes are written in a thread (`Writing`), which whoever waits may leave behind; that the copy appears
under the names that the page has by then is a step of the history.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import outcome
import trio

from kvfs.counters import LimitedLog
from kvfs.errors import TierFailed, TierFull, TimedOut
from kvfs.index import SEALED, UNCHECKED, Entry
from kvfs.page import DIGEST, OWNER, PIN, SPARSE, TTL, USER, Digest
from kvfs.steps import step
from kvfs.storage.described import RESIDENT
from kvfs.storage.writing import Order, Writing, Written
from kvfs.tiers.ssd_health import Health
from kvfs.tiers.ssd_pages import NewPage, WrittenPage
from kvfs.tiers.ssd_record import HITS

if TYPE_CHECKING:
    from kvfs.storage.storage import Storage

log = logging.getLogger("kvfs.storage.copying")

_UNSEEN = os.O_RDONLY | os.O_NOATIME
"""Copying a page is no use of it."""
EXPECTED_SPEED = 100e6
"""Bytes a second, until it is known how fast the disk takes pages."""
_WEIGHT = 0.2
"""Of the last pages in what is known of the speed."""


class Copying:
    """Belongs to the event loop."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._writing = Writing(storage, self._written, self._abandon, lambda: self.bytes_per_second)
        self._unpublished: list[WrittenPage] = []
        self._serial = 0
        self._log = LimitedLog(log)
        self.bytes_per_second = EXPECTED_SPEED
        """How fast a thread wrote pages lately."""
        self.health = Health("SSD tier")
        """Of writing: a disk that takes nothing any more may serve what it has."""
        self.written = 0
        self.written_bytes = 0

    def close(self) -> None:
        """The loop has ended: what got no name is deleted, by the next start where the history's thread has
        not come back: it may be giving one of them its name."""
        if self._storage.history.is_busy:
            return
        for written in self._unpublished:
            self._storage.tier.abandon_page(written)
        self._unpublished.clear()

    async def copy(self, entry: Entry, *, idle: bool) -> bool:
        """Gives a page its copy; says whether it has one then. It has none where it is no page any more, or
        another one.

        Raises what `SsdPages` and `Space.reserve` raise, TimedOut and OSError where the disk fails, and
        AttributeMissing and ValueError where the page is damaged in DRAM.
        """
        order = await self._order(entry, idle)
        if order is None:
            return entry.stored == RESIDENT
        try:
            return await self._writing.write(order)
        except TierFull as error:  # the disk is fuller than thought: pages are evicted, once
            await self._storage.space.make(error.missing_bytes, error.missing_inodes, entry)
        order = await self._order(entry, idle)
        return entry.stored == RESIDENT if order is None else await self._writing.write(order)

    async def _order(self, entry: Entry, idle: bool) -> Order | None:
        """A page as it is now, and room for it; None where there is nothing to be written."""
        storage = self._storage
        if entry.state not in (SEALED, UNCHECKED) or entry.parent is None:
            storage.demotions.forget(entry)
            return None
        if entry.stored is not None:  # nobody waited until it had its name
            await storage.history.wait_for(lambda: entry.stored in (None, RESIDENT))
            return None
        try:
            fd = storage.pool.tier.open(entry.path(), _UNSEEN)
        except FileNotFoundError:
            storage.pool.vanished(entry)
            return None
        try:
            step("demote.begun")
            page = self._describe(entry, fd)
            reservation = await storage.space.reserve(page.digest.size, entry)
        except BaseException:
            os.close(fd)
            raise
        return Order(entry, page, fd, reservation, idle)

    async def _written(self, results: list[tuple[Order, Written]], seconds: float) -> None:
        """Pages were written, or not: what was gets its names."""
        self._judge(results, seconds)
        for order, result in results:
            if isinstance(result, outcome.Error):
                order.decide(outcome.Error(result.error))
            elif isinstance(result, outcome.Value):
                self._name(order, result.value)
        try:
            await self._storage.history.wait_for(lambda: all(order.done.is_set() for order, _ in results))
        except TierFailed as error:
            for order, _ in results:
                order.decide(outcome.Error(error))

    def _judge(self, results: list[tuple[Order, Written]], seconds: float) -> None:
        """What a batch tells of the disk."""
        size = sum(order.page.digest.size for order, result in results if isinstance(result, outcome.Value))
        if size:
            self.bytes_per_second += _WEIGHT * (size / max(seconds, 1e-6) - self.bytes_per_second)
            if self.health.succeeded():
                log.info("the SSD tier takes pages again")
        for _, result in results:
            if isinstance(result, outcome.Error) and isinstance(result.error, OSError | TimedOut):
                self._failed(result.error)

    def _failed(self, error: OSError | TimedOut) -> None:
        """The disk failed, or did not answer: it is asked less from now on, until it works."""
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if self.health.failed(reason, trio.current_time()):
            self._log.warning("failed", f"the SSD tier takes no pages: {reason}")
        self._writing.fail_all(TimedOut(f"the SSD tier: {reason}"))

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

    def _name(self, order: Order, written: WrittenPage) -> None:
        """The copy gets its names, unless there is a reason against it."""
        step("demote.written")
        try:
            if order.is_wanted and (now := self._describe_again(order.entry, written.page)) is not None:
                self._publish(order, written, now)
                return
            order.decide(outcome.Value(False))
        except Exception as error:
            order.decide(outcome.Error(error))
        self._abandon(written)

    def _publish(self, order: Order, written: WrittenPage, now: NewPage) -> None:
        """The copy gets the names and attributes that the page has now."""
        storage, entry = self._storage, order.entry
        before, written.page = written.page, now
        names = [(parent.child_path(name), storage.parents(parent)) for parent, name in entry.names()]
        self._unpublished.append(written)
        self._serial += 1
        entry.stored = token = b"on its way %d" % self._serial  # this copy, and no later one

        def done(error: Exception | None) -> None:
            order.decide(self._published(entry, token, written, error))

        storage.history.append(lambda: storage.tier.publish_page(written, names), done)
        if (now.atime_ns, now.mtime_ns) != (before.atime_ns, before.mtime_ns):
            storage.history.set_times(names[0][0], now.atime_ns, now.mtime_ns)

    def _published(
        self, entry: Entry, token: bytes, written: WrittenPage, error: Exception | None
    ) -> outcome.Outcome[bool]:
        """The history came to the copy, whoever waits for that still: whether the page has it now, or why
        not."""
        storage = self._storage
        step("demote.published")
        self._unpublished.remove(written)
        if error is not None:
            self._abandon(written)
        if entry.stored != token:  # rewritten or removed since, which the history has undone
            return outcome.Value(False)
        if error is not None:
            if written.is_named:  # but not by all: nobody would remove the others with the page
                storage.forget_names(entry)
            entry.stored = None
            return outcome.Error(error)
        entry.stored = RESIDENT
        storage.demotions.forget(entry)
        self.written += 1
        self.written_bytes += written.page.digest.size
        storage.wear.wrote(written.page.digest.size)
        return outcome.Value(True)

    def _abandon(self, written: WrittenPage) -> None:
        """Deletes what gets no name, in its turn; if the history does not come to it, ``close`` does."""
        self._unpublished.append(written)

        def done(error: Exception | None) -> None:
            if error is None:
                self._unpublished.remove(written)

        self._storage.history.append(lambda: self._storage.tier.abandon_page(written), done)

    def _describe_again(self, entry: Entry, written: NewPage) -> NewPage | None:
        """What a page is once its bytes are written; None where it is another one or none any more, or has a
        copy."""
        if entry.state not in (SEALED, UNCHECKED) or entry.parent is None or entry.stored is not None:
            return None
        fd = self._storage.pool.tier.open(entry.path(), _UNSEEN)
        try:
            now = self._describe(entry, fd)
        finally:
            os.close(fd)
        return now if now.digest == written.digest else None
