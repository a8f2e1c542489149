"""What writing to the SSD costs, and what comes of it: bytes a day, and pages that nobody has ever read."""

from __future__ import annotations

import logging
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import trio

from kvfs.counters import LimitedLog
from kvfs.errors import NoSuchPage, StalePage
from kvfs.index import STORED, Entry
from kvfs.storage import described

if TYPE_CHECKING:
    from kvfs.storage.storage import Storage

log = logging.getLogger("kvfs.storage.wear")

HOUR: Final = 3600
DAY: Final = 24 * HOUR
AGES: Final = {"<1h": HOUR, "<1d": DAY, "<7d": 7 * DAY, "older": None}
"""Seconds since a page was last modified, below which it belongs to each age."""
BATCH: Final = 1000
"""Entries that are looked at between two turns of the event loop."""
PAUSE: Final = 0.01
INTERVAL: Final = 60.0
LEAST_IDLE: Final = 100
"""Looking through the index takes at most this part of one processor."""


class LastDay:
    """A sum over the last 24 hours, in steps of an hour; times in seconds of a clock that only goes
    forward."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._hours: deque[tuple[int, int]] = deque()

    def add(self, amount: int, now: float) -> None:
        hour = int(now // HOUR)
        if self._hours and self._hours[-1][0] == hour:
            amount += self._hours.pop()[1]
        self._hours.append((hour, amount))
        while self._hours[0][0] <= hour - 24:
            self._hours.popleft()

    def total(self, now: float) -> int:
        return sum(amount for hour, amount in self._hours if hour > now // HOUR - 24)

    def a_day(self, now: float) -> int:
        """What a whole day would come to, if it went on like this; in the first hour, if nothing came until
        its end."""
        return int(self.total(now) * DAY / min(max(now - self._began, HOUR), DAY))


class Wear:
    """Belongs to the event loop. ``unread`` is what was found when the index was last looked through."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._written = LastDay(time.monotonic())
        self._log = LimitedLog(log)
        self._counted: float | None = None
        self._unread = _nothing()

    def wrote(self, size: int) -> None:
        """A page of so many bytes was written."""
        self._written.add(size, time.monotonic())

    async def run(self) -> None:
        """Looks through the index now and then."""
        await self._storage.walked.wait()
        while True:
            spent = 0.0
            try:
                spent = await self.count()
            except Exception as error:  # no failure may end the mount
                self._log.warning("bug", "what nobody reads could not be counted", error)
            await trio.sleep(max(INTERVAL, LEAST_IDLE * spent))

    async def count(self) -> float:
        """Counts the pages on the SSD that were never opened for reading since they were stored, by the time
        that has passed since then. Returns the seconds that it took of a processor."""
        pool, spent = self._storage.pool, 0.0
        pool.uses.collect()
        found, now_ns = _nothing(), time.time_ns()
        entries, began = pool.index.entries(), time.thread_time()
        for number, entry in enumerate(entries, 1):
            if entry.stored is not None and not entry.hits:
                self._count(entry, found, now_ns)
            if number % BATCH == 0:
                spent += time.thread_time() - began
                await trio.sleep(PAUSE)
                began = time.thread_time()
        self._unread, self._counted = found, time.monotonic()
        return spent + time.thread_time() - began

    def _count(self, entry: Entry, found: dict[str, dict[str, int]], now_ns: int) -> None:
        with suppress(NoSuchPage, StalePage):  # gone behind our back
            if entry.state == STORED and entry.stored:  # most of them: no need of a whole stat
                stored_ns = described.mtime_ns(entry.stored)
            else:
                stored_ns = self._storage.pool.status(entry).st_mtime_ns
            age = (now_ns - stored_ns) / 1e9
            name = next(name for name, below in AGES.items() if below is None or age < below)
            found[name]["pages"] += 1
            found[name]["bytes"] += entry.size

    def statistics(self) -> dict[str, Any]:
        """For status: bytes, and how long ago pages were counted, None where they were not yet."""
        now = time.monotonic()
        return {
            "written_last_day_bytes": self._written.total(now),
            "written_a_day_bytes": self._written.a_day(now),
            "never_read": self._unread,
            "never_read_counted_seconds_ago": None
            if self._counted is None
            else round(now - self._counted, 1),
        }


def _nothing() -> dict[str, dict[str, int]]:
    return {age: {"pages": 0, "bytes": 0} for age in AGES}
