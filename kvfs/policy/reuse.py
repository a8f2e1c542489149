"""The default policy: the page leaves first that is worth least, by what was learned of pages like it.

docs/policy.md tells how it works. Pure: no clock and no I/O; not safe for use by several threads at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
from kvfs.policy.learning import Learner
from kvfs.policy.slots import (
    BRANCHED,
    MEMBER,
    NEAR_END,
    NO_SLOT,
    ORPHANS,
    PINNED,
    PROTECTED,
    SMALL_QUEUE,
    AnyPage,
    Slots,
)
from kvfs.policy.victims import Victims

_PLAIN = unused_class(PLAIN, 0)
_IN_CHAIN = unused_class(KNOWN, 0)

GRACE = 16
"""Of so many pages one may be new and leaves after all others: who stores a page expects to find it."""


@dataclass(frozen=True, slots=True)
class PolicyStatistics:
    """What an order holds: pages, their bytes, and those that are protected."""

    pages: int
    bytes: int
    protected_bytes: int


class ExpectedReuse(Generic[AnyPage]):
    """Orders pages by the uses that they can be expected to have for the time that they take up room.

    ``key_of`` gives any number by which a page is known again when it comes back after it was evicted; it is
    asked when a page comes in and when it is evicted. Without it, nothing is learned of what comes back.
    Pages that were used again since they were made may hold ``protected_percent`` of the bytes; beyond that
    they leave first.
    """

    __slots__ = (
        "_bytes", "_key_of", "_large", "_learner", "_pinned", "_protected_bytes", "_slots",
        "_small", "protected_percent",
    )  # fmt: skip

    def __init__(
        self,
        *,
        key_of: Callable[[AnyPage], int] | None = None,
        protected_percent: float = 90.0,
    ) -> None:
        self.protected_percent = protected_percent
        self._key_of = key_of
        self._slots: Slots[AnyPage] = Slots()
        self._learner = Learner(self._slots)
        self._pinned: dict[int, None] = {}
        self._large = self._small = 0
        self._bytes = self._protected_bytes = 0

    def __len__(self) -> int:
        return self._large + self._small

    def __contains__(self, page: AnyPage) -> bool:
        return self._slots.slot(page) != NO_SLOT

    def statistics(self) -> PolicyStatistics:
        return PolicyStatistics(len(self), self._bytes, self._protected_bytes)

    def uses(self, page: AnyPage) -> int:
        """How often a page was used, as far as that is remembered: 1 when it is new; 127 stands for more."""
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
        if after is None:
            self._use_alone(self._meet(page)[0])
        else:
            self.use((page,), after=after)

    def touch(self, page: AnyPage) -> None:
        """The page was used, as far as one knows alone. Raises ValueError when it is not here."""
        slot = self._require(page)
        self._learner.used(slot)
        self._use_alone(slot)

    def use(self, pages: Sequence[AnyPage], *, after: AnyPage | None = None) -> None:
        """One request used these pages: a chain, its head first. Those that are not here come in.

        ``after`` is the page before the first, when a request goes on: it has used that page and what comes
        before it, and was told of.
        """
        chain = [] if after is None else self._continued(after)
        continued = known = len(chain)
        for page in pages:
            slot, is_known = self._meet(page)
            if self._use_apart(slot):
                continue
            if is_known and known == len(chain):
                known += 1
            chain.append(slot)
        if len(chain) == 1:
            self._use_alone(chain[0])
        elif chain:
            self._use_chain(chain, continued, known)

    def use_together(self, pages: Sequence[AnyPage]) -> None:
        """Pages were used within a short time, by who knows whom; new ones were made in this order.

        What was made later, and what was used less often, is taken to come later in a chain: it leaves
        earlier.
        """
        slots = self._slots
        new: list[int] = []
        old: list[int] = []
        for page in pages:
            is_here = page in self
            slot, _ = self._meet(page)
            if not self._use_apart(slot):
                (old if is_here else new).append(slot)
        old.sort(key=lambda slot: (slots.uses[slot], -slots.age(slot)))
        together = [*reversed(new), *old]
        if together:
            self._place(together, [self._class_alone(slot) for slot in together])

    def restore(self, pages: Sequence[tuple[AnyPage, int]]) -> None:
        """Takes in what an earlier daemon had, the coldest page first, each with its hits. All of them become
        colder than what is here already. Raises ValueError for one that is."""
        slots = self._slots
        for page, hits in reversed(pages):
            if page in self:
                raise ValueError("the page is in the order already")
            slot, _ = self._meet(page)
            slots.uses[slot] = min(hits + 1, MOST_USES)
            if slots.numbers[slot] != SMALL_QUEUE:
                slots.numbers[slot] = _PLAIN + STEP * USES_STEP[slots.uses[slot]]
                slots.shares[slot] = 1
                self._protect(slot)
            slots.put_first(slot)

    def attach(self, page: AnyPage, leader: AnyPage) -> None:
        """Takes a page in that leaves together with another one; what uses that one uses it too."""
        leading = self._slots.leader(self._require(leader))
        slot, _ = self._meet(page)
        self._slots.uses[slot] = 1
        self._slots.join(slot, leading)

    def _meet(self, page: AnyPage) -> tuple[int, bool]:
        """The slot of a page that is used now, which comes in if it is not here; and whether it was seen
        before."""
        slots = self._slots
        slot = slots.slot(page)
        if slot:
            self._learner.used(slot)
            return slot, True
        slot = slots.enter(page)
        self._bytes += slots.sizes[slot]
        if slots.sizes[slot] < SMALL:
            self._small += 1
            slots.numbers[slot] = SMALL_QUEUE
            return slot, False
        self._large += 1
        return slot, self._key_of is not None and self._learner.entered(slot, self._key_of(page))

    def _continued(self, page: AnyPage) -> list[int]:
        """The pages that the request which used this one last has used, up to it, the head first."""
        slots = self._slots
        slot = slots.leader(slots.slot(page))
        chain = []
        while slot and slots.shares[slot]:
            chain.append(slot)
            parent = slots.parent(slot)
            if not parent or slots.age(slot) - slots.age(parent) != 1:
                break
            slot = parent
        chain.reverse()
        return chain

    def _use_apart(self, slot: int) -> bool:
        """Whether a page has no part in chains: a small one, or one that leaves with another. It is used."""
        slots = self._slots
        is_small = slots.sizes[slot] < SMALL
        is_member = bool(slots.flags[slot] & MEMBER)
        if is_small or is_member:
            self._count(slot)
        if is_small and not is_member:
            slots.renew((slot,), (SMALL_QUEUE,))
        return is_small or is_member

    def _count(self, slot: int) -> int:
        uses = self._slots.uses[slot] = min(self._slots.uses[slot] + 1, MOST_USES)
        return uses

    def _class_alone(self, slot: int) -> int:
        """The class of a page that is used now, by nobody knows what request."""
        slots = self._slots
        is_in_chain = slots.children[slot] or slots.parent(slot)
        return (_IN_CHAIN if is_in_chain else _PLAIN) + STEP * USES_STEP[self._count(slot)]

    def _use_alone(self, slot: int) -> None:
        if not self._use_apart(slot):
            self._place((slot,), (self._class_alone(slot),))

    def _use_chain(self, chain: list[int], continued: int, known: int) -> None:
        """Gives the pages of a request their classes. Of the first ``continued`` was told before, and the
        first ``known`` were seen before."""
        slots, flags = self._slots, self._slots.flags
        new = len(chain) - known
        tail = chain[known - 1] if known else NO_SLOT
        if known == continued:
            goes_on = known > 0 and not flags[tail] & BRANCHED
        else:
            goes_on = bool(flags[tail] & NEAR_END)
        if goes_on or not new:
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
        numbers[-1] = unused_class(LAST, new)
        for slot in chain:
            flags[slot] &= ~(NEAR_END | BRANCHED)
        for slot in chain[-2:]:
            flags[slot] |= NEAR_END
        if not goes_on and not new:
            flags[chain[-1]] |= BRANCHED
        chain.reverse()
        numbers.reverse()
        self._place(chain, numbers)

    def _place(self, used: Sequence[int], numbers: Sequence[int]) -> None:
        """Puts the pages that a request used into the queues of their classes, the coldest first."""
        slots = self._slots
        slots.renew(used, numbers)
        shares = Counter(numbers) if len(numbers) > 1 else {numbers[0]: 1}
        for slot, number in zip(used, numbers, strict=True):
            slots.shares[slot] = min(shares[number], 0xFFFF)
            if IS_PROTECTED[number] != bool(slots.flags[slot] & PROTECTED):
                self._protect(slot)
        self._learner.went_by(len(used), self._large)

    def _protect(self, slot: int) -> None:
        """Counts a page as protected if its class says so."""
        slots = self._slots
        if slots.flags[slot] & PROTECTED:
            self._protected_bytes -= slots.sizes[slot]
            slots.flags[slot] &= ~PROTECTED
        if IS_PROTECTED[slots.numbers[slot]]:
            self._protected_bytes += slots.sizes[slot]
            slots.flags[slot] |= PROTECTED

    # Pages leave

    def remove(self, page: AnyPage, *, evicted: bool = False) -> None:
        """Forgets a page; one that was ``evicted`` is known again when it comes back. Raises ValueError when
        it is not here."""
        slots = self._slots
        slot = self._require(page)
        if evicted and self._key_of is not None:
            self._learner.evicted(slot, self._key_of(page))
        size = slots.sizes[slot]
        self._bytes -= size
        if size < SMALL:
            self._small -= 1
        else:
            self._large -= 1
        if slots.flags[slot] & PROTECTED:
            self._protected_bytes -= size
        self._pinned.pop(slot, None)
        slots.leave(slot)

    def victims(self) -> Iterator[AnyPage]:
        """The pages in the order in which they should leave: those whose group has left, those that are worth
        least, small ones, and in the end what comes in a chain before pages that stay.

        What the caller neither removes nor uses is passed over, and with it what comes before it in its
        chain. Between two steps anything may happen to the order; what is used after the start is not given.
        """
        slots = self._slots
        look = Victims(slots, self._learner.hazards, self._large // GRACE)
        try:
            while slot := look.next_of(ORPHANS):
                yield from self._give(look, slot)
            while slot := look.next(self._is_over()):
                yield from self._give(look, slot)
            while slot := look.next_of(SMALL_QUEUE):
                yield from self._give(look, slot)
            for slot in look.held(self._pinned):
                yield from self._give(look, slot)
        finally:
            look.end()

    def _is_over(self) -> bool:
        return 100 * self._protected_bytes > self.protected_percent * self._bytes

    def _give(self, look: Victims[AnyPage], slot: int) -> Iterator[AnyPage]:
        """A page and those that leave with it."""
        slots = self._slots
        given = look.begin(slot)
        for member in (*slots.members(slot), slot):
            page = slots.pages[member]
            if page is not None:
                yield page
        look.finish(given)

    # What is said of single pages

    def pin(self, page: AnyPage) -> None:
        """Keeps a page here until it is unpinned or removed; how many may be is for the caller to say."""
        slots = self._slots
        slot = self._require(page)
        self._pinned[slot] = None
        slots.unlink(slot)
        slots.flags[slot] |= PINNED

    def unpin(self, page: AnyPage) -> None:
        """Takes a pin back, if there is one."""
        slots = self._slots
        slot = self._require(page)
        self._pinned.pop(slot, None)
        slots.flags[slot] &= ~PINNED
        slots.resume(slot)
