"""When and from what is learned: pages that are used again, that come back, and that do not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count, islice

from kvfs.policy.classes import MOST_USES
from kvfs.policy.ghosts import Ghost, Ghosts
from kvfs.policy.hazards import Hazards
from kvfs.policy.slots import NEAR_END, AnyPage, Slots

MEMORY = 64
"""How many times all pages must have been used until evidence counts a third."""
LEAST_BETWEEN_FITS = 1024
"""Uses of pages. Fits take milliseconds, and so few uses teach little."""
NEW_EVIDENCE = 20
"""There is a fit when one part in so many of the evidence is new."""
SAMPLE = 1 << 14
"""A fit looks at about so many of the pages, and of the ghosts, whose future is not known yet."""
AT_ONCE = 256
"""It looks at so many in one step: nobody is to wait for it for a millisecond."""
BETWEEN_STEPS = 8
"""Uses of pages between two steps of a fit."""
MOST_STEPS = 2
"""Steps at once, however many pages are used at once."""
_SPREAD = 0x9E3779B97F4A7C15
"""Makes of any keys some whose bits are all different."""
_NEAR_END = 128
"""Beside the uses of a ghost: the request that used it last ended with it or with the next page."""


def _spread(key: int) -> int:
    """A ghost's key: 32 bits, not all of them 0."""
    return (key * _SPREAD >> 32) & 0xFFFFFFFF or 1


class Learner:
    """Watches pages and fits the hazards to what became of them."""

    __slots__ = ("_fits", "_ghosts", "_pages", "_slots", "_until_fit", "_until_step", "hazards")

    def __init__(self, slots: Slots[AnyPage]) -> None:
        self.hazards = Hazards()
        self._slots = slots
        self._ghosts = Ghosts()
        self._until_fit = LEAST_BETWEEN_FITS
        self._until_step = 0
        self._pages = 0
        self._fits = self._fit_for_ever()

    def entered(self, slot: int, key: int) -> bool:
        """A page came in, which is known by any number ``key``; returns whether it came back, and then gives
        it what was known of it."""
        slots = self._slots
        ghost = self._ghosts.take(_spread(key))
        if ghost is None:
            return False
        self.hazards.used(ghost.number, slots.age_of(ghost.clock), 1 / ghost.share)
        slots.uses[slot] = ghost.uses & MOST_USES
        if not ghost.uses & _NEAR_END:
            slots.flags[slot] &= ~NEAR_END
        return True

    def used(self, slot: int) -> None:
        """A page is used again; to be told before that changes its time and its class."""
        slots = self._slots
        if slots.shares[slot]:
            self.hazards.used(slots.numbers[slot], slots.age(slot), 1 / slots.shares[slot])

    def evicted(self, slot: int, key: int) -> None:
        """A page is about to leave, for want of room."""
        slots = self._slots
        if not slots.shares[slot]:
            return
        uses = slots.uses[slot] | (_NEAR_END if slots.flags[slot] & NEAR_END else 0)
        gone = self._ghosts.put(
            _spread(key), Ghost(slots.numbers[slot], slots.clocks[slot], slots.shares[slot], uses)
        )
        if gone is not None:
            self.hazards.ended(gone.number, slots.age_of(gone.clock), 1 / gone.share)

    def went_by(self, uses: int, pages: int) -> None:
        """So many uses went by, and there are so many pages: fits if it is time to, a little each time."""
        self._pages = pages
        self._until_fit -= uses
        if self._until_fit > 0:
            return
        self._until_step -= uses
        for _ in range(MOST_STEPS):
            if self._until_step > 0:
                return
            self._until_step += BETWEEN_STEPS
            next(self._fits)
        self._until_step = 0

    def _fit_for_ever(self) -> Iterator[None]:
        """Fits to what became of pages, and to every so many pages and ghosts, each standing for those
        between."""
        slots, last = self._slots, 0
        for number in count(1):
            self._ghosts.fit(self._pages)
            step = max(1, self._pages // SAMPLE)
            pages = slots.sample(number % step, step)
            while some := list(islice(pages, AT_ONCE)):
                self.hazards.watch(some)
                yield
            step = max(1, len(self._ghosts) // SAMPLE)
            ghosts = self._ghosts.sample(number % step, step)
            while gone := list(islice(ghosts, AT_ONCE)):
                self.hazards.watch((one, slots.age_of(clock), step / share) for one, clock, share in gone)
                yield
            now, turnover = slots.clock, MEMORY * max(self._pages, 1)
            yield from self.hazards.fit(math.exp((last - now) / turnover))
            last = now
            self._until_fit = max(LEAST_BETWEEN_FITS, min(now, turnover) // NEW_EVIDENCE)
            yield
