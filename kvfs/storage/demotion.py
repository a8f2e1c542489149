"""Pages go down: each is copied to the SSD some time after it was sealed, while DRAM still has it.

A page leaves DRAM only once its copy has its name on the SSD. Copying takes two steps: the bytes go into a
temporary in a thread, in any order; that it appears under the page's names is a step of the history. What the
SSD refuses for a reason that may pass is tried again, after ever longer pauses.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import trio
import xxhash

from kvfs.counters import LimitedLog
from kvfs.errors import (
    AttributeMissing,
    DamagedPage,
    KvfsError,
    NotStorable,
    NotWanted,
    TierFull,
    TierUncounted,
    TimedOut,
)
from kvfs.index import SEALED, UNCHECKED, Entry
from kvfs.page import DIGEST, OWNER, PIN, SPARSE, TTL, USER, Digest
from kvfs.policy.admission import Admission
from kvfs.sizes import format_count
from kvfs.steps import step
from kvfs.storage.described import RESIDENT
from kvfs.storage.unstored import COLD, NOT_REUSED, NOT_STORABLE, Unstored
from kvfs.tiers.ssd_accounts import Reservation
from kvfs.tiers.ssd_health import Health
from kvfs.tiers.ssd_pages import NewPage, WrittenPage
from kvfs.tiers.ssd_record import HITS

if TYPE_CHECKING:
    from kvfs.storage.storage import Storage

log = logging.getLogger("kvfs.storage.demotion")

_UNSEEN = os.O_RDONLY | os.O_NOATIME
"""Copying a page is no use of it."""
WRITERS = 2
"""Pages that are written at once: enough to keep a disk busy, few enough that readers hardly notice."""
FIRST_PAUSE = 1.0
LAST_PAUSE = 60.0
"""Seconds after the SSD has refused a page; each refusal doubles them, a page that it takes ends them."""
EXPECTED_SPEED = 100e6
"""Bytes a second, until it is known how fast the disk takes pages."""
_WEIGHT = 0.2
"""Of the last page in what is known of the speed."""


class Demotions:
    """Copies that wait, and those under way. Belongs to the event loop."""

    def __init__(self, storage: Storage, unstored: Unstored, admission: Admission) -> None:
        self._storage = storage
        self.unstored = unstored
        self._admission = admission
        self._running: dict[Entry, trio.Event] = {}
        self._threads = trio.CapacityLimiter(WRITERS)
        self._changed = trio.Event()
        self._unpublished: list[WrittenPage] = []
        self._serial = 0
        self._speed = EXPECTED_SPEED
        self._pause = FIRST_PAUSE
        self._rest_until = 0.0
        self._log = LimitedLog(log)
        self.health = Health("SSD tier")
        """Of writing: a disk that takes nothing any more may serve what it has."""
        self.failures: Counter[str] = Counter()
        self.written = 0
        self.written_bytes = 0

    # Which pages

    def add(self, entry: Entry) -> None:
        """A page was sealed."""
        self.unstored.sealed(entry, trio.current_time())
        self._changed.set()

    def lacks_copy(self, entry: Entry) -> None:
        """A page that was not sealed just now turned out to have no copy."""
        if self.unstored.state(entry) is None:
            self.add(entry)

    def give_up(self, entry: Entry) -> None:
        """The SSD was full, and kept what is worth more: the page has lost its copy. It is not written again
        for what is worth less than it, or it would go round in circles."""
        self.unstored.leave_out(entry, COLD)

    def forget(self, entry: Entry) -> None:
        """A page is gone or written again."""
        self.unstored.forget(entry)

    def touched(self, entry: Entry) -> None:
        """A page was opened for reading, or pinned."""
        if self.unstored.is_left_out(entry, NOT_REUSED):
            self.unstored.want(entry, trio.current_time())
            self._changed.set()

    def wants(self, entry: Entry) -> bool:
        """Whether a page that is about to leave DRAM is to be on the SSD, if that has room for it."""
        if self.unstored.is_settling(entry):
            self._decide(entry, trio.current_time())
        return entry in self.unstored or self.unstored.is_left_out(entry, COLD)

    def _decide_settled(self) -> None:
        if settled := self.unstored.settled(trio.current_time()):
            self._storage.pool.collect_touches()
        for entry, since in settled:
            self._decide(entry, since)

    def _decide(self, entry: Entry, since: float) -> None:
        is_pinned = self._storage.pool.lifetimes.is_pinned(entry)
        if self._admission.admits(self._keys(entry), entry.hits) or is_pinned:
            self.unstored.want(entry, since)
        else:
            self.unstored.leave_out(entry, NOT_REUSED)

    def _keys(self, entry: Entry) -> Iterator[int]:
        """By what a page is known again when it is stored again: its name, and its bytes."""
        path = entry.path()
        yield xxhash.xxh3_64_intdigest(path)
        with suppress(OSError, AttributeMissing, ValueError):  # whoever opens the page finds that out
            yield int(Digest.parse(self._storage.pool.tier.get_attribute(path, DIGEST)).hex[:16], 16)

    # When

    async def run(self, nursery: trio.Nursery) -> None:
        """Copies what waits, when it is time, for as long as the mount serves."""
        while True:
            self._changed = trio.Event()
            self._decide_settled()
            begin, entry = math.inf, self.unstored.first(self._running)
            if entry is not None and len(self._running) < WRITERS:
                begin = max(self.unstored.due(entry, self._speed), self._rest())
                if begin <= trio.current_time():
                    await nursery.start(partial(self.copy, idle=True), entry)
                    continue
            with trio.move_on_at(min(begin, self.unstored.next_settled())):
                await self._changed.wait()

    def _rest(self) -> float:
        """Until when nothing is written."""
        if not self._storage.is_following:
            return trio.current_time() + FIRST_PAUSE
        return max(self._rest_until, self.health.statistics().next_try if self.health.is_failed else 0.0)

    async def finish(self) -> None:
        """Copies all that is wanted, without waiting for it to settle; for the end of a mount."""
        await self._storage.walked.wait()
        if self._storage.history.is_lost:
            return
        self._storage.pool.collect_touches()
        for entry, since in self.unstored.settled(math.inf):
            self._decide(entry, since)
        self.health.succeeded()  # asked once more, whatever happened before
        await self.copy_all(self.unstored.waiting())
        await self.copy_all(self._warmest())
        if left := len(self.unstored):
            log.warning("%s in DRAM only: the SSD tier did not take them", format_count(left, "page"))
        self._storage.note_all_uses()
        await self._storage.history.settled()

    def _warmest(self) -> list[Entry]:
        """Pages that were too cold to be kept on the SSD while DRAM had them, and that it will hold together
        with all that are worth more; the most valuable first."""
        cold = self.unstored.left_out_as(COLD)
        if not cold:
            return []
        found, room = [], self._storage.tier.room().total_bytes
        for entry in reversed(list(self._storage.pool.policy.victims())):
            room -= entry.size
            if room < 0:
                break
            if entry in cold:
                found.append(entry)
        return found

    def close(self) -> None:
        """The loop has ended: what got no name is deleted."""
        for written in self._unpublished:
            self._storage.tier.abandon_page(written)
        self._unpublished.clear()

    # Copying

    async def copy_all(self, entries: Iterable[Entry]) -> None:
        """Gives pages their copies, in this order, as many at once as a disk is good for."""
        left = iter(entries)

        async def copy_some() -> None:
            for entry in left:
                await self.copy(entry)

        async with trio.open_nursery() as nursery:
            for _ in range(WRITERS):
                nursery.start_soon(copy_some)

    async def copy(
        self,
        entry: Entry,
        *,
        idle: bool = False,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> bool:
        """Gives a page its copy on the SSD; says whether it has one now. No failure ends the mount.

        ``idle``: nobody waits for it, so the disk may serve others first.
        """
        while (running := self._running.get(entry)) is not None:
            await running.wait()
        task_status.started()
        if entry.stored == RESIDENT:
            self.forget(entry)
            return True
        if not self.health.may_try(trio.current_time()):
            return False
        done = self._running[entry] = trio.Event()
        state = self.unstored.state(entry)
        try:
            return await self._copy(entry, idle)
        except Exception as error:
            is_the_same = state is not None and state == self.unstored.state(entry)
            if is_the_same:  # else the page is gone, or was written again
                self._refused(entry, error)
        finally:
            del self._running[entry]
            done.set()
            self._changed.set()
        return False

    def _refused(self, entry: Entry, error: Exception) -> None:
        """The page stays in DRAM alone: until the SSD is asked again, or for good."""
        if isinstance(error, NotWanted):
            self.unstored.leave_out(entry, COLD)
        elif isinstance(error, NotStorable):
            self._leave_out(entry, NOT_STORABLE, error)
        elif isinstance(error, DamagedPage | AttributeMissing | ValueError):
            self._leave_out(entry, "damaged", error)
        elif isinstance(error, TierFull):
            self._try_later(entry, "full", error)
        elif isinstance(error, TierUncounted):
            self._try_later(entry, "uncounted", error)
        elif isinstance(error, TimedOut):
            self._try_later(entry, "timed-out", error)
        elif isinstance(error, OSError | KvfsError):
            self._try_later(entry, "io-error", error)
        else:
            self.unstored.leave_out(entry, "bug")
            self._log.warning("bug", "a page could not be copied to the SSD", error)

    def _leave_out(self, entry: Entry, reason: str, error: Exception) -> None:
        self.failures[reason] += 1
        self.unstored.leave_out(entry, reason)
        self._log.warning(reason, f"a page cannot be copied to the SSD: {error}")

    def _try_later(self, entry: Entry, reason: str, error: Exception) -> None:
        """After a pause, and after all others: this page alone may be what the SSD does not take."""
        self.failures[reason] += 1
        self.unstored.postpone(entry)
        now = trio.current_time()
        if now >= self._rest_until:
            self._rest_until = now + self._pause
            self._pause = min(2 * self._pause, LAST_PAUSE)
        self._log.warning(reason, f"a page was not copied to the SSD, and will be tried again: {error}")

    async def _copy(self, entry: Entry, idle: bool) -> bool:
        pool = self._storage.pool
        if entry.state not in (SEALED, UNCHECKED) or entry.parent is None:
            self.forget(entry)
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
        reservation = await storage.reserve(page.digest.size, entry)
        try:
            return await self._write_in_thread(page, fd, reservation, idle)
        except TierFull as error:
            await storage.make_room(error.missing_bytes, error.missing_inodes, entry)
        reservation = await storage.reserve(page.digest.size, entry)
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
                self._succeeded(page.digest.size / max(trio.current_time() - began, 1e-6))
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

    def _succeeded(self, bytes_per_second: float) -> None:
        """The disk took a page."""
        self._speed += _WEIGHT * (bytes_per_second - self._speed)
        self._pause, self._rest_until = FIRST_PAUSE, 0.0
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
            entry.stored = None
            return error
        entry.stored = RESIDENT
        self.forget(entry)
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
