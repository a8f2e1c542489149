"""What requests without bytes cost: opens, look-ups, lists and statfs; and how that grows with the pages."""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from benches.measure import MIB, Call, Row, alternate, batched, percentile, resident_bytes, time_text
from tests.mounted.running import (
    REPOSITORY,
    KvfsMount,
    environment_for_kvfs,
    mountinfo,
    scratch_directory,
    wait_sealed,
    wait_until,
)

FEW, MANY = 1_000, 100_000
BATCH = 50
#: Pages that growth is measured on.
SAMPLE = 900


@contextlib.contextmanager
def empty_handler() -> Iterator[Path]:
    """A mount of the empty filesystem, served by its own process."""
    with scratch_directory() as base:
        path = base / "empty"
        path.mkdir()
        command = [sys.executable, "-m", "benches.empty_handler", str(path)]
        with subprocess.Popen(command, cwd=REPOSITORY, env=environment_for_kvfs()) as process:
            try:
                wait_until(lambda: bool(mountinfo(path)), 10, "the empty handler is mounted")
                yield path
            finally:
                subprocess.run(["umount", str(path)], check=True)
                process.wait(10)


def open_and_close(path: str) -> None:
    os.close(os.open(path, os.O_RDONLY))


def look_up_missing(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.stat(path)


def forget_names() -> None:
    """Have the kernel drop the names and inodes that it has cached."""
    Path("/proc/sys/vm/drop_caches").write_text("2\n")


def write_small(path: str, size: int = 4096) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    os.write(descriptor, bytes(size))
    os.close(descriptor)


def latency_row(
    what: str, seconds: tuple[float, float], reference: str, must: float | None, aim: float | None = None
) -> Row:
    one, other = seconds[0] / BATCH, seconds[1] / BATCH
    return Row(what, time_text(one), f"{reference} {time_text(other)}", one / other, must, aim, "lower")


def requests(mount: KvfsMount, *, bounded: bool) -> Iterator[Row]:
    """Against an empty pyfuse3 handler: the floor of what Python can answer."""
    page = mount.path / "page-0"
    page.write_bytes(os.urandom(2 * MIB))
    wait_sealed(page)
    with empty_handler() as empty:

        def both(call: Callable[[str, int], None]) -> tuple[Call, Call]:
            return batched(partial(call, str(mount.path)), BATCH), batched(partial(call, str(empty)), BATCH)

        opened = alternate(*both(lambda side, _number: open_and_close(side + "/page-0")), rounds=60)
        yield latency_row("open+close of a sealed page", opened, "empty handler", 0.35 if bounded else None)
        missing = alternate(*both(lambda side, number: look_up_missing(f"{side}/missing-{number}")), 60)
        yield latency_row("look-up of a missing name", missing, "empty handler", 1.5)
        yield latency_row("look-up of a name not cached", uncached(mount.path, empty), "empty handler", 1.5)
    page.unlink()


def uncached(directory: Path, empty: Path) -> tuple[float, float]:
    """Median seconds of a batch of look-ups of pages that exist but not in the kernel's cache of names."""
    count = 20 * BATCH
    names = [f"page-{number}" for number in range(1, count + 1)]
    for name in names:
        write_small(f"{directory}/{name}")
    wait_sealed(*(directory / name for name in names), seconds=60)

    def look_up(side: Path) -> Call:
        def call(number: int) -> None:
            for index in range(BATCH):
                os.stat(f"{side}/{names[(number * BATCH + index) % count]}")

        return call

    first, second = [], []
    for _ in range(3):
        forget_names()
        one, other = alternate(look_up(directory), look_up(empty), rounds=18)
        first.append(one)
        second.append(other)
    for name in names:
        os.unlink(directory / name)
    return statistics.median(first), statistics.median(second)


def growth(environment: Mapping[str, str]) -> Iterator[Row]:
    """Two mounts, one with a thousand pages and one with a hundred thousand, called in turn."""
    with (
        scratch_directory() as base,
        KvfsMount(base / "few", 1 << 30, environment=environment) as few,
        KvfsMount(base / "many", 1 << 30, environment=environment) as many,
    ):
        fill(few, 0, FEW)
        fill(many, 0, FEW)
        before = resident_bytes(many.daemon_pid)
        fill(many, FEW, MANY)
        memory = (resident_bytes(many.daemon_pid) - before) / (MANY - FEW)
        yield from compared(few.path, many.path)
        yield from listed(many.path)
        yield Row(
            "daemon memory for a page", f"{memory:.0f} B", f"{MANY} pages of 4 KiB",
            memory, 600, better="lower", unit="B",
        )  # fmt: skip


def fill(mount: KvfsMount, first: int, last: int) -> None:
    for number in range(first, last):
        write_small(f"{mount.path}/{number}")
    wait_until(lambda: not mount.status()["unsealed"], 120, "every page is sealed")


def compared(few: Path, many: Path) -> Iterator[Row]:
    """The same calls where there are few and where there are many pages.

    First on pages that nobody has opened yet, then again and again on those.
    """
    names_few = [str(few / str(number)) for number in random.sample(range(FEW), SAMPLE)]
    names_many = [str(many / str(number)) for number in random.sample(range(MANY), SAMPLE)]

    def pair(call: Callable[[str], None]) -> tuple[Call, Call]:
        first = batched(lambda number: call(names_many[number % SAMPLE]), BATCH)
        second = batched(lambda number: call(names_few[number % SAMPLE]), BATCH)
        return first, second

    def write_and_remove(path: str) -> None:
        write_small(path + "-new")
        os.unlink(path + "-new")

    calls: dict[str, Callable[[str], None]] = {
        "first open+close": open_and_close,
        "open+close": open_and_close,
        "stat": lambda path: void(os.stat(path)),
        "a missing name": lambda path: look_up_missing(f"{path}-{random.random()}"),
        "write and remove 4 KiB": write_and_remove,
    }
    for what, call in calls.items():
        rounds = SAMPLE // BATCH - 1 if what.startswith("first") else 80
        seconds = alternate(*pair(call), rounds)
        yield latency_row(f"{what} at {MANY} pages", seconds, f"at {FEW}", 1.5)


def void(result: object) -> None:
    """Drop a result: a call is timed, not used."""


def listed(directory: Path) -> Iterator[Row]:
    """All names of a directory, and statfs."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        count = len(os.listdir(directory))
        seconds.append(time.perf_counter() - start)
        if count != MANY:
            raise AssertionError(f"{count} names listed instead of {MANY}")
    middle = statistics.median(seconds)
    yield Row(f"readdir of {MANY} names", time_text(middle), "", middle, 2.0, better="lower", unit="s")
    calls = []
    for _ in range(4000):
        start = time.perf_counter()
        os.statvfs(directory)
        calls.append(time.perf_counter() - start)
    slow = percentile(calls, 99)
    yield Row(
        f"statfs at {MANY} pages, 99th percentile", time_text(slow), "", slow * 1e3, 1.0,
        better="lower", unit="ms",
    )  # fmt: skip
