"""Pins within a budget, and deadlines: what a person or an engine says of single pages.

Both are rare, so they are kept in dictionaries, by the page's slot.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from kvfs.errors import OutOfRoom
from kvfs.sizes import format_size

_STALE = 64
"""So many more entries than pages a heap may have."""


class Pins:
    """Pages that must not leave, of at most ``budget`` bytes together."""

    __slots__ = ("_sizes", "budget", "bytes")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.bytes = 0
        self._sizes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[int]:
        return iter(self._sizes)

    def add(self, slot: int, size: int) -> None:
        """Raises OutOfRoom when the budget does not allow it; a page is pinned once however often it is."""
        if slot in self._sizes:
            return
        if self.bytes + size > self.budget:
            raise OutOfRoom(
                f"pinned pages may take {format_size(self.budget)}, of which {format_size(self.bytes)} are "
                f"taken: no room for another {format_size(size)}"
            )
        self._sizes[slot] = size
        self.bytes += size

    def discard(self, slot: int) -> None:
        self.bytes -= self._sizes.pop(slot, 0)


class Deadlines:
    """Until when pages live, on whatever clock the caller has."""

    __slots__ = ("_by_slot", "_heap")

    def __init__(self) -> None:
        self._by_slot: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._by_slot)

    def set(self, slot: int, deadline: float) -> None:
        if self._by_slot.get(slot) == deadline:
            return
        self._by_slot[slot] = deadline
        heapq.heappush(self._heap, (deadline, slot))
        if len(self._heap) > 2 * len(self._by_slot) + _STALE:
            self._heap = [(deadline, slot) for slot, deadline in self._by_slot.items()]
            heapq.heapify(self._heap)

    def discard(self, slot: int) -> None:
        self._by_slot.pop(slot, None)

    def due(self, now: float) -> list[int]:
        """Slots whose deadline has come, the earliest first; those that stay are due again the next time."""
        due: dict[int, float] = {}
        while self._heap and self._heap[0][0] <= now:
            deadline, slot = heapq.heappop(self._heap)
            if self._by_slot.get(slot) == deadline:
                due[slot] = deadline
        for slot, deadline in due.items():
            heapq.heappush(self._heap, (deadline, slot))
        return list(due)
