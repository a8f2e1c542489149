"""How fast the Python client is: against copies of the same bytes in memory, and plain files, in one run.

    python -m benches.client                    # a table on the terminal
    python -m benches.client --markdown         # for docs/performance.md
    python -m benches.client --only bytes,keys  # some of: bytes, keys, growth

What is read is always far larger than the processor's caches. It mounts a kvfs and a tmpfs of its own under a
temporary directory and needs root, fuse3 and about 4 GiB of free memory. Exit code 1 when a value misses its
bound.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import kvfs
from benches.measure import (
    MIB,
    Call,
    Row,
    alternate,
    awake_processors,
    buffer_of,
    print_table,
    speed_text,
    time_text,
)
from benches.mount import read_whole, touch_memory, write_new
from kvfs.service.client import Client
from tests.mounted.running import KvfsMount, raw_tmpfs, scratch_directory, wait_sealed

GROUPS = ("bytes", "keys", "growth")
PAGE = 2 * MIB
PAGES = 128
"""Of what is read in turn: 256 MiB."""
TARGETS = 8
"""Buffers that are filled in turn, touched before."""
ROUNDS = 150
BATCH = 128
MANY = 100_000
FEW = 1_000
POOL = 2 << 30


def pieces(count: int) -> list[memoryview]:
    """So many buffers of one page each, side by side."""
    whole = buffer_of(count * PAGE)
    return [whole[start : start + PAGE] for start in range(0, count * PAGE, PAGE)]


def pass_by(number: int) -> None:
    """Nothing to be done after a call."""


def against_memory(
    what: str,
    call: Call,
    copy: Call,
    must: float | None = None,
    aim: float | None = None,
    after: Call = pass_by,
) -> Row:
    """A row for a call that moves one page, against copying one."""
    seconds, reference = alternate(call, copy, ROUNDS, after=after)
    return Row(
        what,
        f"{speed_text(PAGE, seconds)}, {time_text(seconds)}",
        f"memcpy {speed_text(PAGE, reference)}, {time_text(reference)}",
        reference / seconds,
        must,
        aim,
    )


def moved_bytes(client: Client, mount: Path, raw: Path) -> Iterator[Row]:
    """Pages of 2 MiB, one at a time: each way of moving them against a copy from cold to touched memory."""
    sources, targets = pieces(PAGES), pieces(TARGETS)
    keys = [f"bytes/{number}" for number in range(PAGES)]
    for key, source in zip(keys, sources, strict=True):
        client.put(key, source)
    wait_sealed(*(mount / key for key in keys), seconds=60)
    (raw / "bytes").mkdir()
    for key, source in zip(keys, sources, strict=True):
        write_new(raw / key, source)

    def copy(number: int) -> None:
        targets[number % TARGETS][:] = sources[(number + PAGES // 2) % PAGES]

    def get_into(number: int) -> None:
        client.get_into(keys[number % PAGES], targets[number % TARGETS])

    def get(number: int) -> None:
        client.get(keys[number % PAGES])

    def read_batch(number: int) -> None:
        key = keys[number % PAGES]
        with client.open_batch([key]) as pages:
            pages.read_into(key, targets[number % TARGETS])

    def read_mapped(number: int) -> None:
        key = keys[number % PAGES]
        with client.open_batch([key]) as pages:
            targets[number % TARGETS][:] = pages[key]

    def read_plain(number: int) -> None:
        read_whole(raw / keys[number % PAGES], targets[number % TARGETS])

    def put(number: int) -> None:
        client.put("bytes/new", sources[number % PAGES])

    def write_plain(number: int) -> None:
        write_new(raw / "bytes/new", sources[number % PAGES])

    def settle(number: int) -> None:
        if client.exists("bytes/new"):
            wait_sealed(mount / "bytes/new")
            client.delete(["bytes/new"])
        (raw / "bytes/new").unlink(missing_ok=True)

    yield against_memory("get_into, 2 MiB", get_into, copy, 0.9)
    if targets[0] not in sources:
        raise AssertionError("the bytes got are not the bytes put")
    yield against_memory("get, 2 MiB", get, copy)
    yield against_memory("open_batch and read_into of one, 2 MiB", read_batch, copy)
    yield against_memory("open_batch and copy of one mapping, 2 MiB", read_mapped, copy)
    yield against_memory("tmpfs: open, read, close, 2 MiB", read_plain, copy)
    yield against_memory("put, 2 MiB", put, copy, 0.6, 0.9, settle)
    yield against_memory("tmpfs: create, write, close, 2 MiB", write_plain, copy, after=settle)
    client.delete(keys)


def median_seconds(call: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Of one call; what it returns is let go outside the timing."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        result = call()
        found.append(time.perf_counter() - start)
        if isinstance(result, contextlib.AbstractContextManager):
            result.__exit__(None, None, None)
    return statistics.median(found)


def store_many(mount: Path, count: int) -> list[str]:
    """So many small pages; their keys."""
    keys = [f"keys/{number // 1000:03}/{number:064x}" for number in range(count)]
    for number, key in enumerate(keys):
        path = mount / key
        if number % 1000 == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"page")
    wait_sealed(mount / keys[-1], seconds=60)
    return keys


def asked(client: Client, keys: list[str]) -> dict[str, float]:
    """Median seconds of what can be asked about 128 keys at once."""
    some = keys[:: len(keys) // BATCH][:BATCH]
    return {
        f"exists of {BATCH} keys": median_seconds(lambda: client.exists(some)),
        f"match_prefix of {BATCH} keys": median_seconds(lambda: client.match_prefix(some)),
        f"open of {BATCH} keys": median_seconds(lambda: client.open_batch(some)),
    }


BOUNDS_US = {f"exists of {BATCH} keys": 120.0, f"open of {BATCH} keys": 450.0}
WITHIN = 1.3


def many_keys(client: Client, mount: Path, groups: list[str]) -> Iterator[Row]:
    """What 128 keys at once cost, and whether that stays so with 100,000 pages."""
    keys = store_many(mount, FEW)
    few = asked(client, keys)
    for what, seconds in few.items():
        yield Row(what, time_text(seconds), "", seconds * 1e6, BOUNDS_US.get(what), better="lower", unit="µs")
    some = keys[:BATCH]

    def mapped() -> object:
        pages = client.open_batch(some)
        pages.map()
        return pages

    seconds = median_seconds(mapped)
    yield Row(
        f"open and map of {BATCH} keys", time_text(seconds), "", seconds * 1e6, better="lower", unit="µs"
    )
    if "growth" in groups:
        many = asked(client, store_many(mount, MANY))
        for what, before in few.items():
            yield Row(
                f"{what} at {MANY} pages",
                time_text(many[what]),
                f"at {FEW} {time_text(before)}",
                many[what] / before,
                WITHIN,
                better="lower",
            )


def measure(client: Client, mount: Path, raw: Path, groups: list[str]) -> Iterator[Row]:
    for side in (mount, raw):
        touch_memory(side, 1 << 30)
    if "bytes" in groups:
        yield from moved_bytes(client, mount, raw)
    if "keys" in groups or "growth" in groups:
        yield from many_keys(client, mount, groups)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benches.client", description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(GROUPS), help="groups of rows, separated by commas")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", dest="form", action="store_const", const="markdown")
    form.add_argument("--json", dest="form", action="store_const", const="json")
    arguments = parser.parse_args()
    groups = arguments.only.split(",")
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"--only knows {', '.join(GROUPS)}; not {', '.join(sorted(unknown))}")
    rows = []
    with (
        awake_processors(),
        scratch_directory() as base,
        KvfsMount(base / "kvfs", POOL) as mount,
        raw_tmpfs(base / "raw", f"huge=within_size,noatime,size={POOL}") as raw,
        kvfs.connect(mount.path) as client,
    ):
        title = f"Client against memory, {os.cpu_count()} processors, Linux {platform.release()}"
        for row in measure(client, mount.path, raw, groups):
            rows.append(row)
            print(*row.cells(), sep="  ", file=sys.stderr, flush=True)
    print_table(title, rows, arguments.form or "table")
    return int(any(row.verdict == "MISS" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
