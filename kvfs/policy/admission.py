"""What the SSD admits: every page, or only those that were touched twice. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Final, Literal

WritePolicy = Literal["all", "reuse"]

PLACES: Final = 1 << 18
"""Keys that can be remembered, in 4 bytes each: two for a page."""
_WAYS = 4


class History:
    """Keys of pages that were stored once, for a while: about as many as there are places; beyond, one of the
    four that share a row makes room. A key is any number of 64 bits that is spread well."""

    __slots__ = ("_keys", "_next", "_rows")

    def __init__(self, places: int = PLACES) -> None:
        self._rows = max(1, places // _WAYS)
        self._keys = array("I", bytes(4 * _WAYS * self._rows))
        self._next = bytearray(self._rows)

    def note(self, key: int) -> bool:
        """Remembers a key; returns whether it was known."""
        row, key = key % self._rows, (key >> 32) or 1
        start = row * _WAYS
        if key in self._keys[start : start + _WAYS]:
            return True
        self._keys[start + self._next[row]] = key
        self._next[row] = (self._next[row] + 1) % _WAYS
        return False


class Admission:
    """Decides for each page once, when it has the name that it is to keep."""

    def __init__(self, policy: WritePolicy = "all") -> None:
        self.policy: Final = policy
        self._history = History(PLACES if policy == "reuse" else 0)

    def admits(self, keys: Iterable[int], hits: int) -> bool:
        """Whether a page is wanted on the SSD that was read so often, and of which one knows again another
        one by these keys: its name, its bytes. What is not, is when it is read later."""
        if self.policy == "all":
            return True
        known = [self._history.note(key) for key in keys]
        return hits > 0 or any(known)
