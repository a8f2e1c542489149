"""What is learned: how the chance that a page is used again falls with its age, for each class of pages.

The model has few numbers, so that it learns soon. All classes have one shape, the chance of a use by age; a
class has a rate that multiplies it. The rate of a class of which little was seen is the product of two
factors, one that classes of the same state and uses share, and one that those with as much new share; its
own evidence overrides them as it comes in.

A page is worth the best ratio, over all times that it may be held from now on, of the expected uses in that
time to the expected time until it is used or given up. With one class of pages the page used longest ago is
worth least: the order of least recent use.

Ages and times are counted in uses of pages by anybody, which makes them independent of how busy the host is.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator, Sequence
from operator import add, mul
from typing import Final, NamedTuple

from kvfs.policy.classes import FACTORS, NEW_FACTOR, USES_FACTOR

_EDGES: Final = tuple(16 * 1.5**step for step in range(49))
"""Where a bucket of ages ends and the next begins: from 16 to beyond 2³², which no age reaches."""
_STARTS = (0.0, *_EDGES)
_WIDTHS = tuple(end - start for start, end in zip(_STARTS, (*_EDGES, 1.5 * _EDGES[-1]), strict=True))
_BUCKETS = len(_WIDTHS)
_NONE = (0.0,) * _BUCKETS
_NOTHING = 1e-9

_USED_AGAIN = 0.3
_AGE_AT_FIRST = 10
_BELIEVED: Final = tuple(
    _USED_AGAIN / (start + width / 2 + _AGE_AT_FIRST) for start, width in zip(_STARTS, _WIDTHS, strict=True)
)
"""The chance of a use by age before anything is known: inverse to the age, as of anything that people use."""
_WEIGHT_OF_SHAPE = 5.0
"""How many observations it counts for what was believed before; so for the next two."""
_WEIGHT_OF_FACTOR = 5.0
_WEIGHT_OF_CLASS = 1.0
_AT_ONCE = 16
"""Classes that are looked at in one step, where each takes long."""
_ROUNDS = 3
"""Of fitting shape and factors to each other; more change nothing that matters."""


Watched = tuple[int, int, float]
"""A page whose future is not known yet: its class, its age, and the weight with which it counts."""


class _Seen(NamedTuple):
    """What was seen of a class: its uses, in all and by bucket, and the time in each that it was watched."""

    number: int
    uses: float
    by_bucket: Sequence[float]
    exposure: Sequence[float]


class Hazards:
    """Histograms of what became of pages, and what follows from them."""

    __slots__ = ("_ends", "_factors", "_fitted", "_shape", "_staying", "_uses", "_worths")

    def __init__(self) -> None:
        self._uses: dict[int, list[float]] = {}
        self._ends: dict[int, list[float]] = {}
        self._staying: dict[int, list[float]] = {}
        self._shape: Sequence[float] = _BELIEVED
        self._factors = [1.0] * FACTORS, [1.0] * FACTORS
        self._worths: dict[int, Sequence[float]] = {}
        self._fitted = False

    def used(self, number: int, age: int, weight: float) -> None:
        """A page of a class was used again at an age."""
        _count(self._uses, number, age, weight)

    def ended(self, number: int, age: int, weight: float) -> None:
        """A page of a class was given up at an age."""
        _count(self._ends, number, age, weight)

    def watch(self, pages: Iterable[Watched]) -> None:
        """Pages are still there, or may still come back: the next fit heeds them."""
        for number, age, weight in pages:
            _count(self._staying, number, age, weight)

    def worth(self, number: int, age: int) -> float:
        """What a page of a class is worth at an age: expected uses for the time that it takes up room."""
        if not self._fitted:
            return 1 / (age + _AGE_AT_FIRST)
        worths = self._worths.get(number)
        if worths is None:  # a class that is new since the last fit
            worths = self._worths[number] = _worths(self._shape, self._rate(number))
        bucket = bisect_right(_EDGES, age)
        return worths[bucket] if bucket < len(worths) else worths[-1]

    def fit(self, remembered: float) -> Iterator[None]:
        """Learns, in steps of about a millisecond, from what was seen, which counts for ``remembered`` as
        much from now on, and from what is watched."""
        seen = yield from self._collect(remembered)
        rates = [self._rate(each.number) for each in seen]
        expected: list[float] = []
        for _ in range(_ROUNDS):
            self._shape = _fitted_shape(seen, rates)
            expected = [sum(map(mul, each.exposure, self._shape)) for each in seen]
            for values, factor in zip(self._factors, (USES_FACTOR, NEW_FACTOR), strict=True):
                _fit_factor(values, factor, seen, rates, expected)
                rates = [self._rate(each.number) for each in seen]
            yield
        worths: dict[int, Sequence[float]] = {}
        for each, rate, unscaled in zip(seen, rates, expected, strict=True):
            own_rate = rate * (each.uses + _WEIGHT_OF_CLASS) / (unscaled * rate + _WEIGHT_OF_CLASS)
            worths[each.number] = _worths(self._shape, own_rate)
            if len(worths) % _AT_ONCE == 0:
                yield
        self._worths = worths
        self._fitted = bool(seen)

    def _rate(self, number: int) -> float:
        return self._factors[0][USES_FACTOR[number]] * self._factors[1][NEW_FACTOR[number]]

    def _collect(self, remembered: float) -> Generator[None, None, list[_Seen]]:
        """Each class of which anything was seen, with as many buckets as were reached."""
        staying, self._staying = self._staying, {}
        counted = []
        reached = 0
        for number in sorted(self._uses.keys() | self._ends.keys() | staying.keys()):
            uses = list(self._uses.get(number, _NONE))
            ends = map(add, self._ends.get(number, _NONE), staying.get(number, _NONE))
            left = list(map(add, uses, ends))
            counted.append((number, uses, left))
            while reached < _BUCKETS and any(left[reached:]):
                reached += 1
        seen: list[_Seen] = []
        for number, uses, left in counted:
            seen.append(_Seen(number, sum(uses), uses[:reached], _exposure(left[:reached])))
            if len(seen) % _AT_ONCE == 0:
                yield
        for counts in (*self._uses.values(), *self._ends.values()):
            counts[:] = [count * remembered if count > _NOTHING else 0.0 for count in counts]
        yield
        return seen


def _count(histograms: dict[int, list[float]], number: int, age: int, weight: float) -> None:
    if number not in histograms:
        histograms[number] = list(_NONE)
    histograms[number][bisect_right(_EDGES, age)] += weight


def _exposure(left: Sequence[float]) -> list[float]:
    """The time that pages were watched in each bucket, given how many left in each: those that leave in a
    bucket have been there for half of it on average."""
    exposure = [0.0] * len(left)
    staying = 0.0
    for bucket in range(len(left) - 1, -1, -1):
        exposure[bucket] = (staying + left[bucket] / 2) * _WIDTHS[bucket]
        staying += left[bucket]
    return exposure


def _fitted_shape(seen: Sequence[_Seen], rates: Sequence[float]) -> list[float]:
    """The chance of a use in each bucket that explains what was seen, given the rates of the classes."""
    reached = len(seen[0].exposure) if seen else _BUCKETS
    uses = [_WEIGHT_OF_SHAPE * chance * width for chance, width in zip(_BELIEVED, _WIDTHS, strict=True)][
        :reached
    ]
    time = [_WEIGHT_OF_SHAPE * width for width in _WIDTHS[:reached]]
    for each, rate in zip(seen, rates, strict=True):
        uses = list(map(add, uses, each.by_bucket))
        time = [total + rate * more for total, more in zip(time, each.exposure, strict=True)]
    return [some / much for some, much in zip(uses, time, strict=True)]


def _fit_factor(
    values: list[float],
    factor: Sequence[int],
    seen: Sequence[_Seen],
    rates: Sequence[float],
    expected: Sequence[float],
) -> None:
    """Scales the values of a factor so that each explains the uses of its classes."""
    found = [_WEIGHT_OF_FACTOR] * FACTORS
    explained = [_WEIGHT_OF_FACTOR] * FACTORS
    for each, rate, unscaled in zip(seen, rates, expected, strict=True):
        value = factor[each.number]
        found[value] += each.uses
        explained[value] += unscaled * rate / values[value]
    values[:] = [uses / much for uses, much in zip(found, explained, strict=True)]


def _worths(shape: Sequence[float], rate: float) -> list[float]:
    """For each bucket of ages, the best ratio of expected uses to expected time from there on.

    In the plane of time and uses, both as expected at birth, a page that is held for ever draws a curve; the
    best ratio from a bucket on is the slope of the first edge of the curve's upper hull. It is found from the
    end by merging each bucket with what follows for as long as that is steeper.
    """
    alive = 1.0
    steps = []
    for chance, width in zip(shape, _WIDTHS, strict=False):
        hazard = chance * rate
        used = alive * -math.expm1(-hazard * width)
        steps.append((used, used / hazard))
        alive = max(alive - used, _NOTHING)
    hull: list[tuple[float, float]] = []
    worths = []
    for uses, time in reversed(steps):
        while hull and hull[-1][0] * time > uses * hull[-1][1]:
            more_uses, more_time = hull.pop()
            uses += more_uses
            time += more_time
        hull.append((uses, time))
        worths.append(uses / time)
    worths.reverse()
    return worths
