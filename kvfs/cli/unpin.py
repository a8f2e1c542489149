"""``kvfs unpin``: pages that were pinned may leave DRAM again."""

from __future__ import annotations

import errno as numbers
import os

import click

from kvfs.cli.pages import PIN, Failures, ask_each, files_below, mount_of
from kvfs.sizes import format_count


@click.command("unpin", short_help="Let pinned pages go.")
@click.argument("paths", metavar="PATH…", nargs=-1, required=True)
def command(paths: tuple[str, ...]) -> None:
    """Let pages that were pinned leave DRAM again: the files at each PATH, or all below it.

    Those whose time is over expire at once. Only the owner of a file and root may do this.
    """
    count, failures = 0, Failures("unpinned")
    starts = [mount_of(path)[1] for path in paths]
    files = (file for start in starts for file in files_below(start))
    for path, answer in ask_each(files, lambda path: os.removexattr(path, PIN, follow_symlinks=False)):
        if not isinstance(answer, OSError):
            count += 1
        elif answer.errno != numbers.ENODATA:
            failures.note(path, answer)
    print(f"{format_count(count, 'page')} not pinned any more")
    failures.raise_if_any()
