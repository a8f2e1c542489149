"""How pages are used: what the channel counted without asking the pool, and what the pool sees itself.

Hits and misses are for people; which pages were used together, and when, is for the policy and the SSD.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvfs.index import Directory, Entry

if TYPE_CHECKING:
    from kvfs.pool import Pool

STEP = 256
"""Pages of which the policy is told at once."""
MOST_OPENED = 1 << 14
"""So many opens may wait to be counted."""
MOST_STEPS = 256
"""So many times in a row the channel is asked for some hundred touches: later ones can wait."""


class Uses:
    """Belongs to the event loop."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._opened: list[Entry] = []
        """Pages of which the policy is still to be told."""

    # What the channel counted

    def collect(self) -> None:
        """Takes over all that the channel counted."""
        self.collect_misses()
        for _ in self.steps():
            pass

    def collect_misses(self) -> None:
        """Takes over what was looked for in vain."""
        for reason, count in zip(("absent", "evicted"), self._pool.face.take_misses(), strict=True):
            if count:
                self._pool.counters.misses[reason] += count

    def steps(self) -> Iterator[None]:
        """Takes over which pages were used together, in steps of milliseconds: others may run in between."""
        while self._opened:
            self._take_over_opened()
            yield
        for _ in range(MOST_STEPS):
            touched = self._pool.face.take_touched()
            if not touched:
                return
            self._take_over(touched)
            yield

    def _take_over(self, touched: list[tuple[int, int]]) -> None:
        used = []
        for number, opens in touched:
            entry = self._pool.index.by_number(number)
            if entry is None:  # they were of a page that is gone
                self._pool.counters.hits += opens
                continue
            used.append(entry)
            self._pool.idle.changed(entry)
            self._count_hits(entry, opens)
        self._use_together(used)

    def _use_together(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._pool.idle.touch(entry)
        policy = self._pool.policy
        policy.use_together([entry for entry in entries if entry in policy])

    # What the pool sees

    def note(self, entry: Entry, *, was_in_dram: bool = True) -> None:
        """A page was opened for reading. One that came to DRAM for that has been taken for used already."""
        self._count_hits(entry, 1)
        if was_in_dram and entry in self._pool.policy:
            self._pool.policy.touch(entry)

    def note_later(self, entries: Sequence[Entry]) -> None:
        """Pages were opened for reading by one request, whose client is not to wait for what that means."""
        self._opened.extend(entries)
        if len(self._opened) > MOST_OPENED:
            self.collect()

    def _take_over_opened(self) -> None:
        entries, self._opened = self._opened[:STEP], self._opened[STEP:]
        here = [entry for entry in entries if entry.parent is not None]
        for entry in here:
            self._count_hits(entry, 1)
        self._pool.counters.hits += len(entries) - len(here)  # of pages that are gone
        self._use_together(here)

    def _count_hits(self, entry: Entry, opens: int) -> None:
        """A page was opened for reading so often, which the next daemon is to know too."""
        self._pool.counters.hits += opens
        entry.hits += opens
        if self._pool.storage is not None:
            self._pool.storage.uses.note(entry, time.time_ns())
            self._pool.storage.demotions.touched(entry)
        if entry.holding is not None and entry.holding.backing_id <= 0:
            # The kernel may have the bytes, and then reads nothing: this sets the access time in its place.
            os.pread(entry.holding.read_fd, 1, 0)

    def count_miss(self, entry: Entry, reason: str) -> None:
        """A page turned out not to be what it should be, and is about to go."""
        self._pool.counters.misses[reason] += 1
        self.note_gone(entry, evicted=False)

    def note_missed(self, path: bytes, task: int) -> None:
        """A task asked, otherwise than through the kernel, for a page that is not there. What has the name
        may be a draft."""
        directory, _, name = path.rpartition(b"/")
        parent = self._pool.index.find(directory)
        if isinstance(parent, Directory) and name not in parent.children:
            self._pool.face.name_searched(parent.number, name, task)
        else:
            self._pool.counters.misses["absent"] += 1

    def note_gone(self, entry: Entry, *, evicted: bool) -> None:
        """A page is about to go: whoever looks for it next misses one that was evicted, or one that was
        counted already."""
        for parent, name in entry.names():
            self._pool.face.name_gone(parent.number, name, evicted)
