"""Pages go down: each is copied to the SSD some time after it was sealed, while DRAM still has it.

A page leaves DRAM only once its copy has its name on the SSD. Copying takes two steps: the bytes go into a
temporary in a thread, in any order; that it appears under the page's names is a step of the history.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from kvfs.counters import LimitedLog
from kvfs.errors import DamagedPage, NotStorable, TierFailed, TierFull, TierUncounted, TimedOut
from kvfs.index import SEALED, UNCHECKED, Entry
from kvfs.page import DIGEST, OWNER, SPARSE, USER, Digest
from kvfs.steps import step
from kvfs.storage.described import RESIDENT
from kvfs.tiers.ssd_accounts import Reservation
from kvfs.tiers.ssd_pages import NewPage, WrittenPage
from kvfs.tiers.ssd_record import HITS

if TYPE_CHECKING:
    from kvfs.storage.storage import Storage

log = logging.getLogger("kvfs.storage.demotion")

_UNSEEN = os.O_RDONLY | os.O_NOATIME
"""Copying a page is no use of it."""
WRITERS = 2
"""Pages that are written at once: enough to keep a disk busy, few enough that readers hardly notice."""
RETRY_SECONDS = 1.0


class Demotions:
    """Copies that wait, and those under way. Belongs to the event loop."""

    def __init__(self, storage: Storage, settle_seconds: float) -> None:
        self._storage = storage
        self._settle_seconds = settle_seconds
        self._waiting: dict[Entry, float] = {}
        """When each page was sealed, in that order."""
        self._waiting_bytes = 0
        self._running: dict[Entry, trio.Event] = {}
        self._threads = trio.CapacityLimiter(WRITERS)
        self._changed = trio.Event()
        self._unpublished: list[WrittenPage] = []
        self._serial = 0
        self._log = LimitedLog(log)
        self.failures: Counter[str] = Counter()
        self.written = 0
        self.written_bytes = 0

    @property
    def unstored_bytes(self) -> int:
        """Bytes of pages that are meant for the SSD and are not there yet."""
        return self._waiting_bytes

    @property
    def unstored(self) -> int:
        return len(self._waiting)

    def add(self, entry: Entry) -> None:
        """A page was sealed, and the SSD is to have it."""
        self.forget(entry)
        self._waiting[entry] = trio.current_time()
        self._waiting_bytes += entry.size
        self._changed.set()

    def forget(self, entry: Entry) -> None:
        """A page is gone or written again."""
        if self._waiting.pop(entry, None) is not None:
            self._waiting_bytes -= entry.size

    async def run(self, nursery: trio.Nursery) -> None:
        """Copies what has waited long enough, for as long as the mount serves."""
        while True:
            self._changed = trio.Event()
            first = next(iter(self._waiting.items()), None)
            if first is None:
                await self._changed.wait()
                continue
            entry, sealed = first
            if (early := sealed + self._settle_seconds - trio.current_time()) > 0:
                with trio.move_on_after(early):
                    await self._changed.wait()
                continue
            if entry in self._running or len(self._running) >= WRITERS or not self._storage.is_working:
                with trio.move_on_after(RETRY_SECONDS):
                    await self._changed.wait()
                continue
            await nursery.start(self.copy, entry)

    async def finish(self) -> None:
        """Copies all that waits, without waiting for it to settle; for the end of a mount."""
        await self.copy_all(list(self._waiting))
        self._storage.note_all_uses()
        await self._storage.history.settled()

    def close(self) -> None:
        """The loop has ended: what got no name is deleted."""
        for written in self._unpublished:
            self._storage.tier.abandon_page(written)
        self._unpublished.clear()

    async def copy_all(self, entries: Iterable[Entry]) -> None:
        """Gives pages their copies, in this order, as many at once as a disk is good for."""
        left = iter(entries)

        async def copy_some() -> None:
            for entry in left:
                await self.copy(entry)

        async with trio.open_nursery() as nursery:
            for _ in range(WRITERS):
                nursery.start_soon(copy_some)

    async def copy(self, entry: Entry, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> bool:
        """Gives a page its copy on the SSD; says whether it has one now. No failure ends the mount."""
        while (running := self._running.get(entry)) is not None:
            await running.wait()
        task_status.started()
        if entry.stored == RESIDENT:
            self.forget(entry)
            return True
        done = self._running[entry] = trio.Event()
        try:
            return await self._copy(entry)
        except (DamagedPage, NotStorable, TierFailed, FileNotFoundError) as error:
            self._refused("not-storable", entry, error)
        except (TierFull, TierUncounted, TimedOut, OSError) as error:
            self._refused("full" if isinstance(error, TierFull) else "io-error", entry, error)
        except Exception as error:
            self._log.warning("bug", "a page could not be copied to the SSD", error)
            self.forget(entry)
        finally:
            del self._running[entry]
            done.set()
            self._changed.set()
        return False

    def _refused(self, reason: str, entry: Entry, error: Exception) -> None:
        """The page stays in DRAM alone. It is not tried again before it would be evicted."""
        self.failures[reason] += 1
        self.forget(entry)
        self._log.warning(reason, f"a page was not copied to the SSD: {error}")

    async def _copy(self, entry: Entry) -> bool:
        pool = self._storage.pool
        if entry.state not in (SEALED, UNCHECKED) or entry.parent is None:
            self.forget(entry)
            return False
        self._storage.health.require(trio.current_time())
        fd = pool.tier.open(entry.path(), _UNSEEN)
        try:
            step("demote.begun")
            page = self._describe(entry, fd)
            written = await self._write(page, fd)
        finally:
            os.close(fd)
        step("demote.written")
        return await self._publish(entry, written)

    async def _write(self, page: NewPage, fd: int) -> WrittenPage:
        """The bytes in a temporary. Where the disk is fuller than thought, pages are evicted, once."""
        storage = self._storage
        reservation = await storage.reserve(page.digest.size)
        try:
            return await self._write_in_thread(page, fd, reservation)
        except TierFull as error:
            await storage.make_room(error.missing_bytes, error.missing_inodes)
        return await self._write_in_thread(page, fd, await storage.reserve(page.digest.size))

    async def _write_in_thread(self, page: NewPage, fd: int, reservation: Reservation) -> WrittenPage:
        storage, left_behind = self._storage, threading.Event()
        handed: list[WrittenPage] = []
        """What the thread gives: it belongs to who takes it out."""

        def write(source: int) -> None:
            handed.append(storage.tier.write_page(page, source, storage.write, reservation))
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
                storage.succeeded()
                return handed.pop()
        except OSError as error:
            storage.failed(error.strerror or str(error))
            raise
        finally:
            left_behind.set()
            with suppress(IndexError):
                self._abandon(handed.pop())
            if job.abandon():
                reservation.release()
        raise storage.failed(f"a page could not be written within {storage.io_timeout:g} s")

    def _describe(self, entry: Entry, fd: int) -> NewPage:
        tier, status = self._storage.pool.tier, os.fstat(fd)
        attributes = {
            name: tier.get_attribute(fd, name)
            for name in tier.list_attributes(fd)
            if name in (SPARSE, OWNER) or name.startswith(USER)
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
            self.forget(entry)
            return False
        self._unpublished.append(written)
        before, written.page = written.page, now
        names = [(parent.child_path(name), storage.parents(parent)) for parent, name in entry.names()]
        result: list[Exception | None] = []
        finished = trio.Event()

        def done(error: Exception | None) -> None:
            result.append(error)
            finished.set()

        self._serial += 1
        entry.stored = token = b"on its way %d" % self._serial  # this copy, and no later one
        storage.history.append(lambda: storage.tier.publish_page(written, names), done)
        if (now.atime_ns, now.mtime_ns) != (before.atime_ns, before.mtime_ns):
            storage.history.set_times(names[0][0], now.atime_ns, now.mtime_ns)
        await finished.wait()
        step("demote.published")
        self._unpublished.remove(written)
        if result[0] is not None:
            self._abandon(written)
        if entry.stored != token:  # rewritten or removed since, which the history has undone
            return False
        if result[0] is not None:
            entry.stored = None
            raise result[0]
        entry.stored = RESIDENT
        self.forget(entry)
        self.written += 1
        self.written_bytes += written.page.digest.size
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
