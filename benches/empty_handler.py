"""The emptiest filesystem that pyfuse3 allows: what a request costs before anyone does any work.

Run as ``python -m benches.empty_handler MOUNTPOINT``. Every name that starts with ``page-`` is a file of
2 MiB; no other name exists. It serves until it is unmounted.
"""

from __future__ import annotations

import errno
import stat
import sys

import pyfuse3
import trio

ROOT = 1
SIZE = 2 << 20


def _attributes(inode: int) -> pyfuse3.EntryAttributes:
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = inode
    entry.st_mode = stat.S_IFDIR | 0o755 if inode == ROOT else stat.S_IFREG | 0o644
    entry.st_nlink = 1
    entry.st_size = SIZE
    entry.entry_timeout = 300
    entry.attr_timeout = 300
    return entry


class EmptyHandler(pyfuse3.Operations):
    """Answers at once, from nothing."""

    async def lookup(
        self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext | None = None
    ) -> pyfuse3.EntryAttributes:
        if not name.startswith(b"page-"):
            raise pyfuse3.FUSEError(errno.ENOENT)
        return _attributes(2 + int(name[5:]))

    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext | None = None) -> pyfuse3.EntryAttributes:
        return _attributes(inode)

    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=inode)

    async def release(self, fh: int) -> None:
        return None


def main() -> None:
    """Mount on the first argument and serve."""
    pyfuse3.init(EmptyHandler(), sys.argv[1], {*pyfuse3.default_options, "fsname=empty-handler"})
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=False)


if __name__ == "__main__":
    main()
