"""Pages in DRAM that the SSD has no copy of: those it is to have, and those it is not, each with the reason.

Pure: the caller gives the time, in seconds of any clock that only goes forward.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container
from itertools import chain, takewhile
from typing import Final

from kvfs.index import Entry

NOT_REUSED: Final = "not-reused"
"""Nobody has asked for the page since it was stored (``--ssd-write-policy reuse``)."""
COLD: Final = "cold"
"""The SSD is full, and all that it keeps is worth more."""
NOT_STORABLE: Final = "not-storable"
"""The SSD can never hold it: a name or attributes that do not fit there, or too large."""

_MARGIN = 1.0
"""Seconds by which a page is begun before its time is up, and twice what writing all that waits takes."""


class Unstored:
    """A page *settles* after it was sealed: its temporary gets the name that it is to keep. Then it *waits*
    for its copy, or is *left out*. What settles may still be left out, but counts as what waits."""

    def __init__(self, settle_seconds: float, delay_seconds: float) -> None:
        self.settle_seconds = settle_seconds
        self.delay_seconds = delay_seconds
        """Seconds after it was sealed within which a page is to have its copy."""
        self._settling: dict[Entry, float] = {}
        self._waiting: dict[Entry, float] = {}
        """When each was sealed. In that order, but that those that were refused come last."""
        self._left_out: dict[Entry, str] = {}
        self._bytes: Counter[str] = Counter()
        """By the reason; "" of those that settle or wait."""
        self._pages: Counter[str] = Counter()
        """Those that are left out, by the reason."""

    def __len__(self) -> int:
        """How many settle or wait."""
        return len(self._settling) + len(self._waiting)

    def __contains__(self, entry: Entry) -> bool:
        """Whether a page waits."""
        return entry in self._waiting

    @property
    def waiting_bytes(self) -> int:
        return self._bytes[""]

    @property
    def total_bytes(self) -> int:
        """Of all pages that are only in DRAM."""
        return sum(self._bytes.values())

    def oldest(self, now: float) -> float:
        """For how long a page has been without its copy at most; 0 where none settles or waits."""
        return now - min(chain(self._settling.values(), self._waiting.values()), default=now)

    def left_out(self) -> dict[str, dict[str, int]]:
        """By the reason, pages and bytes."""
        reasons = sorted(self._pages)
        return {one: {"pages": self._pages[one], "bytes": self._bytes[one]} for one in reasons}

    def is_left_out(self, entry: Entry, reason: str) -> bool:
        """Whether a page is left out, and for this reason."""
        return self._left_out.get(entry) == reason

    def has_left_out(self, reason: str) -> bool:
        """Whether any page is left out for this reason."""
        return self._pages[reason] > 0

    # What becomes of a page

    def sealed(self, entry: Entry, now: float) -> None:
        self.forget(entry)
        self._settling[entry] = now
        self._bytes[""] += entry.size

    def want(self, entry: Entry, since: float) -> None:
        """The page is to have its copy within the delay that began at ``since``."""
        self.forget(entry)
        self._waiting[entry] = since
        self._bytes[""] += entry.size

    def leave_out(self, entry: Entry, reason: str) -> None:
        self.forget(entry)
        self._left_out[entry] = reason
        self._bytes[reason] += entry.size
        self._pages[reason] += 1

    def forget(self, entry: Entry) -> None:
        """The page has its copy, is gone, or is written again; nothing happens where it is not here."""
        for times in (self._settling, self._waiting):
            if times.pop(entry, None) is not None:
                self._bytes[""] -= entry.size
                return
        if (reason := self._left_out.pop(entry, None)) is not None:
            self._bytes[reason] -= entry.size
            self._pages[reason] -= 1

    def state(self, entry: Entry) -> float | str | None:
        """Another one once the page was written again: when it was sealed, or why it is left out. None for
        what is no such page."""
        for times in (self._settling, self._waiting):
            if entry in times:
                return times[entry]
        return self._left_out.get(entry)

    def postpone(self, entry: Entry) -> None:
        """Its turn comes after that of all others that wait."""
        if entry in self._waiting:
            self._waiting[entry] = self._waiting.pop(entry)

    # What is to be done

    def settled(self, now: float) -> list[tuple[Entry, float]]:
        """Those that have settled, each with the time when it was sealed."""
        settled = takewhile(lambda one: one[1] + self.settle_seconds <= now, self._settling.items())
        return list(settled)

    def is_settling(self, entry: Entry) -> bool:
        return entry in self._settling

    def waiting(self) -> list[Entry]:
        """In the order in which they are to be written."""
        return list(self._waiting)

    def left_out_as(self, reason: str) -> set[Entry]:
        return {entry for entry, why in self._left_out.items() if why == reason}

    def first(self, but: Container[Entry]) -> Entry | None:
        """Which page is to be written next, but for some."""
        return next((entry for entry in self._waiting if entry not in but), None)

    def due(self, entry: Entry, bytes_per_second: float) -> float:
        """When writing a page that waits is to begin: so late that what is soon removed is not written, and
        so early that all others get their copies in time too."""
        since = self._waiting[entry]
        lead = _MARGIN + 2 * self.waiting_bytes / bytes_per_second
        return since + max(self.settle_seconds, self.delay_seconds - lead)

    def next_settled(self) -> float:
        """When the next page will have settled."""
        return next(iter(self._settling.values()), math.inf) + self.settle_seconds
