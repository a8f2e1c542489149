"""How fast pages move between an SSD and DRAM: against fio on the same disk, in one run.

    python -m benches.ssd                        # a table on the terminal; the disk that --directory is on
    python -m benches.ssd --markdown             # for docs/performance.md
    python -m benches.ssd --path uring           # another way to move them: direct, uring, cufile
    python -m benches.ssd --directory /nvme/kv   # another disk

Promoting: programs ask a mount for pages that only the SSD has, until all are in DRAM and were compared with
their digests. Demoting: they ask it to evict pages that only DRAM has. Copying up and down is the part of it
that moves the bytes, and computes the digest, without a mount: some pages at once, as a mount does it. fio
only reads or writes one file, with O_DIRECT and one job, in requests of a page's size, the better of iodepth
1 and 8. At last a mount starts with many small pages on its SSD.

Files stay until the end: for half a minute after files were deleted, ext4 takes a millisecond to make one.

It needs root, fio, 16 GiB of disk and 4 GiB of free memory. Exit code 1 when a value misses its bound.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benches.measure import MIB, Row, buffer_of, print_table, write_fully
from benches.restart import measure_restarts
from benches.ssd_mount import MountedPages, measure_hits, mount_with_ssd
from kvfs import mounts, syscalls
from kvfs.copies.choosing import READ_PATHS, Copies, choose
from kvfs.interleaved import Work, interleave
from kvfs.page import Digest, digest_of
from kvfs.storage.promotion import READERS
from kvfs.storage.writing import INTERLEAVED
from kvfs.tiers.ssd_directory import allocate
from tests.mounted.running import raw_tmpfs, scratch_directory

SIZES = (2 * MIB, 16 * MIB)
#: Bytes that are read or written each time.
WORKING_SET = 512 * MIB
ROUNDS = 5
DEPTHS = (1, 8)
MUST = 0.8

TMPFS = f"huge=within_size,noatime,nosuid,nodev,size={1 << 30}"


@dataclass(slots=True)
class Sides:
    """Where pages lie, and what moves them."""

    ssd: Path
    dram: Path
    copies: Copies
    size: int
    content: memoryview
    digest: Digest = field(init=False)
    rounds: int = 0

    def __post_init__(self) -> None:
        self.digest = digest_of(self.content)

    @property
    def numbers(self) -> range:
        return range(WORKING_SET // self.size)

    def page(self, number: int) -> Path:
        return self.ssd / str(self.rounds) / str(number)

    @contextlib.contextmanager
    def new_in_dram(self) -> Iterator[int]:
        """A file of a page's size that has its memory, as a mount makes one."""
        with closing(os.open(self.dram, os.O_TMPFILE | os.O_RDWR, 0o600)) as fd:
            os.ftruncate(fd, self.size)
            syscalls.fallocate(fd, 0, 0, self.size)
            yield fd

    def promote(self, number: int) -> None:
        flags = os.O_RDONLY | os.O_DIRECT
        with closing(os.open(self.page(number), flags)) as source, self.new_in_dram() as target:
            self.check(self.copies.read(source, target, self.size))

    def demote(self, number: int, source: int) -> Work[None]:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT
        with closing(os.open(self.page(number), flags, 0o600)) as fd:
            allocate(fd, self.size)
            self.check((yield from self.copies.write(source, fd, self.size)))

    def check(self, digest: Digest) -> None:
        if digest != self.digest:
            raise AssertionError(f"{digest} was moved, not {self.digest}")

    def promote_all(self) -> float:
        """Bytes a second."""
        return self._rate(self.promote, READERS)

    def demote_all(self) -> float:
        """Bytes a second, to new files in a new directory."""
        self.rounds += 1
        (self.ssd / str(self.rounds)).mkdir()
        with self.new_in_dram() as source:
            write_fully(source, self.content)
            start = time.perf_counter()
            for result in interleave((self.demote(number, source) for number in self.numbers), INTERLEAVED):
                result.unwrap()
            return WORKING_SET / (time.perf_counter() - start)

    def _rate(self, move: Callable[[int], None], at_once: int) -> float:
        with ThreadPoolExecutor(at_once) as threads:
            start = time.perf_counter()
            for _ in threads.map(move, self.numbers):
                pass
            return WORKING_SET / (time.perf_counter() - start)


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


def fio(directory: Path, what: str, size: int, depth: int) -> float:
    """Bytes a second of "read" or "write"; writing makes a new file each time."""
    options = {
        "name": what,
        "filename": directory / f"fio-{what}",
        "rw": what,
        "size": WORKING_SET,
        "bs": size,
        "iodepth": depth,
        "numjobs": 1,
        "direct": 1,
        "ioengine": "libaio",
        "unlink": int(what == "write"),
        "output-format": "json",
    }
    command = ["fio", *(f"--{option}={value}" for option, value in options.items())]
    result: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return float(result["jobs"][0][what]["bw_bytes"])


def compare(sides: Sides, what: str, move: Callable[[], float]) -> tuple[float, int, float]:
    """Median bytes a second: ours, and fio's with the depth at which it is fastest. We take turns."""
    ours: list[float] = []
    theirs: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    for number in range(ROUNDS):
        if number % 2:
            ours.append(move())
        for depth, rates in theirs.items():
            rates.append(fio(sides.ssd, what, sides.size, depth))
        if not number % 2:
            ours.append(move())
    medians = {depth: statistics.median(rates) for depth, rates in theirs.items()}
    best = max(DEPTHS, key=medians.__getitem__)
    return statistics.median(ours), best, medians[best]


def measure(sides: Sides, pages: MountedPages) -> Iterator[Row]:
    """Demoting first: it makes the pages that promoting reads."""
    for verb, what, move in (
        ("demote", "write", pages.demote_all),
        ("promote", "read", pages.promote_all),
        ("copy down", "write", sides.demote_all),
        ("copy up", "read", sides.promote_all),
    ):
        ours, depth, theirs = compare(sides, what, move)
        reference = f"fio {what} {theirs / 1e9:.2f} GB/s, iodepth {depth}"
        yield Row(
            f"{verb}, {sides.size // MIB} MiB", f"{ours / 1e9:.2f} GB/s", reference, ours / theirs, MUST
        )


def shown(rows: Iterable[Row]) -> Iterator[Row]:
    """The same rows, each told on stderr as soon as it is measured."""
    for row in rows:
        print(*row.cells(), sep="  ", file=sys.stderr, flush=True)
        yield row


def title(directory: Path, copies: Copies) -> str:
    """What was measured, and on what."""
    entry = mounts.filesystem_with(os.stat(directory).st_dev)
    used = copies.statistics()
    path = f"{used.path} ({used.mode})" if used.mode else used.path
    machine = f"{os.cpu_count()} processors, Linux {platform.release()}"
    at_once = f"{READERS} promoted or {INTERLEAVED} demoted at once"
    disk = f"{entry.fstype} on {entry.source}" if entry else "a disk"
    return f"Pages by {path} on {disk}, {at_once}, {machine}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benches.ssd", description=__doc__.split("\n")[0])
    parser.add_argument("--path", choices=READ_PATHS, default="auto")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", dest="form", action="store_const", const="markdown")
    form.add_argument("--json", dest="form", action="store_const", const="json")
    arguments = parser.parse_args()
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(dir=arguments.directory, prefix="kvfs-ssd-") as made,
        scratch_directory() as base,
        raw_tmpfs(base / "dram", TMPFS) as dram,
        closing(os.open(made, os.O_RDONLY)) as directory,
        contextlib.closing(choose(arguments.path, directory)) as copies,
        mount_with_ssd(base, Path(made) / "kvfs", arguments.path) as mount,
    ):
        # First, while the memory of both mounts is as new: what was used before is in smaller pieces.
        rows += shown(measure_hits(mount, base, buffer_of(max(SIZES))))
        for size in SIZES:
            place = Path(made) / str(size)
            place.mkdir()
            sides = Sides(place, dram, copies, size, buffer_of(size))
            rows += shown(measure(sides, MountedPages(mount, size, sides.content, WORKING_SET)))
        rows += shown(measure_restarts(base, Path(made) / "restart"))
        print_table(title(place, copies), rows, arguments.form or "table")
    return int(any(row.verdict == "MISS" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
