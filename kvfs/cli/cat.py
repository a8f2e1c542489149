"""``kvfs cat``: pages to standard output, one after the other."""

from __future__ import annotations

import sys

import click

from kvfs.cli.keys import mount_and_key


@click.command("cat", short_help="Write pages to standard output.")
@click.argument("paths", metavar="PATH…", nargs=-1, required=True)
def command(paths: tuple[str, ...]) -> None:
    """Write the pages at each PATH to standard output, in this order.

    Ends at the first that is not there, with exit code 1.
    """
    from kvfs.service.client import connect

    for path in paths:
        mountpoint, key = mount_and_key(path)
        with connect(mountpoint) as client:
            sys.stdout.buffer.write(client.get(key))
