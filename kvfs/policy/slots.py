"""What is kept of each page, in plain arrays: 48 bytes a page and no objects.

A page's slot is its number, which its owner keeps unique, behind the slots of the queues. A queue is a ring
of slots linked in both directions that begins and ends at the slot of the queue itself: `hotter` of it is
the coldest page, `colder` of it the hottest. Times are counts of uses modulo 2³².
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Generic, Protocol, TypeVar

from kvfs.policy.classes import CLASSES
from kvfs.policy.hazards import Watched

SMALL_QUEUE: Final = CLASSES
"""The queue of small pages; before it comes one for each class."""
ORPHANS: Final = CLASSES + 1
"""The queue of pages whose group has left without them."""
QUEUES: Final = CLASSES + 2
NO_SLOT: Final = 0
"""A queue's slot, so never a page's."""
_TIME = 0xFFFFFFFF
_GROWTH = 256

LINKED: Final = 1
"""The page is in its queue. One that is in none comes before another one in its chain, is pinned, was passed
over, or leaves with another page."""
NEAR_END: Final = 2
"""The request that used it ended with it or with the next page."""
BRANCHED: Final = 4
"""It is the last page of a request that left the way of an earlier one."""
PINNED: Final = 8
PASSED: Final = 16
"""Whoever looks for victims now has passed it over."""
MEMBER: Final = 32
"""It leaves with the leader of its group, and has no place of its own."""
PROTECTED: Final = 64
"""It was used again since it was made, and its bytes are counted as protected."""
RETURNED: Final = 128
"""It is in its queue, to which it came back, not linked: its place is between the ends."""
QUEUED: Final = LINKED | RETURNED


class Page(Protocol):
    """What can be ordered. ``number`` is at least 1 and unique among the pages of an order; the smaller the
    numbers, the less memory they cost. ``size`` is in bytes and is looked at when the page comes in."""

    @property
    def number(self) -> int: ...

    @property
    def size(self) -> int: ...


AnyPage = TypeVar("AnyPage", bound=Page)


class Slots(Generic[AnyPage]):
    """The columns, and what links pages: queues, chains and groups."""

    __slots__ = (
        "_before", "_returned", "children", "clock", "clocks", "colder", "flags", "generations", "group",
        "hotter", "numbers", "pages", "parent_generations", "parents", "shares", "sizes", "uses",
    )  # fmt: skip

    def __init__(self) -> None:
        self.clock = 0
        """Uses of pages so far."""
        self._before = 0
        """When a page that comes from before the first use was used."""
        self.pages: list[AnyPage | None] = [None] * QUEUES
        self.sizes = array("Q", bytes(8 * QUEUES))
        self.clocks = array("I", bytes(4 * QUEUES))
        """When the page was used last."""
        self.numbers = array("H", range(QUEUES))
        """The page's class, which is its queue."""
        self.shares = array("H", bytes(2 * QUEUES))
        """How many pages of its class its request had: each counts as that part of an observation. 0 for what
        is not observed: small pages, members of groups, empty slots."""
        self.uses = bytearray(QUEUES)
        self.flags = bytearray(QUEUES)
        self.colder = array("I", range(QUEUES))
        self.hotter = array("I", range(QUEUES))
        self.parents = array("I", bytes(4 * QUEUES))
        """The page before it in its chain, if its generation is still the one that it was."""
        self.children = array("I", bytes(4 * QUEUES))
        """How many pages of the order come right after it."""
        self.generations = bytearray(QUEUES)
        """Goes up when a page leaves: those after it need not be told."""
        self.parent_generations = bytearray(QUEUES)
        self.group = array("I", bytes(4 * QUEUES))
        """The next page of its group, in a ring; none for a page without."""
        self._returned: dict[int, list[tuple[int, int]]] = {}
        """For some queues a heap of what came back to a place between the ends, with the time of its use."""

    def slot(self, page: AnyPage) -> int:
        """The slot of a page that is in the order, or NO_SLOT."""
        slot = page.number + QUEUES
        return slot if slot < len(self.pages) and self.pages[slot] is page else NO_SLOT

    def enter(self, page: AnyPage) -> int:
        """A slot for a page, with nothing known of it. Raises ValueError when its number is taken."""
        slot = page.number + QUEUES
        if slot >= len(self.pages):
            self._grow(max(slot + 1 - len(self.pages), _GROWTH))
        if self.pages[slot] is not None:
            raise ValueError("the page, or another one of its number, is in the order already")
        self.pages[slot] = page
        self.sizes[slot] = page.size
        self.uses[slot] = self.shares[slot] = self.numbers[slot] = 0
        self.flags[slot] = NEAR_END
        self.parents[slot] = self.children[slot] = self.group[slot] = 0
        return slot

    def _grow(self, missing: int) -> None:
        self.pages.extend([None] * missing)
        self.sizes.frombytes(bytes(8 * missing))
        for half in (self.numbers, self.shares):
            half.frombytes(bytes(2 * missing))
        for whole in (
            self.clocks, self.colder, self.hotter, self.parents, self.children, self.group,
        ):  # fmt: skip
            whole.frombytes(bytes(4 * missing))
        for byte in (self.uses, self.flags, self.generations, self.parent_generations):
            byte.extend(bytes(missing))

    def leave(self, slot: int) -> None:
        """Frees a slot. What leaves with the page becomes orphans, and the page before it may end its chain
        now."""
        self.unlink(slot)
        for orphan in self._part(slot):
            self.numbers[orphan] = ORPHANS
            self.resume(orphan)
        parent = self.parent(slot)
        self.pages[slot] = None
        self.shares[slot] = self.flags[slot] = 0
        self.generations[slot] = (self.generations[slot] + 1) & 0xFF
        if parent:
            self.children[parent] -= 1
            self.resume(parent)

    def sample(self, first: int, step: int) -> Iterator[Watched]:
        """Every ``step``-th slot's page, from the ``first`` on, if it is observed."""
        start, clock = QUEUES + first, self.clock
        columns = self.numbers[start::step], self.clocks[start::step], self.shares[start::step]
        for number, used, share in zip(*columns, strict=True):
            if share:
                yield number, (clock - used) & _TIME, step / share

    # Queues

    def age(self, slot: int) -> int:
        """Uses of pages since the last of this one."""
        return (self.clock - self.clocks[slot]) & _TIME

    def age_of(self, clock: int) -> int:
        """Uses of pages since that time."""
        return (self.clock - clock) & _TIME

    def renew(self, used: Iterable[int], numbers: Iterable[int]) -> None:
        """Pages are used now, one after the other: each becomes the hottest of the queue that is given for
        it, unless something keeps it out."""
        clock, clocks, flags = self.clock, self.clocks, self.flags
        colder, hotter = self.colder, self.hotter
        for slot, queue in zip(used, numbers, strict=True):
            clock += 1
            clocks[slot] = clock & _TIME
            flag = flags[slot]
            if flag & LINKED:
                before, after = colder[slot], hotter[slot]
                hotter[before], colder[after] = after, before
            self.numbers[slot] = queue
            if flag & (PINNED | MEMBER) or self.children[slot]:
                flags[slot] = flag & ~QUEUED
                continue
            before = colder[queue]
            colder[slot], hotter[slot] = before, queue
            hotter[before] = colder[queue] = slot
            flags[slot] = flag & ~(PASSED | RETURNED) | LINKED
        self.clock = clock

    def put_first(self, slot: int) -> None:
        """A page was used before anything that is here: it becomes the coldest of its queue."""
        self._before -= 1
        self.clocks[slot] = self._before & _TIME
        queue = self.numbers[slot]
        hotter = self.hotter[queue]
        self.colder[slot], self.hotter[slot] = queue, hotter
        self.hotter[queue] = self.colder[hotter] = slot
        self.flags[slot] |= LINKED

    def unlink(self, slot: int) -> None:
        """Takes a page out of its queue, if it is there."""
        if self.flags[slot] & LINKED:
            colder, hotter = self.colder[slot], self.hotter[slot]
            self.hotter[colder], self.colder[hotter] = hotter, colder
        self.flags[slot] &= ~QUEUED

    def resume(self, slot: int) -> None:
        """Puts a page that is in no queue back to where its age belongs, unless something keeps it out."""
        if self.children[slot] or self.flags[slot] & (QUEUED | PINNED | PASSED | MEMBER):
            return
        queue, age = self.numbers[slot], self.age(slot)
        coldest, hottest = self.hotter[queue], self.colder[queue]
        if coldest == queue or self.age(coldest) <= age:
            colder, hotter = queue, coldest
        elif self.age(hottest) >= age:
            colder, hotter = hottest, queue
        else:
            self.flags[slot] |= RETURNED
            heapq.heappush(self._returned.setdefault(queue, []), (self.clock - age, slot))
            return
        self.colder[slot], self.hotter[slot] = colder, hotter
        self.hotter[colder] = self.colder[hotter] = slot
        self.flags[slot] |= LINKED

    def coldest(self, queue: int) -> int:
        """The coldest page of a queue, or NO_SLOT."""
        slot = self.hotter[queue]
        linked = slot if slot != queue else NO_SLOT
        returned = self._first_returned(queue) if queue in self._returned else NO_SLOT
        if linked and returned:
            return max(linked, returned, key=self.age)
        return linked or returned

    def _first_returned(self, queue: int) -> int:
        """The coldest page between the ends of a queue. The heap still has those that have left."""
        returned = self._returned[queue]
        while returned:
            clock, slot = returned[0]
            is_here = self.flags[slot] & RETURNED and self.numbers[slot] == queue
            if is_here and self.clocks[slot] == clock & _TIME:
                return slot
            heapq.heappop(returned)
        del self._returned[queue]
        return NO_SLOT

    # Chains

    def parent(self, slot: int) -> int:
        """The page before it in its chain, if that is still here; NO_SLOT if not."""
        parent = self.parents[slot]
        return parent if parent and self.generations[parent] == self.parent_generations[slot] else NO_SLOT

    def follow(self, slot: int, parent: int) -> None:
        """The page comes right after another one. It keeps the place where it was put first, and one that
        others come after already is put nowhere: so no chain can close to a ring."""
        if slot != parent and not self.children[slot] and not self.parent(slot):
            self.parents[slot], self.parent_generations[slot] = parent, self.generations[parent]
            self.children[parent] += 1
            self.unlink(parent)

    def last_first(self, slots: Sequence[int]) -> list[int]:
        """These slots in this order, but for each chain what comes later before what comes earlier."""
        among = dict.fromkeys(slots, 0)
        for slot in slots:
            if (parent := self.parent(slot)) in among:
                among[parent] += 1
        ordered = []
        for slot in slots:
            while slot in among and not among[slot]:
                ordered.append(slot)
                del among[slot]
                slot = self.parent(slot)
                if slot in among:
                    among[slot] -= 1
        return ordered

    # Groups

    def join(self, slot: int, leader: int) -> None:
        """The page leaves with another one from now on."""
        self.unlink(slot)
        self.group[slot] = self.group[leader] or leader
        self.group[leader] = slot
        self.clocks[slot] = self.clocks[leader]
        self.flags[slot] |= MEMBER

    def leader(self, slot: int) -> int:
        """The page that a page leaves with, or the page itself."""
        while self.flags[slot] & MEMBER:
            slot = self.group[slot]
        return slot

    def members(self, leader: int) -> list[int]:
        """Those who leave with a page."""
        members = []
        slot = self.group[leader]
        while slot and slot != leader:
            members.append(slot)
            slot = self.group[slot]
        return members

    def _part(self, slot: int) -> list[int]:
        """Takes a page out of its group; returns those who have lost their leader."""
        others = self.members(slot)
        if not others:
            return []
        if self.flags[slot] & MEMBER:
            self.group[others[-1]] = self.group[slot] if len(others) > 1 else NO_SLOT
            return []
        for other in others:
            self.group[other] = NO_SLOT
            self.flags[other] &= ~MEMBER
        return others
