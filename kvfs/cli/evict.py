"""``kvfs evict``: pages leave DRAM, to the SSD if there is one."""

from __future__ import annotations

import errno as numbers
import os

import click

from kvfs.cli.pages import EVICT, PIN, Failures, ask_each, files_below, mount_of, request, shown
from kvfs.errors import Busy
from kvfs.sizes import format_count


@click.command("evict", short_help="Have pages leave DRAM.")
@click.argument("paths", metavar="PATH…", nargs=-1, required=True)
def command(paths: tuple[str, ...]) -> None:
    """Have pages leave DRAM: the files at each PATH, or all below it. With an SSD they are copied there
    first; without one they are gone from the mount.

    A page that somebody has open or mapped, or that is pinned, stays, and so does a file that is being
    written: they are named, and the exit code is 7. Only the owner of a file and root may do this.
    """
    starts = [mount_of(path)[1] for path in paths]
    left, in_use, failures = 0, 0, Failures("evicted")
    files = (file for start in starts for file in files_below(start))
    for path, answer in ask_each(files, request(EVICT, b"1")):
        if not isinstance(answer, OSError):
            left += 1
        elif answer.errno == numbers.EBUSY:
            in_use += 1
            print(f"{shown(path)}: {_reason(path)}")
        else:
            failures.note(path, answer)
    print(f"{format_count(left, 'page')} not in DRAM any more")
    failures.raise_if_any()
    if in_use:
        raise Busy(f"{format_count(in_use, 'file')} in use: they stay in DRAM")


def _reason(path: str) -> str:
    """Why a page stays."""
    try:
        os.getxattr(path, PIN)
    except OSError:
        return "in use"
    return "pinned"
