"""Pages that have left, remembered for a while: whether they come back is what the policy learns from.

A table of rows of eight places in plain columns, 13 bytes a place. A key decides the row; in a full row the
ghost that came first makes room.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, Literal, NamedTuple

_WAYS = 8
_LEAST = 1 << 14
"""Places that a table has at least: a small pool learns from more than it holds."""
_MOST_FOR_A_PAGE: Final = 4
"""Places for each page of the pool at most; at least half as many."""


class Ghost(NamedTuple):
    """What is remembered: the page's class, when it was last used, how many pages of its class its request
    had, and how often it was used."""

    number: int
    clock: int
    share: int
    uses: int


def _column(kind: Literal["B", "H", "I"], places: int) -> memoryview[int]:
    """Zeros that take no memory, and no time, before they are written. Not on hugepages: the first write to
    one of those takes milliseconds."""
    zeros = mmap.mmap(-1, places * array(kind).itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without hugepages
        zeros.madvise(mmap.MADV_NOHUGEPAGE)
    return memoryview(zeros).cast(kind)


class Ghosts:
    """Ghosts by their keys of 32 bits, of which 0 is none. About as many as fit; the oldest go first."""

    __slots__ = ("_clocks", "_keys", "_next", "_numbers", "_rows", "_shares", "_uses")

    def __init__(self) -> None:
        self._empty(_LEAST)

    def _empty(self, places: int) -> None:
        self._rows = places // _WAYS
        self._keys, self._clocks = _column("I", places), _column("I", places)
        self._numbers, self._shares = _column("H", places), _column("H", places)
        self._uses = _column("B", places)
        self._next = bytearray(self._rows)
        """For each row, the place that makes room next."""

    def __len__(self) -> int:
        """Places, taken or not."""
        return len(self._keys)

    def fit(self, pages: int) -> None:
        """Makes the table as large as suits a pool of so many pages; it never shrinks. A larger one begins
        empty: a pool grows before it is full, and has few ghosts by then."""
        places = len(self)
        while 2 * places <= _MOST_FOR_A_PAGE * pages:
            places *= 2
        if places > len(self):
            self._empty(places)

    def put(self, key: int, ghost: Ghost) -> Ghost | None:
        """Remembers a ghost; returns the one that made room for it, if any."""
        row = key % self._rows
        place = row * _WAYS + self._next[row]
        self._next[row] = (self._next[row] + 1) % _WAYS
        gone = self._at(place) if self._keys[place] else None
        self._keys[place] = key
        self._numbers[place], self._clocks[place], self._shares[place], self._uses[place] = ghost
        return gone

    def take(self, key: int) -> Ghost | None:
        """The ghost with this key, which is a ghost no more."""
        start = key % self._rows * _WAYS
        row = self._keys[start : start + _WAYS].tolist()
        if key not in row:
            return None
        place = start + row.index(key)
        self._keys[place] = 0
        return self._at(place)

    def _at(self, place: int) -> Ghost:
        return Ghost(self._numbers[place], self._clocks[place], self._shares[place], self._uses[place])

    def sample(self, first: int, step: int) -> Iterator[tuple[int, int, int]]:
        """Every ``step``-th place's ghost, from the ``first`` on: its class, clock and share."""
        for place in range(first, len(self), step):
            if self._keys[place]:
                yield self._numbers[place], self._clocks[place], self._shares[place]
