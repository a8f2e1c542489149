"""Four processes together against one alone: sharing the mount must not make the whole slower."""

from __future__ import annotations

import os
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benches.measure import MIB, Call, OnPath, Row, buffer_of

PROCESSES = 4
SECONDS = 1.0
REPEATS = 3
#: Two runs of the same measurement on a raw tmpfs differ by up to this factor.
NOISE = 0.9

#: Waits until the daemon is done with files just written.
Settle = Callable[..., None]


def _work(call: Call, begin: int, report: int) -> None:
    """In a child: wait for the start, call until the time is up, report how often."""
    os.read(begin, 1)
    deadline = time.perf_counter() + SECONDS
    done = 0
    while time.perf_counter() < deadline:
        call(done)
        done += 1
    os.write(report, struct.pack("Q", done))


def calls_a_second(call_of: Callable[[int], Call], count: int) -> float:
    """How often ``count`` processes together make their call in a second."""
    begin, start = os.pipe()
    report, results = os.pipe()
    children = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                _work(call_of(number), begin, results)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    os.write(start, b"x" * count)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    totals = os.read(report, 8 * count)
    for descriptor in (begin, start, report, results):
        os.close(descriptor)
    if any(statuses):
        raise ChildProcessError(f"a measuring process failed: {statuses}")
    done: tuple[int, ...] = struct.unpack(f"{count}Q", totals)
    return sum(done) / SECONDS


def rows(mount: Path, raw: Path, settle: Settle, write_new: OnPath, read_mapped: OnPath) -> Iterator[Row]:
    """Mapped reads, new files, and opens: each alone and by four at once, in turn, here and on the raw tmpfs.

    Memory bandwidth has an end: where even the raw tmpfs gains nothing from more processes, the mount is held
    to what the raw tmpfs does, less what the same measurement differs by when it is repeated.
    """
    source = buffer_of(2 * MIB)
    kinds = {"mmap reads of 2 MiB": reader, "new files of 2 MiB": writer, "open+close": opener}
    shared = {side: [side / f"shared-{number}" for number in range(16)] for side in (mount, raw)}
    for path in (*shared[mount], *shared[raw]):
        write_new(path, source)
    settle(*shared[mount])
    for what, kind in kinds.items():
        rates: dict[tuple[Path, int], list[float]] = {}
        for _ in range(REPEATS):
            for side in (mount, raw):
                for count in (1, PROCESSES):
                    call_of = partial(kind, shared[side], write_new, read_mapped)
                    rates.setdefault((side, count), []).append(calls_a_second(call_of, count))
        middle = {key: statistics.median(found) for key, found in rates.items()}
        one, four = middle[mount, 1], middle[mount, PROCESSES]
        tmpfs = middle[raw, PROCESSES] / middle[raw, 1]
        reference = f"one alone {one:.0f}/s (tmpfs {tmpfs:.2f} x)"
        what = f"{what}: {PROCESSES} processes together"
        yield Row(what, f"{four:.0f}/s", reference, four / one, must=round(NOISE * min(1.0, tmpfs), 2))
    for path in (*shared[mount], *shared[raw]):
        path.unlink()


def reader(pages: list[Path], write_new: OnPath, read_mapped: OnPath, number: int) -> Call:
    target = buffer_of(2 * MIB)
    return lambda done: read_mapped(pages[(done + 5 * number) % len(pages)], target)


def writer(pages: list[Path], write_new: OnPath, read_mapped: OnPath, number: int) -> Call:
    source = buffer_of(2 * MIB)
    path = pages[0].with_name(f"own-{number}")

    def write(done: int) -> None:
        write_new(path, source)
        path.unlink()

    return write


def opener(pages: list[Path], write_new: OnPath, read_mapped: OnPath, number: int) -> Call:
    return lambda done: os.close(os.open(pages[(done + 5 * number) % len(pages)], os.O_RDONLY))
