"""Replaying a trace against one cache, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvfs.policy import ExpectedReuse
from kvfs.simulation.trace import Advance, Trace

ADVANCE_EVERY = 64
"""Requests between two tellings of progress."""
_BLOCK_BYTES = 1 << 20
"""All blocks have one size, which is not small."""


class Cache(Protocol):
    """A cache that holds so many blocks."""

    def __contains__(self, block: int, /) -> bool: ...

    def use(self, blocks: Sequence[int], /) -> None:
        """A request uses these blocks, the head first: those that are not here may come in."""
        ...


MakeCache = Callable[[Trace, int], Cache]
"""Makes a cache for so many blocks; the trace is for those who know the future."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a trace: a block is hit if it and all before it in its request were present."""

    policy: str
    pool_blocks: int
    hits: int
    references: int
    late_hits: int
    """In the second half of the requests, when the cache is warm; so for the references."""
    late_references: int

    @property
    def hit_rate(self) -> float:
        return self.hits / self.references

    @property
    def late_hit_rate(self) -> float:
        return self.late_hits / self.late_references if self.late_references else 0.0


def replay(
    trace: Trace, policy: str, make: MakeCache, pool_blocks: int, advance: Advance = lambda _: None
) -> Outcome:
    """Replays a trace; ``advance`` is told of requests."""
    cache = make(trace, pool_blocks)
    requests, half = trace.requests, len(trace.requests) // 2
    hits = early_hits = 0
    for number, blocks in enumerate(requests):
        if number == half:
            early_hits = hits
        for block in blocks:
            if block not in cache:
                break
            hits += 1
        cache.use(blocks)
        if number % ADVANCE_EVERY == 0:
            advance(min(ADVANCE_EVERY, len(requests) - number))
    late = sum(map(len, requests[half:]))
    return Outcome(policy, pool_blocks, hits, trace.references, hits - early_hits, late)


class _Block:
    """A page as the policy sees it. Numbers are used again, as those of files in the pool are."""

    __slots__ = ("block", "number", "size")

    def __init__(self, block: int, number: int) -> None:
        self.block = block
        self.number = number
        self.size = _BLOCK_BYTES


def _key(block: _Block) -> int:
    return block.block


class DefaultPolicy:
    """The policy that the daemon runs, as it runs there: blocks come in, and then as many leave as are too
    many, which may be the new ones."""

    def __init__(self, trace: Trace, pool_blocks: int) -> None:
        self._pool_blocks = pool_blocks
        self._order = ExpectedReuse(key_of=_key)
        self._blocks: dict[int, _Block] = {}
        self._free: list[int] = []

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def use(self, blocks: Sequence[int]) -> None:
        self._order.use([self._block(block) for block in blocks])
        if len(self._order) <= self._pool_blocks:
            return
        for victim in self._order.victims():
            self._order.remove(victim, evicted=True)
            del self._blocks[victim.block]
            self._free.append(victim.number)
            if len(self._order) <= self._pool_blocks:
                return

    def _block(self, block: int) -> _Block:
        if block not in self._blocks:
            number = self._free.pop() if self._free else len(self._blocks) + 1
            self._blocks[block] = _Block(block, number)
        return self._blocks[block]
