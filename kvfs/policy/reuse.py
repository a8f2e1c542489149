"""The default policy: the page leaves first that is worth least, by what was learned of pages like it.

docs/policy.md tells how it works. Pure: no clock and no I/O; not safe for use by several threads at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic

from kvfs.policy.classes import (
    BRANCH,
    CONTINUED,
    IS_PROTECTED,
    KNOWN,
    LAST,
    MANY_USES,
    MOST_USES,
    PLAIN,
    ROOT,
    SHARED,
    SMALL,
    STEP,
    USES_STEP,
    unused_class,
)
from kvfs.policy.ghosts import Ghost, Ghosts
from kvfs.policy.hazards import Hazards, Watched
from kvfs.policy.pins import Deadlines, Pins
from kvfs.policy.slots import (
    BRANCHED,
    MEMBER,
    NEAR_END,
    NO_SLOT,
    PINNED,
    PROTECTED,
    QUEUES,
    SMALL_QUEUE,
    AnyPage,
    Slots,
)
from kvfs.policy.victims import Victims

MEMORY = 64
"""How many times all pages must have been used until evidence counts a third."""
LEAST_BETWEEN_FITS = 1024
"""Uses of pages. Fits take milliseconds, and so few uses teach little."""
NEW_EVIDENCE = 20
"""There is a fit when this part of the evidence is new."""
SAMPLE = 4096
"""Of the pages whose future is not known yet, and of the ghosts, a fit looks at about so many."""
_ENDED = 128
_SPREAD = 0x9E3779B97F4A7C15
"""Makes of any keys some whose bits are all different."""


@dataclass(frozen=True, slots=True)
class PolicyStatistics:
    """What an order holds: pages, their bytes, and those that are protected, pinned or have a deadline."""

    pages: int
    bytes: int
    protected_bytes: int
    pinned: int
    pinned_bytes: int
    deadlines: int


class ExpectedReuse(Generic[AnyPage]):
    """Orders pages by the uses that they can be expected to have for the time that they take up room.

    ``key_of`` gives any number by which a page is known again when it comes back after it was evicted; without
    it, nothing is learned of what happens after that. Pages that were used again since they were made may hold
    ``protected_percent`` of the bytes before they leave first. ``pin_budget`` is in bytes.
    """

    __slots__ = (
        "_bytes", "_deadlines", "_ghosts", "_hazards", "_key_of", "_large", "_orphans", "_pins",
        "_protected_bytes", "_samples", "_slots", "_small", "_until_fit", "protected_percent",
    )  # fmt: skip

    def __init__(
        self,
        *,
        key_of: Callable[[AnyPage], int] | None = None,
        protected_percent: float = 100.0,
        pin_budget: int = 0,
    ) -> None:
        self.protected_percent = protected_percent
        self._key_of = key_of
        self._slots: Slots[AnyPage] = Slots()
        self._ghosts = Ghosts()
        self._hazards = Hazards()
        self._pins = Pins(pin_budget)
        self._deadlines = Deadlines()
        self._orphans: dict[int, None] = {}
        """Pages whose group has left without them: the next to leave."""
        self._large = self._small = 0
        self._bytes = self._protected_bytes = 0
        self._until_fit = LEAST_BETWEEN_FITS
        self._samples = 0

    def __len__(self) -> int:
        return self._large + self._small

    def __contains__(self, page: AnyPage) -> bool:
        return self._slots.slot(page) != NO_SLOT

    def statistics(self) -> PolicyStatistics:
        return PolicyStatistics(
            len(self),
            self._bytes,
            self._protected_bytes,
            len(self._pins),
            self._pins.bytes,
            len(self._deadlines),
        )

    def uses(self, page: AnyPage) -> int:
        """How often the page was used, as far as that is remembered: 1 when it is new. 127 stands for more."""
        return self._slots.uses[self._require(page)]

    def _require(self, page: AnyPage) -> int:
        slot = self._slots.slot(page)
        if not slot:
            raise ValueError("the page is not in the order")
        return slot

    # Pages come and are used

    def add(self, page: AnyPage, *, after: AnyPage | None = None) -> None:
        """Takes a page in, used now; ``after`` is the page before it in its chain. Raises ValueError when it
        is here already."""
        if self._slots.slot(page):
            raise ValueError("the page is in the order already")
        self.use((page,), after=after)

    def touch(self, page: AnyPage) -> None:
        """The page was used, as far as one knows alone. Raises ValueError when it is not here."""
        self._require(page)
        self.use((page,))

    def use(self, pages: Sequence[AnyPage], *, after: AnyPage | None = None) -> None:
        """One request used these pages: a chain, its head first. Those that are not here come in.

        ``after`` is the page before the first, if a request goes on that has used that one before, or comes
        out with new pages.
        """
        chain = [] if after is None else self._continued(after)
        continued = known = len(chain)
        for page in pages:
            slot = self._slots.slot(page)
            if not slot:
                seen = self._enter(page)
                slot = page.number + QUEUES
            else:
                seen = True
                self._observe(slot)
            if self._slots.numbers[slot] == SMALL_QUEUE or self._slots.flags[slot] & MEMBER:
                self._use_apart(slot)
                continue
            if seen and known == len(chain):
                known += 1
            chain.append(slot)
        if chain:
            self._use_chain(chain, continued, known)

    def use_together(self, pages: Sequence[AnyPage]) -> None:
        """Pages were used within a short time by who knows whom: new ones in this order, as far as one knows.

        What came later is taken to come later in a chain, so it leaves earlier.
        """
        slots = self._slots
        new, old = [], []
        for page in pages:
            slot = slots.slot(page)
            if slot:
                self._observe(slot)
                old.append(slot)
            else:
                self._enter(page)
                new.append(page.number + QUEUES)
        old.sort(key=lambda slot: (slots.uses[slot], -slots.age(slot)))
        together = []
        for slot in (*reversed(new), *old):
            if slots.numbers[slot] == SMALL_QUEUE or slots.flags[slot] & MEMBER:
                self._use_apart(slot)
            else:
                together.append(slot)
        first = unused_class(PLAIN, len(together))
        self._place(together, [first + STEP * USES_STEP[self._count(slot)] for slot in together])

    def restore(self, pages: Iterable[tuple[AnyPage, int]]) -> None:
        """Takes in what an earlier daemon had: the coldest page first, each with its hits."""
        for page, hits in pages:
            slot = self._slots.enter(page)
            self._account(slot)
            self._slots.uses[slot] = min(hits, MOST_USES - 1)
            if self._slots.numbers[slot] == SMALL_QUEUE:
                self._use_apart(slot)
            else:
                self._place([slot], [unused_class(PLAIN, 1) + STEP * USES_STEP[self._count(slot)]])

    def attach(self, page: AnyPage, leader: AnyPage) -> None:
        """Takes a page in that leaves together with another one, of whose uses it has part."""
        slots = self._slots
        leading = self._require(leader)
        slot = slots.enter(page)
        self._account(slot)
        slots.uses[slot] = 1
        slots.join(slot, leading)
        slots.renew((slot,), (slots.numbers[slot],))

    def _continued(self, page: AnyPage) -> list[int]:
        """The pages that the request which used this one last has used, up to it, the head first."""
        slots = self._slots
        slot = slots.slot(page)
        chain = []
        while slot and slots.numbers[slot] != SMALL_QUEUE and not slots.flags[slot] & MEMBER:
            chain.append(slot)
            parent = slots.parent(slot)
            if not parent or slots.age(slot) - slots.age(parent) != 1:
                break
            slot = parent
        chain.reverse()
        return chain

    def _enter(self, page: AnyPage) -> bool:
        """Takes a page in; returns whether it comes back."""
        slots = self._slots
        slot = slots.enter(page)
        self._account(slot)
        if self._key_of is None or slots.numbers[slot] == SMALL_QUEUE:
            return False
        key = slots.keys[slot] = (self._key_of(page) * _SPREAD >> 32) & 0xFFFFFFFF or 1
        ghost = self._ghosts.take(key)
        if ghost is None:
            return False
        age = slots.age_of(ghost.clock)
        self._hazards.used(ghost.number, age, 1 / ghost.share)
        slots.uses[slot] = ghost.uses & MOST_USES
        if ghost.uses & _ENDED:
            slots.flags[slot] |= NEAR_END
        return True

    def _account(self, slot: int) -> None:
        self._bytes += self._slots.sizes[slot]
        if self._slots.sizes[slot] < SMALL:
            self._small += 1
            self._slots.numbers[slot] = SMALL_QUEUE
        else:
            self._large += 1
            self._slots.numbers[slot] = unused_class(PLAIN, 1)

    def _observe(self, slot: int) -> None:
        slots = self._slots
        if slots.shares[slot]:
            self._hazards.used(slots.numbers[slot], slots.age(slot), 1 / slots.shares[slot])

    def _count(self, slot: int) -> int:
        uses = self._slots.uses[slot] = min(self._slots.uses[slot] + 1, MOST_USES)
        return uses

    def _use_apart(self, slot: int) -> None:
        """A small page is used, or one that leaves with another."""
        self._count(slot)
        if self._slots.numbers[slot] == SMALL_QUEUE:
            self._orphans.pop(slot, None)
            self._slots.renew((slot,), (SMALL_QUEUE,))

    def _use_chain(self, chain: list[int], continued: int, known: int) -> None:
        """Gives the pages of a request their classes, of which the first ``continued`` were told of before
        and the first ``known`` were seen before."""
        slots, flags = self._slots, self._slots.flags
        new = len(chain) - known
        ends = True
        if known:
            tail = chain[known - 1]
            ends = not flags[tail] & BRANCHED if known == continued else bool(flags[tail] & NEAR_END)
        is_alone = len(chain) == 1
        if is_alone and (known == 0 or not (slots.children[chain[0]] or slots.parent(chain[0]))):
            of_known = of_new = PLAIN
        elif ends and known or not new:
            of_known, of_new = KNOWN, CONTINUED
        elif not known or slots.uses[tail] >= MANY_USES:
            of_known, of_new = SHARED, ROOT
        else:
            of_known, of_new = SHARED, BRANCH
        first_known, first_new = unused_class(of_known, new), unused_class(of_new, new)
        numbers = []
        for place, slot in enumerate(chain):
            uses = slots.uses[slot] if place < continued else self._count(slot)
            numbers.append((first_known if place < known else first_new) + STEP * USES_STEP[uses])
        for earlier, later in pairwise(chain):
            slots.follow(later, earlier)
        if is_alone:
            if known == 0:
                flags[chain[0]] |= NEAR_END
        else:
            numbers[-1] = unused_class(LAST, new)
            for slot in chain:
                flags[slot] &= ~(NEAR_END | BRANCHED)
            for slot in chain[-2:]:
                flags[slot] |= NEAR_END
            if not ends and not new:
                flags[chain[-1]] |= BRANCHED
        chain.reverse()
        numbers.reverse()
        self._place(chain, numbers)

    def _place(self, used: Sequence[int], numbers: Sequence[int]) -> None:
        """Puts pages that one request used into the queues of their classes; the first becomes the coldest."""
        slots = self._slots
        slots.renew(used, numbers)
        shares = Counter(numbers)
        for slot, number in zip(used, numbers, strict=True):
            slots.shares[slot] = min(shares[number], 0xFFFF)
            if IS_PROTECTED[number] != bool(slots.flags[slot] & PROTECTED):
                self._protect(slot)
        if self._orphans:
            for slot in used:
                self._orphans.pop(slot, None)
        self._until_fit -= len(used)
        if self._until_fit <= 0:
            self._learn()

    def _protect(self, slot: int) -> None:
        """Counts the page as protected, or no more."""
        slots = self._slots
        slots.flags[slot] ^= PROTECTED
        self._protected_bytes += slots.sizes[slot] if slots.flags[slot] & PROTECTED else -slots.sizes[slot]

    # Pages leave

    def remove(self, page: AnyPage, *, evicted: bool = False) -> None:
        """Forgets a page; one that was ``evicted`` is remembered by its key. Raises ValueError when it is not
        here."""
        slots = self._slots
        slot = self._require(page)
        is_small = slots.numbers[slot] == SMALL_QUEUE
        if evicted and slots.keys[slot] and slots.shares[slot]:
            gone = self._ghosts.put(
                slots.keys[slot],
                Ghost(
                    slots.numbers[slot],
                    slots.clocks[slot],
                    slots.shares[slot],
                    slots.uses[slot] | (_ENDED if slots.flags[slot] & NEAR_END else 0),
                ),
            )
            if gone is not None:
                self._hazards.ended(gone.number, slots.age_of(gone.clock), 1 / gone.share)
        self._bytes -= slots.sizes[slot]
        if is_small:
            self._small -= 1
        else:
            self._large -= 1
        if slots.flags[slot] & PROTECTED:
            self._protect(slot)
        self._pins.discard(slot)
        self._deadlines.discard(slot)
        self._orphans.pop(slot, None)
        self._orphans.update(dict.fromkeys(slots.part(slot)))
        slots.leave(slot)

    def victims(self, now: float | None = None) -> Iterator[AnyPage]:
        """The pages in the order in which they should leave: of what is over by the caller's clock ``now``,
        then what is worth least, small ones after all others, and last what stands before pages that stay.

        What the caller neither removes nor uses is passed over, and what comes before it in its chain with it.
        Between two steps anything may happen to the order; what is used after the start is not given.
        """
        if now is not None:
            yield from self.expired(now)
        for slot in list(self._orphans):
            page = self._slots.pages[slot]
            if slot in self._orphans and page is not None and not self._slots.flags[slot] & PINNED:
                yield page
        look = Victims(self._slots, self._hazards)
        try:
            while slot := look.next(self._is_over()):
                yield from self._give(look, slot)
            while slot := look.next_small():
                yield from self._give(look, slot)
            start = self._slots.clock
            for slot in look.held():
                if self._slots.pages[slot] is not None and self._slots.age(slot) >= self._slots.age_of(start):
                    yield from self._group(slot)
        finally:
            look.end()

    def _is_over(self) -> bool:
        return 100 * self._protected_bytes > self.protected_percent * self._bytes

    def _give(self, look: Victims, slot: int) -> Iterator[AnyPage]:
        clock, parent = self._slots.clocks[slot], self._slots.parent(slot)
        yield from self._group(slot)
        look.went_on(slot, clock, parent)

    def _group(self, slot: int) -> Iterator[AnyPage]:
        """A page and those that leave with it."""
        slots = self._slots
        for member in (*slots.members(slot), slot):
            page = slots.pages[member]
            if page is not None:
                yield page

    # What single pages are given

    def pin(self, page: AnyPage) -> None:
        """Keeps a page here until it is unpinned or removed. Raises OutOfRoom beyond the budget."""
        slots = self._slots
        slot = self._require(page)
        self._pins.add(slot, slots.sizes[slot])
        slots.unlink(slot)
        slots.flags[slot] |= PINNED

    def unpin(self, page: AnyPage) -> None:
        slots = self._slots
        slot = self._require(page)
        self._pins.discard(slot)
        slots.flags[slot] &= ~PINNED
        if not slots.children[slot]:
            slots.resume(slot)

    def expire(self, page: AnyPage, deadline: float | None) -> None:
        """Has a page leave before all others once the caller's clock shows ``deadline``; None takes it back."""
        slot = self._require(page)
        if deadline is None:
            self._deadlines.discard(slot)
        else:
            self._deadlines.set(slot, deadline)

    def expired(self, now: float) -> Iterator[AnyPage]:
        """The pages whose deadline has come, the earliest first, but for pinned ones."""
        for slot in self._deadlines.due(now):
            page = self._slots.pages[slot]
            if page is not None and not self._slots.flags[slot] & PINNED:
                yield page

    # Learning

    def _learn(self) -> None:
        slots = self._slots
        self._ghosts.fit(self._large)
        remembered = math.exp(-self._interval() / (MEMORY * max(self._large, 1)))
        self._hazards.fit(self._sample(), remembered)
        self._until_fit = self._interval()

    def _interval(self) -> int:
        """Uses of pages between two fits."""
        return max(LEAST_BETWEEN_FITS, min(self._slots.clock, MEMORY * self._large) // NEW_EVIDENCE)

    def _sample(self) -> Iterator[Watched]:
        """Every so many pages and ghosts, each standing for those between."""
        self._samples += 1
        step = max(1, self._large // SAMPLE)
        yield from self._slots.sample(self._samples % step, step)
        step = max(1, len(self._ghosts) // SAMPLE)
        for number, clock, share in self._ghosts.sample(self._samples % step, step):
            yield number, self._slots.age_of(clock), step / share
