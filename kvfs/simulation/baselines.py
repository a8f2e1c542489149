"""What the default policy is compared with: FIFO, LRU, S3-FIFO, ARC, and the optimum, which knows the future.

A request uses its blocks deepest first, so that the head of a prompt leaves last.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from kvfs.simulation.replay import Cache, DefaultPolicy, MakeCache
from kvfs.simulation.trace import Trace

_Queue = OrderedDict[int, int]
"""Blocks, the coldest first; S3-FIFO counts their uses."""


def _pop(queue: _Queue) -> int:
    return queue.popitem(last=False)[0]


class _OneByOne(Cache):
    """A cache that knows nothing of requests."""

    def __init__(self, trace: Trace, pool_blocks: int) -> None:
        self._pool_blocks = pool_blocks

    def use(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._use(block)

    @abstractmethod
    def _use(self, block: int) -> None: ...


class Fifo(_OneByOne):
    """What came first leaves first."""

    def __init__(self, trace: Trace, pool_blocks: int) -> None:
        super().__init__(trace, pool_blocks)
        self._queue: _Queue = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._queue

    def _use(self, block: int) -> None:
        if block not in self._queue:
            if len(self._queue) == self._pool_blocks:
                _pop(self._queue)
            self._queue[block] = 0


class Lru(Fifo):
    """What was used longest ago leaves first."""

    def _use(self, block: int) -> None:
        super()._use(block)
        self._queue.move_to_end(block)


class S3Fifo(_OneByOne):
    """S3-FIFO (Yang and others, SOSP '23): a small queue for what is new, a main queue for what was used
    again there, ghosts of what was not; as many ghosts as blocks."""

    _SMALL_PART = 10
    _USED_AGAIN = 2
    _MOST_USES = 3

    def __init__(self, trace: Trace, pool_blocks: int) -> None:
        super().__init__(trace, pool_blocks)
        self._small_blocks = max(1, pool_blocks // self._SMALL_PART)
        self._small: _Queue = OrderedDict()
        self._main: _Queue = OrderedDict()
        self._ghosts: _Queue = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._small or block in self._main

    def _use(self, block: int) -> None:
        for queue in (self._small, self._main):
            if block in queue:
                queue[block] = min(queue[block] + 1, self._MOST_USES)
                return
        while len(self._small) + len(self._main) >= self._pool_blocks:
            if self._small and (len(self._small) >= self._small_blocks or not self._main):
                self._leave_small()
            else:
                self._leave_main()
        if block in self._ghosts:
            del self._ghosts[block]
            self._main[block] = 0
        else:
            self._small[block] = 0

    def _leave_small(self) -> None:
        while self._small:
            block, uses = self._small.popitem(last=False)
            if uses < self._USED_AGAIN:
                self._ghosts[block] = 0
                if len(self._ghosts) > self._pool_blocks:
                    _pop(self._ghosts)
                return
            self._main[block] = 0

    def _leave_main(self) -> None:
        while True:
            block, uses = self._main.popitem(last=False)
            if not uses:
                return
            self._main[block] = uses - 1


class Arc(_OneByOne):
    """ARC (Megiddo and Modha, FAST '03): blocks used once and blocks used more often, and ghosts of both that
    say which should have had more room. Each list of ghosts holds as many as there are blocks."""

    def __init__(self, trace: Trace, pool_blocks: int) -> None:
        super().__init__(trace, pool_blocks)
        self._once: _Queue = OrderedDict()
        self._often: _Queue = OrderedDict()
        self._once_ghosts: _Queue = OrderedDict()
        self._often_ghosts: _Queue = OrderedDict()
        self._once_target = 0.0

    def __contains__(self, block: int) -> bool:
        return block in self._once or block in self._often

    def _use(self, block: int) -> None:
        if block in self._often:
            self._often.move_to_end(block)
            return
        if block in self._once:
            del self._once[block]
            self._often[block] = 0
            return
        comes_to, was_often = self._once, False
        if block in self._once_ghosts:
            more = max(1.0, len(self._often_ghosts) / len(self._once_ghosts))
            self._once_target = min(self._pool_blocks, self._once_target + more)
            del self._once_ghosts[block]
            comes_to = self._often
        elif block in self._often_ghosts:
            less = max(1.0, len(self._once_ghosts) / len(self._often_ghosts))
            self._once_target = max(0.0, self._once_target - less)
            del self._often_ghosts[block]
            comes_to, was_often = self._often, True
        if len(self._once) + len(self._often) >= self._pool_blocks:
            self._leave(was_often)
        comes_to[block] = 0

    def _leave(self, was_often: bool) -> None:
        too_many = len(self._once) > self._once_target
        if self._once and (too_many or (was_often and len(self._once) == self._once_target)):
            queue, ghosts = self._once, self._once_ghosts
        elif self._often:
            queue, ghosts = self._often, self._often_ghosts
        else:
            queue, ghosts = self._once, self._once_ghosts
        ghosts[_pop(queue)] = 0
        if len(ghosts) > self._pool_blocks:
            _pop(ghosts)


class Optimum(Cache):
    """Keeps what will be used soonest, of one request the head; may refuse what comes."""

    def __init__(self, trace: Trace, pool_blocks: int) -> None:
        self._pool_blocks = pool_blocks
        self._next_uses = iter(_next_uses(trace))
        self._present: dict[int, int] = {}
        """For each block that is present, its next use."""
        self._latest: list[tuple[int, int]] = []
        """A heap of minus the next use and the block; of a block that is present the last one counts."""

    def __contains__(self, block: int) -> bool:
        return block in self._present

    def use(self, blocks: Sequence[int]) -> None:
        for block, next_use in zip(blocks, next(self._next_uses), strict=True):
            self._present[block] = next_use
            heapq.heappush(self._latest, (-next_use, block))
        while len(self._present) > self._pool_blocks:
            next_use, block = heapq.heappop(self._latest)
            if self._present.get(block) == -next_use:
                del self._present[block]


def _next_uses(trace: Trace) -> list[list[int]]:
    """For each block of each request, which of all uses is the next of that block; for the last one, none."""
    soonest: dict[int, int] = {}
    next_uses: list[list[int]] = []
    place = trace.references
    for request in reversed(trace.requests):
        next_uses.append([soonest.get(block, trace.references) for block in request])
        for block in reversed(request):
            place -= 1
            soonest[block] = place
    next_uses.reverse()
    return next_uses


POLICIES: Final[dict[str, MakeCache]] = {
    "default": DefaultPolicy,
    "lru": Lru,
    "fifo": Fifo,
    "arc": Arc,
    "s3fifo": S3Fifo,
    "optimum": Optimum,
}
"""What can be replayed, by its name on the command line."""
