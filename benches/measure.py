"""Timing, and the table that a benchmark prints.

Two things are compared by calling them in turn, in one process and one run: a busy machine slows both.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import statistics
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

KIB = 1 << 10
MIB = 1 << 20
#: One call of what is measured; the argument is the number of the round.
Call = Callable[[int], None]
#: What is done with a file and a buffer of its size.
OnPath = Callable[[Path, memoryview], None]


@contextlib.contextmanager
def awake_processors() -> Iterator[bool]:
    """Keeps idle processors from states that they leave slowly, as they are on a busy machine; says whether.

    A request to a daemon wakes a processor twice. On a machine that does nothing else that can take longer
    than all the rest, in a virtual machine above all, and says nothing of the daemon.
    """
    try:
        descriptor = os.open("/dev/cpu_dma_latency", os.O_WRONLY)
    except OSError:
        yield False
        return
    try:
        os.write(descriptor, struct.pack("=i", 0))  # microseconds, for as long as it is open
        yield True
    finally:
        os.close(descriptor)


def buffer_of(size: int) -> memoryview:
    """Anonymous memory of ``size`` bytes, on hugepages where the kernel has them, touched and not zero."""
    memory = mmap.mmap(-1, size)
    if size >= 2 * MIB:
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    for start in range(0, size, 4 * KIB):
        view[start : start + 16] = os.urandom(16)
    return view


def alternate(first: Call, second: Call, rounds: int, after: Call | None = None) -> tuple[float, float]:
    """Median seconds of ``first`` and of ``second``, called in turn; who begins changes with each round.

    ``after`` is called after each of them, outside the timing, with the round's number.
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    pair = (first, second)
    first(-1)
    second(-1)
    if after:
        after(-1)
    gc.disable()
    try:
        for number in range(rounds):
            for which in (number % 2, 1 - number % 2):
                call = pair[which]
                start = time.perf_counter()
                call(number)
                seconds[which].append(time.perf_counter() - start)
                if after:
                    after(number)
    finally:
        gc.enable()
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def batched(call: Call, size: int) -> Call:
    """``size`` calls as one, for calls so short that reading the clock would show."""

    def batch(number: int) -> None:
        for index in range(number * size, number * size + size):
            call(index)

    return batch


def percentile(values: Iterable[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def time_text(seconds: float) -> str:
    """Seconds with a unit that suits them."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def speed_text(size: int, seconds: float) -> str:
    """How fast ``size`` bytes moved."""
    return f"{size / seconds / 1e9:.2f} GB/s"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a value that is to be at least (or at most) ``must``, better ``aim``."""

    what: str
    measured: str
    reference: str
    value: float
    must: float | None = None
    aim: float | None = None
    better: Literal["higher", "lower"] = "higher"
    unit: str = "x"

    def reaches(self, bound: float) -> bool:
        return self.value >= bound if self.better == "higher" else self.value <= bound

    @property
    def verdict(self) -> str:
        if self.must is None:
            return ""
        if not self.reaches(self.must):
            return "MISS"
        return "aim met" if self.aim is not None and self.reaches(self.aim) else "ok"

    def cells(self) -> tuple[str, ...]:
        sign = "≥" if self.better == "higher" else "≤"

        def bound(value: float | None) -> str:
            return "" if value is None else f"{sign} {value:g}"

        digits = 2 if self.value < 100 else 0
        value = f"{self.value:.{digits}f} {self.unit}"
        bounds = bound(self.must), bound(self.aim)
        return self.what, self.measured, self.reference, value, *bounds, self.verdict


COLUMNS = ("what", "mount", "compared with", "value", "must", "aim", "verdict")


def print_table(title: str, rows: Sequence[Row], form: Literal["table", "markdown", "json"]) -> None:
    """Print the rows: for a terminal, for a Markdown page, or as JSON."""
    if form == "json":
        found = [asdict(row) | {"verdict": row.verdict} for row in rows]
        print(json.dumps({"title": title, "rows": found}, indent=2, ensure_ascii=False))
    elif form == "markdown":
        print(f"### {title}\n")
        print("| " + " | ".join(COLUMNS) + " |")
        print("|" + "|".join(["---"] * 2 + ["---:"] * 4 + ["---"]) + "|")
        for row in rows:
            print("| " + " | ".join(row.cells()) + " |")
        print()
    else:
        table = Table(title=title)
        for number, column in enumerate(COLUMNS):
            table.add_column(column, justify="right" if 1 < number < 6 else "left")
        for row in rows:
            style = {"MISS": "bold red", "aim met": "green"}.get(row.verdict)
            table.add_row(*row.cells(), style=style)
        Console(width=None if sys.stdout.isatty() else 150).print(table)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process that is its own: what it would give back by ending."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) * KIB
    raise ValueError(f"process {pid} has no Private_Dirty")


def read_fully(descriptor: int, target: memoryview) -> None:
    """Fill ``target`` from the start of the file."""
    done = os.preadv(descriptor, [target], 0)
    while done < len(target):
        more = os.preadv(descriptor, [target[done:]], done)
        if not more:
            raise EOFError(f"file ends after {done} bytes")
        done += more


def write_fully(descriptor: int, source: memoryview) -> None:
    """Write all of ``source``."""
    done = os.write(descriptor, source)
    while done < len(source):
        done += os.write(descriptor, source[done:])
