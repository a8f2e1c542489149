"""What programs do with files of a pool: the calls of the filesystem's side, and real descriptors."""

from __future__ import annotations

import mmap
import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio

from kvfs.index import SEALED, Directory, Entry
from kvfs.opening import Openings
from kvfs.page import DIGEST, Digest, Owner, digest_of
from kvfs.pool import Pool

KIB = 1 << 10
MIB = 1 << 20
OWNER = Owner(stat.S_IFREG | 0o640, 1001, 1002)
DIRECTORY = Owner(stat.S_IFDIR | 0o750, 1001, 1002)


def pattern(size: int, seed: int = 1) -> bytes:
    """Bytes that differ from place to place and from seed to seed."""
    block = random.Random(seed).randbytes(min(size, 64 * KIB + 17))
    return (block * (size // max(len(block), 1) + 1))[:size]


async def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.002)


async def settled(pool: Pool) -> None:
    """Until nothing waits for its digest any more."""
    await wait_until(lambda: pool.unsealed == 0)


def create(pool: Pool, name: bytes, parent: Directory | None = None) -> Entry:
    """open(O_CREAT | O_EXCL), as the filesystem's side answers it."""
    entry = pool.names.create(parent or pool.index.root, name, OWNER)
    pool.face.publish(entry)
    return entry


def mkdir(pool: Pool, name: bytes, parent: Directory | None = None) -> Directory:
    entry = pool.names.create_directory(parent or pool.index.root, name, DIRECTORY)
    assert isinstance(entry, Directory)
    return entry


def put(entry: Entry, data: bytes, offset: int = 0) -> None:
    """write(2), which the kernel does on the file itself."""
    holding = entry.holding
    assert holding is not None
    assert holding.write_fd >= 0, "not open for writing"
    while data:
        done = os.pwrite(holding.write_fd, data, offset)
        data, offset = data[done:], offset + done


async def page(pool: Pool, name: bytes, data: bytes, parent: Directory | None = None) -> Entry:
    """A file that was written, closed and sealed."""
    entry = create(pool, name, parent)
    put(entry, data)
    pool.remove_writer(entry)
    await wait_until(lambda: entry.state == SEALED)
    await settled(pool)
    return entry


async def read(openings: Openings, entry: Entry) -> bytes:
    """open, read and close."""
    holding = await openings.open_reading(entry)
    try:
        return os.pread(holding.read_fd, os.fstat(holding.read_fd).st_size, 0)
    finally:
        openings.close_reading(entry)


async def rewrite(openings: Openings, entry: Entry, data: bytes, *, truncate: bool = True) -> None:
    """open for writing, write and close."""
    await openings.open_writing(entry, truncate=truncate)
    put(entry, data)
    openings._pool.remove_writer(entry)


def tier_file(pool: Pool, path: bytes, flags: int = os.O_RDONLY) -> int:
    """A descriptor of the file on the tier, which the pool knows nothing of."""
    return pool.tier.open(path, flags)


def content(pool: Pool, path: bytes) -> bytes:
    """The bytes of a file on the tier."""
    with os.fdopen(tier_file(pool, path), "rb") as file:
        return file.read()


def stored_digest(pool: Pool, path: bytes) -> Digest:
    return Digest.parse(pool.tier.get_attribute(path, DIGEST))


def is_intact(pool: Pool, path: bytes, data: bytes) -> bool:
    """Whether the tier has exactly these bytes and their digest."""
    return content(pool, path) == data and stored_digest(pool, path) == digest_of(data)


@contextmanager
def mapped(fd: int, size: int, *, writable: bool) -> Iterator[mmap.mmap]:
    """A mapping that outlives its descriptor, which is closed."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, protection)
    os.close(fd)
    try:
        yield mapping
    finally:
        mapping.close()


def find(pool: Pool, path: bytes) -> Entry:
    entry = pool.index.find(path)
    assert entry is not None, path
    return entry


def forget(pool: Pool, number: int, lookups: int) -> None:
    """The kernel forgets so many of its references to a number."""
    fd = pool.forget(number, lookups)
    if fd >= 0:
        os.close(fd)


async def pages(pool: Pool, count: int, size: int = MIB, prefix: bytes = b"") -> list[Entry]:
    """Sealed pages, the first one the coldest."""
    entries = []
    for number in range(count):
        entries.append(create(pool, prefix + b"%02d" % number))
        put(entries[-1], pattern(size, number))
        pool.remove_writer(entries[-1])
    await settled(pool)
    for entry in entries:
        pool.policy.touch(entry)
    return entries


def left(pool: Pool) -> list[bytes]:
    return sorted(pool.tier.list(b""))


def names(*numbers: int) -> list[bytes]:
    return [b"%02d" % number for number in numbers]
