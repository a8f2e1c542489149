"""``kvfs put``: a page from a file or from standard input."""

from __future__ import annotations

from typing import BinaryIO

import click

from kvfs.cli.keys import mount_and_key
from kvfs.errors import KvfsError


@click.command("put", short_help="Store a page.")
@click.argument("path", metavar="PATH")
@click.argument("source", metavar="[FILE]", type=click.File("rb"), default="-")
def command(path: str, source: BinaryIO) -> None:
    """Store a page at PATH from FILE, or from standard input.

    It is there whole or not at all: nobody sees a part of it, and who reads what was there before keeps that.
    Directories on the way are made.
    """
    from kvfs.service.client import connect

    mountpoint, key = mount_and_key(path)
    try:
        content = source.read()
    except OSError as error:
        raise KvfsError(f"{source.name} cannot be read: {error.strerror}") from None
    with connect(mountpoint) as client:
        client.put(key, content)
