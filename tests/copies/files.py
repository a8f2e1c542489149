"""Files that pages are moved between."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

MIB = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)

SIZES = (
    *(0, 1, 511, 4095, 4096, 4097, 12345),
    *(2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 8 * MIB, 16 * MIB, 17 * MIB + 4097),
)
"""Bytes: around blocks, around chunks, and around as many chunks as are on their way at once."""


@contextlib.contextmanager
def in_memory(content: bytes) -> Iterator[int]:
    """A file in DRAM."""
    fd = os.memfd_create("kvfs-test")
    try:
        os.write(fd, content)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def on_disk(directory: Path, content: bytes = b"", *, direct: bool = True) -> Iterator[int]:
    """A file without a name that holds so many bytes, which are on the disk and not in the page cache."""
    fd = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.write(fd, content)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | (os.O_DIRECT if direct else 0))
    finally:
        os.close(fd)
    try:
        yield again
    finally:
        os.close(again)


def cached_pages(fd: int) -> int:
    """How many pages of memory the page cache has of a file."""
    size = os.fstat(fd).st_size
    if not size:
        return 0
    states = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE) as mapping:
        start = ctypes.c_char.from_buffer(mapping)
        try:
            if _libc.mincore(ctypes.byref(start), ctypes.c_size_t(size), states) < 0:
                raise OSError(ctypes.get_errno(), "mincore")
        finally:
            del start
    return sum(state & 1 for state in states)


def content_of(fd: int) -> bytes:
    """All of a file, through the page cache."""
    with open(f"/proc/self/fd/{fd}", "rb") as file:
        return file.read()
