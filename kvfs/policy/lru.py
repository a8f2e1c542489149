"""The least recently used leaves first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar, cast

from kvfs.policy.classes import SMALL


class Entry(Protocol):
    """What can be ordered. The order is kept in the entry itself, so that it costs two pointers and no more.

    ``colder`` and ``hotter`` belong to the policy, are None while the entry is in no order, and ``size`` is
    in bytes.
    """

    size: int
    colder: Entry | None
    hotter: Entry | None


class _Mark:
    """A link of the ring that is no entry: its two ends, and the place that an iteration has reached."""

    __slots__ = ("colder", "hotter", "size")

    def __init__(self) -> None:
        self.size = 0
        self.colder: Entry | None = None
        self.hotter: Entry | None = None


def _insert_below(entry: Entry, hotter: Entry) -> None:
    colder = cast(Entry, hotter.colder)
    entry.colder, entry.hotter = colder, hotter
    colder.hotter = hotter.colder = entry


def _take_out(entry: Entry) -> None:
    colder, hotter = cast(Entry, entry.colder), cast(Entry, entry.hotter)
    colder.hotter, hotter.colder = hotter, colder
    entry.colder = entry.hotter = None


def _ring() -> _Mark:
    """An empty ring: the mark's ``hotter`` is the coldest entry, its ``colder`` the hottest."""
    end = _Mark()
    end.colder = end.hotter = end
    return end


Ordered = TypeVar("Ordered", bound=Entry)


class LeastRecentlyUsed(Generic[Ordered]):
    """Orders entries by their last use; small ones apart, because they leave last.

    ``add``, ``touch`` and ``remove`` take constant time. Not safe for use by several threads at once.
    """

    __slots__ = ("_count", "_large", "_small")

    def __init__(self) -> None:
        self._large = _ring()
        self._small = _ring()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, entry: Ordered) -> bool:
        return entry.hotter is not None

    def add(self, entry: Ordered) -> None:
        """Takes an entry in as the hottest. Raises ValueError when it is in an order already."""
        if entry.hotter is not None:
            raise ValueError("the entry is in an order already")
        _insert_below(entry, self._small if entry.size < SMALL else self._large)
        self._count += 1

    def touch(self, entry: Ordered) -> None:
        """Makes an entry the hottest, and looks at its size again. Raises ValueError when it is not here."""
        if entry.hotter is None:
            raise ValueError("the entry is not in the order")
        _take_out(entry)
        _insert_below(entry, self._small if entry.size < SMALL else self._large)

    def remove(self, entry: Ordered) -> None:
        """Forgets an entry. Raises ValueError when it is not here."""
        if entry.hotter is None:
            raise ValueError("the entry is not in the order")
        _take_out(entry)
        self._count -= 1

    def victims(self) -> Iterator[Ordered]:
        """The entries, the coldest first and small ones after all others.

        Between two steps anything may be added, touched or removed, here or by another task: what is removed
        is not given any more, and what becomes hot after the start is not given at all.
        """
        rings = (self._large, self._small)
        places = [_Mark() for _ in rings]
        ends = [_Mark() for _ in rings]
        for ring, place, end in zip(rings, places, ends, strict=True):
            _insert_below(place, cast(Entry, ring.hotter))
            _insert_below(end, ring)
        try:
            for place, end in zip(places, ends, strict=True):
                while (candidate := cast(Entry, place.hotter)) is not end:
                    _take_out(place)
                    _insert_below(place, cast(Entry, candidate.hotter))
                    if not isinstance(candidate, _Mark):
                        yield cast(Ordered, candidate)
        finally:
            for mark in (*places, *ends):
                _take_out(mark)
