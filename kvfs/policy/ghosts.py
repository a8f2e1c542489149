"""Pages that have left, remembered for a while: whether they come back is what the policy learns from.

A table of rows of eight places in plain arrays, 13 bytes a place. A key decides the row; in a full row the
ghost that came first makes room. Doubling the table copies it after itself: each ghost is then in two rows,
of which its key finds the right one, and the other place is free.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final, NamedTuple

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


class Ghosts:
    """Ghosts by their keys of 32 bits, of which 0 is none. About as many as fit; the oldest go first."""

    __slots__ = ("_clocks", "_keys", "_mask", "_next", "_numbers", "_shares", "_uses")

    def __init__(self) -> None:
        self._keys = array("I", bytes(4 * _LEAST))
        self._clocks = array("I", bytes(4 * _LEAST))
        self._numbers = array("H", bytes(2 * _LEAST))
        self._shares = array("H", bytes(2 * _LEAST))
        self._uses = bytearray(_LEAST)
        self._next = bytearray(_LEAST // _WAYS)
        """For each row, the place that makes room next."""
        self._mask = _LEAST // _WAYS - 1

    def __len__(self) -> int:
        """Places, taken or not."""
        return len(self._keys)

    def fit(self, pages: int) -> None:
        """Makes the table as large as suits a pool of so many pages. It never shrinks."""
        while 2 * len(self._keys) <= _MOST_FOR_A_PAGE * pages:
            for column in (self._keys, self._clocks, self._numbers, self._shares):
                column.extend(column[:])
            self._uses *= 2
            self._next *= 2
            self._mask = 2 * self._mask + 1

    def put(self, key: int, ghost: Ghost) -> Ghost | None:
        """Remembers a ghost; returns the one that made room for it, if any."""
        row = key & self._mask
        place = row * _WAYS + self._next[row]
        self._next[row] = (self._next[row] + 1) % _WAYS
        gone = self._at(place)
        self._keys[place] = key
        self._numbers[place], self._clocks[place], self._shares[place], self._uses[place] = ghost
        return gone

    def take(self, key: int) -> Ghost | None:
        """The ghost with this key, which is a ghost no more."""
        start = (key & self._mask) * _WAYS
        try:
            place = self._keys.index(key, start, start + _WAYS)
        except ValueError:
            return None
        ghost = self._at(place)
        self._keys[place] = 0
        return ghost

    def _at(self, place: int) -> Ghost | None:
        key = self._keys[place]
        if not key or key & self._mask != place // _WAYS:
            return None
        return Ghost(self._numbers[place], self._clocks[place], self._shares[place], self._uses[place])

    def sample(self, first: int, step: int) -> Iterator[tuple[int, int, int]]:
        """Every ``step``-th place's ghost, from the ``first`` on: its class, clock and share."""
        every = slice(first, None, step)
        columns = self._keys[every], self._numbers[every], self._clocks[every], self._shares[every]
        for place, key, number, clock, share in zip(range(first, len(self), step), *columns, strict=True):
            if key and key & self._mask == place // _WAYS:
                yield number, clock, share
