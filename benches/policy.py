"""What the order of eviction costs at a million pages, and how often it is right on a trace."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeVar

from benches.measure import MIB, Row, percentile, print_table, resident_bytes, time_text
from kvfs.policy import Entry, ExpectedReuse, LeastRecentlyUsed
from kvfs.simulation.baselines import POLICIES
from kvfs.simulation.replay import replay
from kvfs.simulation.trace import read_trace

PAGES = 1_000_000
#: Pages that are touched one by one, and those that are touched in batches.
TOUCHED = 250_000
#: Pages that leave, and come back as others: enough that all are remembered that can be.
EVICTED = 2_000_000
#: Operations that are timed at once: what one request uses, what one batch of the channel reports.
TOGETHER = 64
MOST_BYTES = 100
LONGEST_MS = 5.0
#: Pool sizes, as percentages of a trace's distinct blocks.
SHARES = (1, 5, 10, 20)


class Page:
    """As small as a page can be."""

    __slots__ = ("number", "size")

    def __init__(self, number: int) -> None:
        self.number = number
        self.size = MIB


class LinkedPage(Page):
    """With the two links that the order of last use keeps in it."""

    __slots__ = ("colder", "hotter")

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.colder: Entry | None = None
        self.hotter: Entry | None = None


AnyPage = TypeVar("AnyPage", bound=Page)


class Order(Protocol[AnyPage]):
    """What both orders have in common."""

    def add(self, page: AnyPage, /) -> None: ...

    def touch(self, page: AnyPage, /) -> None: ...

    def victims(self) -> Iterator[AnyPage]: ...


@dataclass(frozen=True)
class Cost:
    """Of one order: bytes a page, and for each operation the seconds that one takes, and those that
    ``TOGETHER`` take at most."""

    memory: float
    operations: dict[str, tuple[float, float]]


def timed(work: Callable[[list[AnyPage]], object], pages: Iterable[AnyPage]) -> tuple[float, float]:
    """Seconds of processor time of one page's work, and of all turns but one in a thousand: the very longest
    show what else the machine did."""
    turns = []
    count = 0
    left = iter(pages)
    while some := list(islice(left, TOGETHER)):
        start = time.thread_time()
        work(some)
        turns.append(time.thread_time() - start)
        count += len(some)
    return sum(turns) / count, percentile(turns, 99.9)


def exercise(
    order: Order[AnyPage],
    pages: list[AnyPage],
    remove: Callable[[AnyPage], None],
    others: dict[str, Callable[[list[AnyPage]], object]],
    before: int,
) -> Cost:
    """Half of the pages come in by ``add``, the others and what else there is to do by ``others``."""

    def add(some: list[AnyPage]) -> None:
        for page in some:
            order.add(page)

    def touch(some: list[AnyPage]) -> None:
        for page in some:
            order.touch(page)

    def evict(some: list[AnyPage]) -> None:
        for victim in islice(order.victims(), len(some)):
            remove(victim)
            gone.append(victim)

    gone: list[AnyPage] = []
    half = len(pages) // 2
    chance = random.Random(1)
    add_chain = others.pop("add of a chain", add)
    operations = {"add": timed(add, pages[:half]), "add of a chain": timed(add_chain, pages[half:])}
    operations["touch"] = timed(touch, chance.sample(pages, TOUCHED))
    for name, work in others.items():
        operations[name] = timed(work, chance.sample(pages, TOUCHED))
    operations["evict"] = timed(evict, pages[:TOUCHED])
    for _ in range(EVICTED // TOGETHER):
        add(gone)
        gone.clear()
        evict(pages[:TOGETHER])
    add(gone)
    return Cost((resident_bytes(os.getpid()) - before) / len(pages), operations)


def cost_of_nothing() -> Cost:
    """Pages in no order: what the others are compared with."""
    before = resident_bytes(os.getpid())
    pages = [Page(number) for number in range(1, PAGES + 1)]
    return Cost((resident_bytes(os.getpid()) - before) / len(pages), {})


def cost_of_lru() -> Cost:
    before = resident_bytes(os.getpid())
    order: LeastRecentlyUsed[LinkedPage] = LeastRecentlyUsed()
    pages = [LinkedPage(number) for number in range(1, PAGES + 1)]
    return exercise(order, pages, order.remove, {}, before)


def cost_of_default() -> Cost:
    before = resident_bytes(os.getpid())
    order: ExpectedReuse[Page] = ExpectedReuse(key_of=lambda page: page.number)
    pages = [Page(number) for number in range(1, PAGES + 1)]

    def evict(page: Page) -> None:
        order.remove(page, evicted=True)

    others: dict[str, Callable[[list[Page]], object]] = {
        "add of a chain": order.use,
        "touch of a batch": order.use_together,
    }
    return exercise(order, pages, evict, others, before)


def in_process(measure: Callable[[], Cost]) -> Cost:
    """In a process of its own, so that memory is comparable; without the collector, which finds nothing."""
    with multiprocessing.get_context("fork").Pool(1, gc.disable) as pool:
        return pool.apply(measure)


def costs() -> Iterator[Row]:
    nothing, lru, default = map(in_process, (cost_of_nothing, cost_of_lru, cost_of_default))
    own, other = default.memory - nothing.memory, lru.memory - nothing.memory
    yield Row(
        "memory of a page", f"{own:.0f} B", f"LRU {other:.0f} B", own, MOST_BYTES, unit="B", better="lower"
    )
    for name, (each, longest) in default.operations.items():
        reference = ""
        if name in lru.operations:
            reference = f"LRU {time_text(lru.operations[name][0])}"
        yield Row(name, time_text(each), reference, each * 1e6, unit="µs", better="lower")
        yield Row(
            f"{name}, {TOGETHER} at once, 99.9th percentile", time_text(longest), "",
            longest * 1e3, LONGEST_MS, unit="ms", better="lower",
        )  # fmt: skip


def hits(path: Path) -> Iterator[Row]:
    """The default against the better of LRU and ARC, which it must not fall below."""
    trace = read_trace(path)
    for share in SHARES:
        size = max(1, trace.distinct * share // 100)
        own, lru, arc, most = (
            replay(trace, name, POLICIES[name], size).hit_rate
            for name in ("default", "lru", "arc", "optimum")
        )
        yield Row(
            f"hit rate, {size} blocks", f"{own:.4f}", f"LRU {lru:.4f}, ARC {arc:.4f}, optimum {most:.4f}",
            own / max(lru, arc, 1e-9), 1.0,
        )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benches.policy", description=__doc__.split("\n")[0])
    parser.add_argument("trace", nargs="?", type=Path, help="a trace as kvfs simulate takes it")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", dest="form", action="store_const", const="markdown")
    form.add_argument("--json", dest="form", action="store_const", const="json")
    arguments = parser.parse_args()
    rows = []
    for row in [*costs(), *(hits(arguments.trace) if arguments.trace else ())]:
        rows.append(row)
        print(*row.cells(), sep="  ", file=sys.stderr, flush=True)
    title = f"The default policy, {PAGES:,} pages, {os.cpu_count()} processors, Linux {platform.release()}"
    print_table(title, rows, arguments.form or "table")
    return int(any(row.verdict == "MISS" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
