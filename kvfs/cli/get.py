"""``kvfs get``: a page to a file or to standard output."""

from __future__ import annotations

import sys

import click

from kvfs.cli.keys import mount_and_key
from kvfs.errors import KvfsError


@click.command("get", short_help="Read a page.")
@click.argument("path", metavar="PATH")
@click.argument("target", metavar="[FILE]", default="-")
def command(path: str, target: str) -> None:
    """Write the page at PATH to FILE, or to standard output.

    FILE is not touched where there is no such page.
    """
    from kvfs.service.client import connect

    mountpoint, key = mount_and_key(path)
    with connect(mountpoint) as client:
        content = client.get(key)
    if target == "-":
        sys.stdout.buffer.write(content)
        return
    try:
        with open(target, "wb") as file:
            file.write(content)
    except OSError as error:
        raise KvfsError(f"{target} cannot be written: {error.strerror}") from None
