"""``kvfs prefetch``: pages come up from the SSD into DRAM before somebody needs them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import click

from kvfs.cli.control import read_status
from kvfs.cli.pages import (
    PREFETCH,
    TIER,
    Failures,
    File,
    ask_each,
    files_below,
    mount_of,
    progress,
    sizes_of,
)
from kvfs.errors import UsageError
from kvfs.sizes import format_count, format_size


@click.command("prefetch", short_help="Bring pages into DRAM.")
@click.argument("paths", metavar="PATH…", nargs=-1, required=True)
def command(paths: tuple[str, ...]) -> None:
    """Bring pages from the SSD into DRAM: the files at each PATH, or all below it.

    Others are evicted for them, as for any read. More than DRAM can hold at once is refused before anything
    is read.
    """
    failures = Failures("brought into DRAM")
    missing: list[File] = []
    sizes: Counter[Path] = Counter()
    for text in paths:
        mountpoint, start = mount_of(text)
        for file, size in _look(files_below(start), failures):
            missing.append(file)
            sizes[mountpoint] += size
    for mountpoint, size in sizes.items():
        _require_room(mountpoint, size)
    count = 0
    with progress("prefetching", len(missing)) as advance:
        for path, answer in ask_each(missing, lambda path: os.getxattr(path, PREFETCH)):
            advance()
            if isinstance(answer, OSError):
                failures.note(path, answer)
            else:
                count += 1
    print(f"{format_count(count, 'page')} brought into DRAM")
    failures.raise_if_any()


def _look(files: Iterable[File], failures: Failures) -> list[tuple[File, int]]:
    """Those that are on the SSD only, each with its size in bytes."""

    def look(path: str) -> int:
        return os.lstat(path).st_size if os.getxattr(path, TIER) != b"dram" else -1

    return sizes_of(files, look, failures)


def _require_room(mountpoint: Path, size: int) -> None:
    dram = read_status(mountpoint)["tiers"]["dram"]
    room = dram["capacity_bytes"] - dram["reserve_bytes"]
    if size > room:
        raise UsageError(
            f"{format_size(size)} are only on the SSD, and DRAM holds {format_size(room)}: name fewer pages"
        )
