"""Work of one thread that waits for a disk in between, so that it can begin with other work meanwhile.

Such work is a generator: it yields when all that is left is to wait, and returns its result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import ParamSpec, TypeVar

import outcome

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")

Work = Generator[None, None, Result]


def finish(work: Work[Result]) -> Result:
    """What work returns or raises, waiting for it."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: Result = end.value
            return result


def at_once(call: Callable[Arguments, Result]) -> Callable[Arguments, Work[Result]]:
    """A function that does its work in one go, as such work."""

    def work(*arguments: Arguments.args, **options: Arguments.kwargs) -> Work[Result]:
        yield from ()
        return call(*arguments, **options)

    return work


def interleave(works: Iterable[Work[Result]], most: int) -> Iterator[outcome.Outcome[Result]]:
    """What becomes of each, in their order. The next is begun before one is waited for: ``most`` at once."""
    begun: deque[Work[Result]] = deque()
    for work in works:
        begun.append(_begin(work))
        if len(begun) == most:
            yield outcome.capture(finish, begun.popleft())
    while begun:
        yield outcome.capture(finish, begun.popleft())


def _begin(work: Work[Result]) -> Work[Result]:
    """The same work, once it only waits; or what has its result already."""
    result = outcome.capture(next, work)
    if isinstance(result, outcome.Value):
        return work
    return _ended(result)


def _ended(result: outcome.Error) -> Work[Result]:
    yield from ()
    if isinstance(result.error, StopIteration):
        ended: Result = result.error.value
        return ended
    return result.unwrap()
