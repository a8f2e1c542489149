"""In which order pages leave: of all that end a chain, the one that is worth least comes first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from kvfs.policy.classes import CLASSES, IS_PROTECTED
from kvfs.policy.hazards import Hazards
from kvfs.policy.slots import LINKED, MEMBER, NO_SLOT, PASSED, PINNED, SMALL_QUEUE, AnyPage, Slots

Ranked = tuple[float, int, int]
"""What the coldest page of a queue is worth, minus its age, and the queue."""


class Victims:
    """One look for victims. It gives slots; one that is still there and untouched when the next is asked for
    was passed over, and so is what comes before it in its chain, until `held` is asked for."""

    __slots__ = ("_all", "_hazards", "_passed", "_protected", "_slots", "_start")

    def __init__(self, slots: Slots[AnyPage], hazards: Hazards) -> None:
        self._slots = slots
        self._hazards = hazards
        self._start = slots.clock
        self._passed: list[int] = []
        hotter = slots.hotter
        queues = [queue for queue in range(CLASSES) if hotter[queue] != queue]
        self._all = [ranked for queue in queues if (ranked := self._rank(queue))]
        self._protected = [each for each in self._all if IS_PROTECTED[each[2]]]
        heapq.heapify(self._all)
        heapq.heapify(self._protected)

    def _rank(self, queue: int) -> Ranked | None:
        slot = self._coldest(queue)
        if not slot:
            return None
        age = self._slots.age(slot)
        return self._hazards.worth(queue, age), -age, queue

    def _coldest(self, queue: int) -> int:
        """The coldest page of a queue that may leave, unless it was used since the look began."""
        slots = self._slots
        while slot := slots.coldest(queue):
            if slots.age(slot) < slots.age_of(self._start):
                return NO_SLOT
            if not slots.group[slot] or not self._has_pinned_members(slot):
                return slot
            self._pass(slot)
        return NO_SLOT

    def _has_pinned_members(self, slot: int) -> bool:
        return any(self._slots.flags[member] & PINNED for member in self._slots.members(slot))

    def _pass(self, slot: int) -> None:
        self._slots.unlink(slot)
        self._slots.flags[slot] |= PASSED
        self._passed.append(slot)

    def next(self, protected_first: bool) -> int:
        """The page that is worth least, of those that were used again first if asked so; NO_SLOT at the end."""
        if protected_first and (slot := self._first(self._protected)):
            return slot
        return self._first(self._all)

    def _first(self, heap: list[Ranked]) -> int:
        while heap:
            ranked = self._rank(heap[0][2])
            if ranked is None:
                heapq.heappop(heap)
            elif ranked[0] > heap[0][0]:
                heapq.heapreplace(heap, ranked)
            else:
                return self._coldest(ranked[2])
        return NO_SLOT

    def next_small(self) -> int:
        """The small page used longest ago; NO_SLOT at the end."""
        return self._coldest(SMALL_QUEUE)

    def went_on(self, slot: int, clock: int, parent: int) -> None:
        """The caller has had ``slot``, when it was used last at ``clock`` and came after ``parent``."""
        slots = self._slots
        if slots.flags[slot] & LINKED and slots.clocks[slot] == clock and slots.pages[slot] is not None:
            self._pass(slot)
        elif parent and slots.flags[parent] & LINKED and (ranked := self._rank(slots.numbers[parent])):
            heapq.heappush(self._all, ranked)
            if IS_PROTECTED[ranked[2]]:
                heapq.heappush(self._protected, ranked)

    def held(self) -> list[int]:
        """What could not be given because something after it in its chain stays: the coldest first, so that
        of each chain what comes later is before what comes earlier."""
        slots = self._slots
        held = [
            slot
            for slot, page in enumerate(slots.pages)
            if page is not None
            and not slots.flags[slot] & (LINKED | PINNED | PASSED | MEMBER)
            and not self._has_pinned_members(slot)
        ]
        return sorted(held, key=slots.age, reverse=True)

    def end(self) -> None:
        """Puts what was passed over back to where it was."""
        for slot in reversed(self._passed):
            if self._slots.flags[slot] & PASSED:
                self._slots.flags[slot] &= ~PASSED
                if not self._slots.children[slot]:
                    self._slots.resume(slot)
