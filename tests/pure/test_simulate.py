"""Replaying traces: what is counted, and each policy against one that is written as plainly as can be."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.errors import UsageError
from kvfs.simulation.baselines import POLICIES
from kvfs.simulation.replay import Outcome, replay
from kvfs.simulation.trace import Trace, read_trace

Requests = Sequence[Sequence[int]]
Evict = Callable[[list[int], int, int], int]
"""Which of the blocks that are present leaves, when a block is used as so many-th in the list of all uses."""

CONVERSATIONS = [
    [0, 1, 2, 3],
    [0, 1, 4],
    [0, 1, 2, 3, 5, 6],
    [7, 8],
    [0, 1, 4, 9],
    [7, 8, 10, 11],
    [0, 1, 2, 3, 5, 6, 12],
    [13],
    [0, 1, 4, 9, 14],
    [7, 8, 10, 15],
]
"""A prompt that some share, goes on, and branches."""

traces = st.lists(st.lists(st.integers(0, 12), max_size=8), min_size=1, max_size=25).filter(any)


def outcome(name: str, requests: Requests, pool_blocks: int) -> Outcome:
    return replay(Trace.of(requests), name, POLICIES[name], pool_blocks)


def prefix(request: Sequence[int], present: Sequence[int]) -> int:
    return len(list(itertools.takewhile(present.__contains__, request)))


def brute_lru(requests: Requests, pool_blocks: int, *, moves: bool = True) -> int:
    """Hits, with one list, the coldest first. FIFO does not move what is used."""
    present: list[int] = []
    hits = 0
    for request in requests:
        hits += prefix(request, present)
        for block in reversed(request):
            if block in present and not moves:
                continue
            present = [other for other in present if other != block]
            present = [*present, block][-pool_blocks:]
    return hits


def brute_optimum(requests: Requests, pool_blocks: int) -> int:
    """Hits, looking through all that follows for each decision."""
    present: set[int] = set()
    hits = 0
    for number, request in enumerate(requests):
        hits += prefix(request, list(present))
        present |= set(request)
        later = [*itertools.chain(*requests[number + 1 :])]
        never = [block for block in present if block not in later]
        while len(present) > pool_blocks:
            present.remove(never.pop() if never else max(present, key=later.index))
    return hits


def best_possible(requests: Requests, pool_blocks: int) -> int:
    """The most hits that any choice of blocks to keep can have: all choices are tried."""
    kept: dict[frozenset[int], int] = {frozenset(): 0}
    for request in requests:
        after: dict[frozenset[int], int] = {}
        for present, hits in kept.items():
            hits += prefix(request, list(present))
            candidates = present | set(request)
            for choice in itertools.combinations(sorted(candidates), min(pool_blocks, len(candidates))):
                key = frozenset(choice)
                after[key] = max(after.get(key, 0), hits)
        kept = after
    return max(kept.values())


@pytest.mark.parametrize("pool_blocks", [1, 2, 3, 5, 8, 20])
def test_a_small_trace(pool_blocks: int) -> None:
    found = {name: outcome(name, CONVERSATIONS, pool_blocks).hits for name in POLICIES}
    assert found["lru"] == brute_lru(CONVERSATIONS, pool_blocks)
    assert found["fifo"] == brute_lru(CONVERSATIONS, pool_blocks, moves=False)
    assert found["optimum"] == brute_optimum(CONVERSATIONS, pool_blocks)
    assert max(found.values()) == found["optimum"] <= best_possible(CONVERSATIONS, pool_blocks)


def test_with_room_for_all_every_policy_finds_what_was_there_before() -> None:
    seen: set[int] = set()
    hits = 0
    for request in CONVERSATIONS:
        hits += prefix(request, list(seen))
        seen |= set(request)
    for name in POLICIES:
        found = outcome(name, CONVERSATIONS, len(seen))
        assert found.hits == hits
        assert found.references == sum(map(len, CONVERSATIONS))
        assert found.hit_rate == hits / found.references


def test_only_the_leading_blocks_count() -> None:
    """A block whose predecessor is not there is no hit, but it is used."""
    requests = [[1, 2, 3], [4], [5, 2, 3], [1, 2, 3]]
    assert outcome("fifo", requests, 3).hits == brute_lru(requests, 3, moves=False) == 0
    assert outcome("lru", requests, 5).hits == 3


def test_the_second_half_is_counted_by_requests() -> None:
    requests = [[1, 2, 3, 4], [1, 2], [1, 2, 3], [5]]
    found = outcome("lru", requests, 10)
    assert (found.hits, found.late_hits, found.late_references) == (5, 3, 4)
    assert found.late_hit_rate == 0.75
    assert outcome("lru", [[1]], 1).late_references == 1


@settings(deadline=None)
@given(requests=traces, pool_blocks=st.integers(1, 14))
def test_brute_force_agrees(requests: Requests, pool_blocks: int) -> None:
    assert outcome("lru", requests, pool_blocks).hits == brute_lru(requests, pool_blocks)
    assert outcome("fifo", requests, pool_blocks).hits == brute_lru(requests, pool_blocks, moves=False)
    assert outcome("optimum", requests, pool_blocks).hits == brute_optimum(requests, pool_blocks)


class Watched:
    """A cache that is asked after every request how much it holds."""

    def __init__(self, name: str, trace: Trace, pool_blocks: int) -> None:
        self.cache = POLICIES[name](trace, pool_blocks)
        self.blocks = range(trace.distinct)
        self.pool_blocks = pool_blocks

    def __contains__(self, block: int) -> bool:
        return block in self.cache

    def use(self, blocks: Sequence[int]) -> None:
        self.cache.use(blocks)
        assert sum(block in self.cache for block in self.blocks) <= self.pool_blocks


@settings(deadline=None)
@given(requests=traces, pool_blocks=st.integers(1, 14), name=st.sampled_from(list(POLICIES)))
def test_no_policy_holds_more_than_there_is_room_for(requests: Requests, pool_blocks: int, name: str) -> None:
    trace = Trace.of(requests)
    replay(trace, name, lambda trace, size: Watched(name, trace, size), pool_blocks)


def test_arc_and_s3fifo_keep_what_is_used_again_from_a_scan() -> None:
    scan = itertools.count(1000)
    used = [[1], [2]]
    requests = [*3 * used, *([block] for block in itertools.islice(scan, 50)), *used]
    assert outcome("lru", requests, 6).hits == 4
    for name in ("arc", "s3fifo"):
        assert outcome(name, requests, 6).hits == 6, name


def test_progress_adds_up_to_the_requests() -> None:
    for count in (1, 63, 64, 65, 200):
        told: list[int] = []
        trace = Trace.of([[number] for number in range(count)])
        replay(trace, "lru", POLICIES["lru"], 3, told.append)
        assert sum(told) == count


# Reading


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_a_trace_is_read(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        '{"timestamp": 0, "input_length": 700, "output_length": 9, "hash_ids": [70, 80]}\n'
        "\n"
        '{"hash_ids": []}\n'
        '{"hash_ids": [80, 9007199254740993, 70], "timestamp": 3.5}',
    )
    told: list[int] = []
    trace = read_trace(path, told.append)
    assert trace.requests == [(0, 1), (), (1, 2, 0)]
    assert (trace.references, trace.distinct) == (5, 3)
    assert sum(told) == path.stat().st_size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no requests"),
        ('{"hash_ids": []}\n', "holds no requests"),
        ("hello\n", "line 1, is no request of a trace: JSON is malformed"),
        ('{"hash_ids": [1]}\n{"hash_ids": [1}\n', "line 2, is no request"),
        ('{"timestamp": 0}\n', "line 1.*missing required field `hash_ids`"),
        ('{"hash_ids": [1, "2"]}\n', r"line 1.*Expected `int`, got `str` - at `\$.hash_ids\[1\]`"),
        ('{"hash_ids": 3}\n', "line 1.*Expected `array`"),
        ("[1, 2]\n", "line 1.*Expected `object`"),
        (b'{"hash_ids\xff": [1]}\n', "line 1, is no request"),
        (b"\x00\x01\x02", "line 1, is no request"),
        ('{"x": ' + "[" * 100_000 + "\n", "line 1, is no request"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = write(tmp_path / "trace.jsonl", text)
    with pytest.raises(UsageError, match=message) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)
