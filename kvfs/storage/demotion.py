"""Pages go down: each is copied to the SSD some time after it was sealed, while DRAM still has it.

A page leaves DRAM only once its copy has its name on the SSD. What the SSD refuses for a reason that may pass
is tried again, after ever longer pauses.
"""

from __future__ import annotations

import logging
import math
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
from kvfs.index import Entry
from kvfs.page import DIGEST, Digest
from kvfs.policy.admission import Admission
from kvfs.storage.copying import Copying
from kvfs.storage.described import RESIDENT
from kvfs.storage.unstored import COLD, NOT_REUSED, NOT_STORABLE, Unstored
from kvfs.storage.writing import AT_ONCE
from kvfs.tiers.ssd_health import Health

if TYPE_CHECKING:
    from kvfs.storage.storage import Storage

log = logging.getLogger("kvfs.storage.demotion")

FIRST_PAUSE = 1.0
LAST_PAUSE = 60.0
"""Seconds after the SSD has refused a page; each refusal doubles them, a page that it takes ends them."""
RECONSIDER_SECONDS = 30.0
MUCH_ROOM = 8
"""This part of the SSD is left free for what comes."""


class Demotions:
    """Copies that wait, and those under way. Belongs to the event loop."""

    def __init__(self, storage: Storage, unstored: Unstored, admission: Admission) -> None:
        self._storage = storage
        self.unstored = unstored
        self._admission = admission
        self._running: dict[Entry, trio.Event] = {}
        self._changed = trio.Event()
        self._is_held_up = False
        """Whether `run` waits for a page to be copied."""
        self._copying = Copying(storage)
        self._pause = FIRST_PAUSE
        self._rest_until = 0.0
        self._reconsider_at = math.inf
        self._log = LimitedLog(log)
        self.failures: Counter[str] = Counter()

    @property
    def health(self) -> Health:
        """Of writing to the SSD."""
        return self._copying.health

    @property
    def written(self) -> int:
        """Pages that were copied since the mount."""
        return self._copying.written

    @property
    def written_bytes(self) -> int:
        return self._copying.written_bytes

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
            self._storage.pool.uses.collect()
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
            self._is_held_up = len(self._running) >= AT_ONCE
            if entry is not None and not self._is_held_up:
                begin = max(self.unstored.due(entry, self._copying.bytes_per_second), self._rest())
                if begin <= trio.current_time():
                    await nursery.start(partial(self.copy, idle=True), entry)
                    continue
            self._reconsider()
            with trio.move_on_at(min(begin, self.unstored.next_settled(), self._reconsider_at)):
                await self._changed.wait()

    def _reconsider(self) -> None:
        """Where the SSD has much room again, as after many pages were removed, it is to have what was too
        cold for it. Much is more than is evicted at once, so that nothing is written in circles."""
        now = trio.current_time()
        if not self.unstored.has_left_out(COLD):
            self._reconsider_at = math.inf
            return
        if self._reconsider_at == math.inf:
            self._reconsider_at = now + RECONSIDER_SECONDS
        if now < self._reconsider_at:
            return
        self._reconsider_at = now + RECONSIDER_SECONDS
        room = self._storage.tier.room()
        left = room.free_bytes - room.total_bytes // MUCH_ROOM
        for entry in self._warmest() if left > 0 else ():
            left -= entry.size
            if left < 0:
                break
            self.unstored.want(entry, now)
            self._changed.set()

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
        self._storage.pool.uses.collect()
        for entry, since in self.unstored.settled(math.inf):
            self._decide(entry, since)
        self.health.succeeded()  # asked once more, whatever happened before
        await self.copy_all(self.unstored.waiting())
        await self.copy_all(self._warmest())
        self._storage.note_all_uses()
        await self._storage.history.settled()

    def _warmest(self) -> list[Entry]:
        """Pages that were too cold to be kept on the SSD while DRAM had them, and that it will hold together
        with all that are worth more; the most valuable first."""
        cold = self.unstored.left_out_as(COLD)
        if not cold:
            return []
        found = []
        room = self._storage.tier.room().total_bytes - self._storage.pool.lifetimes.pinned_bytes
        for entry in reversed(list(self._storage.pool.policy.victims())):
            room -= entry.size
            if room < 0:
                break
            if entry in cold:
                found.append(entry)
        return found

    def close(self) -> None:
        """The loop has ended: what got no name is deleted."""
        self._copying.close()

    # Copying

    async def copy_all(self, entries: Iterable[Entry]) -> None:
        """Gives pages their copies, in this order, as many at once as a disk is good for."""
        left = iter(entries)

        async def copy_some() -> None:
            for entry in left:
                await self.copy(entry)

        async with trio.open_nursery() as nursery:
            for _ in range(AT_ONCE):
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
        is_there = False
        try:
            is_there = await self._copying.copy(entry, idle=idle)
        except Exception as error:
            is_the_same = state is not None and state == self.unstored.state(entry)
            if is_the_same:  # else the page is gone, or was written again
                self._refused(entry, error)
            return False
        finally:
            if not is_there or self._rest_until or self._is_held_up:
                self._changed.set()  # `run` may have something to do that it did not know of
            del self._running[entry]
            done.set()
        if is_there:
            self._pause, self._rest_until = FIRST_PAUSE, 0.0
        return is_there

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
