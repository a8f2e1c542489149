"""When pages expire, each known by its number: about 8 bytes for a page that does. Pure.

Times are whole seconds since 1970, because pages outlive the daemon and the host.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator

_LATEST = 0xFFFFFFFF
_STALE = 1024
"""So many more numbers than pages may lie in the queues."""


class Expiry:
    """Numbers are small and given to another page once they are discarded."""

    def __init__(self) -> None:
        self._second_of = array("I")
        """By number; 0 for a page that does not expire."""
        self._queues: dict[int, array[int]] = {}
        """Numbers that may be due at a second: those that ``_second_of`` says the same of are."""
        self._seconds: list[int] = []
        """A heap of the seconds that have a queue."""
        self._queued = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def get(self, number: int) -> int:
        """The second at which a page expires; 0 where it does not."""
        return self._second_of[number] if number < len(self._second_of) else 0

    def set(self, number: int, second: int) -> None:
        """A page expires at ``second``, whatever was said of it before; that may be over."""
        second = min(max(second, 1), _LATEST)
        if number >= len(self._second_of):
            self._second_of.frombytes(bytes(4 * (number + 1 + number // 8 - len(self._second_of))))
        self._count += not self._second_of[number]
        self._second_of[number] = second
        self._queue(number, second)
        if self._queued > 2 * self._count + _STALE:
            self._queue_anew()

    def discard(self, number: int) -> None:
        """A page does not expire, or is gone."""
        if self.get(number):
            self._second_of[number] = 0
            self._count -= 1

    def take_due(self, now: float, most: int) -> list[int]:
        """At most so many pages that are over, the earliest first. Whoever gets one discards it, or it may be
        given again, and certainly is after ``set``."""
        due: list[int] = []
        while self._seconds and self._seconds[0] <= now and len(due) < most:
            second = self._seconds[0]
            queue = self._queues[second]
            while queue and len(due) < most:
                number = queue.pop()
                self._queued -= 1
                if self._second_of[number] == second:
                    due.append(number)
            if not queue:
                del self._queues[heapq.heappop(self._seconds)]
        return due

    def next_second(self) -> float:
        """When the next page may be due."""
        return float(self._seconds[0]) if self._seconds else float("inf")

    def overdue(self, now: float) -> Iterator[int]:
        """All pages that are over and were not discarded, given or not."""
        return (number for number, second in enumerate(self._second_of) if 0 < second <= now)

    def _queue(self, number: int, second: int) -> None:
        queue = self._queues.get(second)
        if queue is None:
            queue = self._queues[second] = array("I")
            heapq.heappush(self._seconds, second)
        queue.append(number)
        self._queued += 1

    def _queue_anew(self) -> None:
        """Drops what was said of pages that are gone, or before."""
        self._queues.clear()
        self._seconds.clear()
        self._queued = 0
        for number, second in enumerate(self._second_of):
            if second:
                self._queue(number, second)
