"""``kvfs pin``: pages stay in DRAM, whatever else comes."""

from __future__ import annotations

import errno as numbers
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import click

from kvfs.cli.control import read_status
from kvfs.cli.pages import PIN, Failures, File, ask_each, files_below, mount_of, progress, request, sizes_of
from kvfs.errors import TooManyPins
from kvfs.sizes import format_count, format_size


@click.command("pin", short_help="Keep pages in DRAM.")
@click.argument("paths", metavar="PATH…", nargs=-1, required=True)
def command(paths: tuple[str, ...]) -> None:
    """Keep pages in DRAM until kvfs unpin lets them go: the files at each PATH, or all that are below it now.
    Pages that are only on the SSD are brought in.

    They are not evicted from either tier, and do not expire. rm, mv over them and overwriting work as ever.
    More than the mount allows (--pin-percent) is refused before anything is pinned. Only the owner of a file
    and root may do this.
    """
    failures = Failures("pinned")
    missing: dict[str, int] = {}
    wanted: Counter[Path] = Counter()
    for text in paths:
        mountpoint, start = mount_of(text)
        for file, size in _look(files_below(start), failures):
            wanted[mountpoint] += size if file.path not in missing else 0
            missing[file.path] = size
    for mountpoint, size in wanted.items():
        _require_budget(mountpoint, size)
    count = pinned = 0
    with progress("pinning", len(missing)) as advance:
        for path, answer in ask_each(map(File, missing), request(PIN, b"1")):
            advance()
            if isinstance(answer, OSError):
                failures.note(path, answer)
            else:
                count += 1
                pinned += missing[path]
    print(f"{format_count(count, 'page')} pinned, {format_size(pinned)}")
    failures.raise_if_any()


def _look(files: Iterable[File], failures: Failures) -> list[tuple[File, int]]:
    """Those that are not pinned, each with its size in bytes."""

    def look(path: str) -> int:
        try:
            os.getxattr(path, PIN)
        except OSError as error:
            if error.errno != numbers.ENODATA:
                raise
            return os.lstat(path).st_size
        return -1

    return sizes_of(files, look, failures)


def _require_budget(mountpoint: Path, size: int) -> None:
    pinned = read_status(mountpoint)["pinned"]
    budget, taken = pinned["budget_bytes"], pinned["bytes"]
    if taken + size > budget:
        raise TooManyPins(
            f"{format_size(size)} more cannot be pinned: {mountpoint} allows {format_size(budget)}, of which "
            f"{format_size(taken)} are taken; unpin some, or mount it with a larger --pin-percent"
        )
