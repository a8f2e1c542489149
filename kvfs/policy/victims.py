"""In which order pages leave: of all that end a chain, the one that is worth least comes first."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from typing import Generic, NamedTuple

from kvfs.policy.classes import CLASSES, IS_PROTECTED
from kvfs.policy.hazards import Hazards
from kvfs.policy.slots import MEMBER, NO_SLOT, PASSED, PINNED, QUEUED, AnyPage, Page, Slots

Ranked = tuple[float, int, int, int]
"""What the coldest or hottest page of a queue is worth, minus its age, the queue, and the page's slot."""


class Given(NamedTuple):
    """A page as it was when it was given: what became of it shows afterwards."""

    slot: int
    page: Page | None
    clock: int
    parent: int


class Victims(Generic[AnyPage]):
    """One look for victims. It gives slots; whoever asks says before (`begin`) and after (`finish`) what it
    does with one, and `end` in the end. What is still there and untouched then was passed over: it is given
    no more in this look, and what comes before it in its chain neither, until `held` is asked for."""

    __slots__ = ("_all", "_grace", "_hazards", "_passed", "_protected", "_queue", "_slots", "_start")

    def __init__(self, slots: Slots[AnyPage], hazards: Hazards, grace: int) -> None:
        """What is new, less than ``grace`` uses of pages old, leaves after all others."""
        self._slots = slots
        self._grace = grace
        self._hazards = hazards
        self._start = slots.clock
        self._passed: list[int] = []
        self._queue = -1
        """The queue of the last page that was worth least: it stays ranked."""
        queues = [queue for queue in range(CLASSES) if slots.coldest(queue)]
        self._all = [ranked for queue in queues if (ranked := self._rank(queue))]
        self._protected = [ranked for ranked in self._all if IS_PROTECTED[ranked[2]]]
        heapq.heapify(self._all)
        heapq.heapify(self._protected)

    def _rank(self, queue: int) -> Ranked | None:
        """The coldest page of a queue or its hottest one, whichever is worth less: where pages are used again
        after some time and not before, as in a loop, those that are next are the coldest."""
        slots = self._slots
        slot, hottest = self.next_of(queue), slots.colder[queue]
        if not slot:
            return None
        ranked = self._rank_page(queue, slot)
        if hottest in (queue, slot) or slots.group[hottest] or self._is_new(hottest):
            return ranked
        return min(ranked, self._rank_page(queue, hottest))

    def _rank_page(self, queue: int, slot: int) -> Ranked:
        age = self._slots.age(slot)
        has_grace = age < self._grace and self._slots.uses[slot] == 1
        worth = math.inf if has_grace else self._hazards.worth(queue, age)
        return worth, -age, queue, slot

    def next(self, protected_first: bool) -> int:
        """The page that is worth least, of those that were used again first if asked so; NO_SLOT at last."""
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
                self._queue = ranked[2]
                return ranked[3]
        return NO_SLOT

    def next_of(self, queue: int) -> int:
        """The coldest page of a queue that ends a chain, but none that was used since the look began; NO_SLOT
        when there is none."""
        slots = self._slots
        while slot := slots.coldest(queue):
            if self._is_new(slot):
                return NO_SLOT
            if not slots.group[slot] or not self._has_pinned_members(slot):
                return slot
            self._pass(slot)
        return NO_SLOT

    def _is_new(self, slot: int) -> bool:
        slots = self._slots
        return slots.clock != self._start and slots.age(slot) < slots.age_of(self._start)

    def _has_pinned_members(self, slot: int) -> bool:
        return any(self._slots.flags[member] & PINNED for member in self._slots.members(slot))

    def held(self, pinned: Iterable[int]) -> list[int]:
        """What could not be given because of something after it in its chain that was passed over or is among
        the ``pinned``: of each chain what comes later is before what comes earlier."""
        slots = self._slots
        held: dict[int, None] = {}
        for slot in (*self._passed, *pinned):
            while (slot := slots.parent(slot)) and slot not in held:
                held[slot] = None
        return slots.last_first([slot for slot in held if self._may_leave(slot)])

    def _may_leave(self, slot: int) -> bool:
        slots = self._slots
        kept = slots.flags[slot] & (QUEUED | PINNED | PASSED | MEMBER)
        return not kept and not self._is_new(slot) and not self._has_pinned_members(slot)

    def begin(self, slot: int) -> Given:
        """Somebody tries to make this page leave."""
        slots = self._slots
        return Given(slot, slots.pages[slot], slots.clocks[slot], slots.parent(slot))

    def finish(self, given: Given) -> None:
        """Somebody has tried."""
        slots = self._slots
        slot, page, clock, parent = given
        if slots.pages[slot] is page and page is not None:
            if slots.clocks[slot] == clock:
                self._pass(slot)
        elif parent and slots.flags[parent] & QUEUED and slots.numbers[parent] != self._queue:
            self._consider(slots.numbers[parent])

    def _consider(self, queue: int) -> None:
        """A page has come into a queue that may not be ranked."""
        ranked = self._rank(queue)
        if ranked is not None:
            heapq.heappush(self._all, ranked)
            if IS_PROTECTED[queue]:
                heapq.heappush(self._protected, ranked)

    def _pass(self, slot: int) -> None:
        self._slots.unlink(slot)
        self._slots.flags[slot] |= PASSED
        self._passed.append(slot)

    def end(self) -> None:
        """Puts what was passed over back to where it was."""
        for slot in reversed(self._passed):
            if self._slots.flags[slot] & PASSED:
                self._slots.flags[slot] &= ~PASSED
                self._slots.resume(slot)
