"""A block device that fails or hangs on demand: ``python -m tests.faults.sick_device DIRECTORY IMAGE``.

It is a double of a failing disk. DIRECTORY gets a FUSE filesystem with one file, ``disk``, whose bytes are
those of IMAGE; a loop device on that file is a block device, and the filesystem on it is a real one. Each
line on stdin is a mood, and is answered by a line on stdout once it holds; at the end of stdin it ends.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path

import pyfuse3
import trio

MOODS = ("well", "fails", "fails-to-write", "hangs")
NAME = b"disk"
_FILE = pyfuse3.ROOT_INODE + 1


class SickDisk(pyfuse3.Operations):
    """One file. While it hangs, requests wait until the mood changes."""

    def __init__(self, image: int) -> None:
        super().__init__()
        self._image = image
        self._mood = "well"
        self._changed = trio.Event()

    def be(self, mood: str) -> None:
        self._mood = mood
        self._changed.set()
        self._changed = trio.Event()

    async def _suffer(self, *, writing: bool) -> None:
        while self._mood == "hangs":
            await self._changed.wait()
        if self._mood == "fails" or (writing and self._mood == "fails-to-write"):
            raise pyfuse3.FUSEError(errno.EIO)

    async def getattr(self, inode: int, ctx: object = None) -> pyfuse3.EntryAttributes:
        attributes = pyfuse3.EntryAttributes()
        attributes.st_ino = inode
        is_root = inode == pyfuse3.ROOT_INODE
        attributes.st_mode = stat.S_IFDIR | 0o700 if is_root else stat.S_IFREG | 0o600
        attributes.st_size = 0 if is_root else os.fstat(self._image).st_size
        return attributes

    async def lookup(self, parent: int, name: bytes, ctx: object) -> pyfuse3.EntryAttributes:
        if name != NAME:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return await self.getattr(_FILE)

    async def open(self, inode: int, flags: int, ctx: object) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=_FILE, direct_io=True)

    async def read(self, handle: int, offset: int, size: int) -> bytes:
        await self._suffer(writing=False)
        return os.pread(self._image, size, offset)

    async def write(self, handle: int, offset: int, content: bytes) -> int:
        await self._suffer(writing=True)
        return os.pwrite(self._image, content, offset)

    async def fsync(self, handle: int, datasync: bool) -> None:
        await self._suffer(writing=True)


async def _listen(disk: SickDisk) -> None:
    async with trio.lowlevel.FdStream(os.dup(0)) as stream:
        rest = b""
        while part := await stream.receive_some():
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                disk.be(line.decode())
                print("so it is", flush=True)
    disk.be("well")
    pyfuse3.terminate()


async def _serve(disk: SickDisk) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_listen, disk)
        await pyfuse3.main()
        nursery.cancel_scope.cancel()


def main() -> None:
    directory, image = map(Path, sys.argv[1:])
    disk = SickDisk(os.open(image, os.O_RDWR))
    pyfuse3.init(disk, str(directory), {"fsname=kvfs-test-disk"})
    print("so it is", flush=True)
    try:
        trio.run(_serve, disk)
    finally:
        pyfuse3.close()


if __name__ == "__main__":
    main()
