"""How fast the mount is: each call against the same call on a raw tmpfs with the same options, in one run.

    python -m benches.mount                       # a table on the terminal
    python -m benches.mount --markdown            # for docs/performance.md
    python -m benches.mount --passthrough off     # without FUSE passthrough, against its own bounds
    python -m benches.mount --only reads,writes   # some of: reads, writes, requests, growth, processes
    python -m benches.mount --idle                # leave processors to fall asleep between two requests

It mounts a kvfs and a tmpfs of its own under a temporary directory and needs root, fuse3 and about 5 GiB of
free memory. Exit code 1 when a value misses its bound.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benches import metadata, processes
from benches.measure import (
    KIB,
    MIB,
    Call,
    OnPath,
    Row,
    alternate,
    awake_processors,
    buffer_of,
    print_table,
    read_fully,
    speed_text,
    time_text,
    write_fully,
)
from tests.mounted.running import KvfsMount, mountinfo, raw_tmpfs, scratch_directory, wait_sealed

GROUPS = ("reads", "writes", "requests", "growth", "processes")
#: Size of a page, and how many rounds make a steady median of it.
SIZES = {256 * KIB: 400, 2 * MIB: 150, 16 * MIB: 40}
#: Pages of each size that are read in turn, so that they do not all sit in the processor's cache.
WORKING_SET = 128 * MIB
POOL = 3 << 30

Bounds = dict[tuple[str, int], tuple[float, float | None]]
PASSTHROUGH_BOUNDS: Bounds = {
    ("mmap read", 16 * MIB): (0.75, 0.9),
    ("read(2)", 16 * MIB): (0.85, 0.95),
    ("write(2) of a new file", 16 * MIB): (0.5, 0.8),
    ("writable mmap of a new file", 16 * MIB): (0.6, 0.8),
    ("mmap read", 2 * MIB): (0.6, 0.75),
    ("read(2)", 2 * MIB): (0.65, 0.8),
}
DAEMON_BOUNDS: Bounds = {
    (what, size): (must, None)
    for size in (2 * MIB, 16 * MIB)
    for what, must in (
        ("mmap read", 0.2),
        ("read(2)", 0.2),
        ("write(2) of a new file", 0.07),
        ("writable mmap of a new file", 0.07),
    )
}


@dataclass(frozen=True, slots=True)
class Sides:
    """The two directories that are compared, and whether files under ``mount`` become pages."""

    mount: Path
    raw: Path
    seals: bool

    def settle(self, *paths: Path) -> None:
        """Wait until the daemon is done with files just written, so that nobody else pays for its work."""
        if self.seals:
            wait_sealed(*(path for path in paths if path.is_relative_to(self.mount)), seconds=60)


def size_text(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def touch_memory(directory: Path, size: int) -> None:
    """Write and remove ``size`` bytes: the first use of memory in a virtual machine is slow."""
    source = buffer_of(16 * MIB)
    paths = [directory / f"touch-{number}" for number in range(size // (16 * MIB))]
    for path in paths:
        write_new(path, source)
    for path in paths:
        path.unlink()


def write_new(path: Path, source: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        write_fully(descriptor, source)
    finally:
        os.close(descriptor)


def write_new_mapped(path: Path, source: memoryview) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.ftruncate(descriptor, len(source))
        with mmap.mmap(descriptor, len(source)) as mapping:
            mapping[:] = source
    finally:
        os.close(descriptor)


def read_whole(path: Path, target: memoryview) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        read_fully(descriptor, target)
    finally:
        os.close(descriptor)


def read_mapped(path: Path, target: memoryview) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with mmap.mmap(descriptor, len(target), prot=mmap.PROT_READ) as mapping:
            target[:] = mapping
    finally:
        os.close(descriptor)


def cycling(call: OnPath, paths: list[Path], buffer: memoryview) -> Call:
    """The call on one path after the other, round by round."""
    return lambda number: call(paths[number % len(paths)], buffer)


def throughput_row(what: str, size: int, seconds: tuple[float, float], bounds: Bounds) -> Row:
    must, aim = bounds.get((what, size), (None, None))
    mount, raw = (f"{speed_text(size, value)}, {time_text(value)}" for value in seconds)
    return Row(f"{what}, {size_text(size)}", mount, f"tmpfs {raw}", seconds[1] / seconds[0], must, aim)


def reads(sides: Sides, bounds: Bounds) -> Iterator[Row]:
    """Open, copy the bytes out, close; by a mapping and by read(2)."""
    calls: dict[str, OnPath] = {"mmap read": read_mapped, "read(2)": read_whole}
    for size, rounds in SIZES.items():
        count = max(4, min(64, WORKING_SET // size))
        target, source = buffer_of(size), buffer_of(size)
        here, there = ([side / f"read-{n}" for n in range(count)] for side in (sides.mount, sides.raw))
        for path in (*here, *there):
            write_new(path, source)
        sides.settle(*here)
        for what, call in calls.items():
            seconds = alternate(cycling(call, here, target), cycling(call, there, target), rounds)
            if target != source:
                raise AssertionError(f"{what}: the bytes read are not the bytes written")
            yield throughput_row(what, size, seconds, bounds)
        for path in (*here, *there):
            path.unlink()


def writes(sides: Sides, bounds: Bounds) -> Iterator[Row]:
    """Create, fill, close; the file is sealed and removed outside the timing."""
    calls: dict[str, OnPath] = {
        "write(2) of a new file": write_new,
        "writable mmap of a new file": write_new_mapped,
    }
    here, there = sides.mount / "new", sides.raw / "new"

    def remove(number: int) -> None:
        for path in (here, there):
            if path.exists():
                sides.settle(path)
                path.unlink()

    for size, rounds in SIZES.items():
        source = buffer_of(size)
        for what, call in calls.items():
            pair = cycling(call, [here], source), cycling(call, [there], source)
            seconds = alternate(*pair, min(rounds, 60), after=remove)
            yield throughput_row(what, size, seconds, bounds)


@contextlib.contextmanager
def two_mounts(passthrough: str) -> Iterator[tuple[Sides, KvfsMount]]:
    """A kvfs, and a tmpfs with the options of its DRAM tier."""
    environment = {"KVFS_PASSTHROUGH": passthrough}
    with scratch_directory() as base, KvfsMount(base / "kvfs", POOL, environment=environment) as mount:
        options = "huge=within_size,noatime,nosuid,nodev,size=" + str(POOL)
        if entries := mountinfo(mount.dram):
            options = f"{entries[0][5]},{entries[0][-1]}"
        with raw_tmpfs(base / "raw", options) as raw:
            yield Sides(mount.path, raw, seals=True), mount


def measure(sides: Sides, mount: KvfsMount | None, groups: list[str], bounds: Bounds) -> Iterator[Row]:
    for side in (sides.mount, sides.raw):
        touch_memory(side, 1 << 30)
    if "reads" in groups:
        yield from reads(sides, bounds)
    if "writes" in groups:
        yield from writes(sides, bounds)
    if "processes" in groups:
        yield from processes.rows(sides.mount, sides.raw, sides.settle, write_new, read_mapped)
    if mount is None:
        return
    if "requests" in groups:
        yield from metadata.requests(mount, bounded=bounds is PASSTHROUGH_BOUNDS)
    if "growth" in groups:
        yield from metadata.growth(mount.environment)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benches.mount", description=__doc__.split("\n")[0])
    parser.add_argument("--passthrough", choices=["auto", "off"], default="auto")
    parser.add_argument("--only", default=",".join(GROUPS), help="groups of rows, separated by commas")
    parser.add_argument(
        "--directories",
        nargs=2,
        type=Path,
        metavar=("FIRST", "SECOND"),
        help="compare two directories that exist, as they are",
    )
    parser.add_argument("--idle", action="store_true", help="let processors that have nothing to do sleep")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", dest="form", action="store_const", const="markdown")
    form.add_argument("--json", dest="form", action="store_const", const="json")
    arguments = parser.parse_args()
    groups = arguments.only.split(",")
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"--only knows {', '.join(GROUPS)}; not {', '.join(sorted(unknown))}")
    bounds = DAEMON_BOUNDS if arguments.passthrough == "off" else PASSTHROUGH_BOUNDS
    with contextlib.nullcontext(False) if arguments.idle else awake_processors() as awake:
        return run(arguments, groups, bounds, awake)


def run(arguments: argparse.Namespace, groups: list[str], bounds: Bounds, awake: bool) -> int:
    """Measure and print; the exit code."""
    kept = "kept awake" if awake else "left to sleep"
    machine = f"{os.cpu_count()} processors {kept}, Linux {platform.release()}"
    rows = []
    if arguments.directories:
        first, second = arguments.directories
        sides = Sides(first, second, seals=False)
        title = f"{sides.mount} and {sides.raw}, {machine}"
        for row in measure(sides, None, groups, bounds):
            rows.append(row)
            print(*row.cells(), sep="  ", file=sys.stderr, flush=True)
    else:
        with two_mounts(arguments.passthrough) as (sides, mount):
            state = "with" if mount.passthrough else "without"
            title = f"Mount against tmpfs, {state} passthrough, {machine}"
            if mount.passthrough == (arguments.passthrough == "off"):
                sys.exit(f"passthrough: {mount.status()['passthrough']}")
            for row in measure(sides, mount, groups, bounds):
                rows.append(row)
                print(*row.cells(), sep="  ", file=sys.stderr, flush=True)
    print_table(title, rows, arguments.form or "table")
    return int(any(row.verdict == "MISS" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
