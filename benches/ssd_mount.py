"""How fast a mount moves pages between an SSD and DRAM, and what a hit in DRAM costs with an SSD."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benches.measure import MIB, Row, alternate, awake_processors, time_text
from kvfs.storage.promotion import READERS
from tests.mounted.running import KvfsMount, wait_sealed

POOL = 1536 * MIB
#: Programs that ask at once: more than are read at once, so that the disk need not wait for the next.
PROGRAMS = 2 * READERS
HIT_SIZES = (256 << 10, 2 * MIB)
HIT_ROUNDS = 400
#: Both are the same code; what is allowed is noise.
HIT_MUST = 1.1


def mount_with_ssd(base: Path, ssd: Path, read_path: str) -> KvfsMount:
    """A mount that copies nothing by itself: only what is evicted goes down."""
    options = ("--settle", "0s", "--ssd-write-delay", "1h", "--ssd-read-path", read_path)
    return KvfsMount(base / "with", POOL, "--ssd", str(ssd), "--ssd-capacity", "50%", *options)


@dataclass(slots=True)
class MountedPages:
    """Pages of one size in a mount, some hundreds of MiB of them at a time."""

    mount: KvfsMount
    size: int
    content: memoryview
    working_set: int
    rounds: int = 0

    @property
    def paths(self) -> list[Path]:
        """The pages that were stored last."""
        directory = self.mount.path / f"{self.size}-{self.rounds}"
        return [directory / str(number) for number in range(self.working_set // self.size)]

    def demote_all(self) -> float:
        """Bytes a second: new pages are evicted, by programs that ask for it all at once."""
        self.rounds += 1
        self.paths[0].parent.mkdir()
        for path in self.paths:
            with open(path, "wb", buffering=0) as file:
                file.write(self.content)
        wait_sealed(*self.paths, seconds=60)
        return self._rate(self._evict)

    def promote_all(self) -> float:
        """Bytes a second: the pages that were stored last come back."""
        for path in self.paths:
            self._evict(path)
        return self._rate(lambda path: os.getxattr(path, "user.kvfs.prefetch"))

    @staticmethod
    def _evict(path: Path) -> None:
        os.setxattr(path, "user.kvfs.evict", b"1")

    def _rate(self, ask: Callable[[Path], object]) -> float:
        with ThreadPoolExecutor(PROGRAMS) as programs:
            start = time.perf_counter()
            for _ in programs.map(ask, self.paths):
                pass
            return self.working_set / (time.perf_counter() - start)


def measure_hits(mount: KvfsMount, base: Path, content: memoryview) -> Iterator[Row]:
    """Opening, reading and closing a page in DRAM, with an SSD and without, in turn."""
    with KvfsMount(base / "without", 256 * MIB) as other, awake_processors():
        for size in HIT_SIZES:
            both = [one.path / f"hit-{size}" for one in (mount, other)]
            for path in both:
                path.write_bytes(content[:size])
            wait_sealed(*both)
            ours, theirs = alternate(_reader(both[0]), _reader(both[1]), HIT_ROUNDS)
            yield Row(
                f"a hit in DRAM, {size >> 10} KiB",
                time_text(ours),
                f"without an SSD {time_text(theirs)}",
                ours / theirs,
                HIT_MUST,
                better="lower",
            )


def _reader(path: Path) -> Callable[[int], None]:
    buffer = bytearray(path.stat().st_size)

    def read(_: int) -> None:
        with open(path, "rb", buffering=0) as file:
            file.readinto(buffer)

    return read
