"""The ways to have a page."""

from __future__ import annotations

import os

from kvfs.index import Entry
from kvfs.opening import Openings
from kvfs.pool import Pool
from tests.pool import files
from tests.pool.faces import KernelFace


class Reader:
    """One of the ways to have a page."""

    def __init__(self, pool: Pool, openings: Openings, face: KernelFace, entry: Entry) -> None:
        self.pool, self.openings, self.face, self.entry = pool, openings, face, entry

    async def open(self) -> None: ...
    def content(self) -> bytes: ...  # type: ignore[empty-body]
    def close(self) -> None: ...


class HandleOfThePool(Reader):
    async def open(self) -> None:
        self.holding = await self.openings.open_reading(self.entry)

    def content(self) -> bytes:
        return os.pread(self.holding.read_fd, 1 << 20, 0)

    def close(self) -> None:
        self.openings.close_reading(self.entry)


class NativeHandle(Reader):
    async def open(self) -> None:
        self.fd = self.face.open_natively(self.entry)

    def content(self) -> bytes:
        return os.pread(self.fd, 1 << 20, 0)

    def close(self) -> None:
        self.face.close_natively(self.pool, self.entry, self.fd)


class Mapping(Reader):
    async def open(self) -> None:
        size = self.pool.status(self.entry).st_size
        self._whole = files.mapped(files.tier_file(self.pool, self.entry.path()), size, writable=False)
        self.mapping = self._whole.__enter__()

    def content(self) -> bytes:
        return self.mapping[:]

    def close(self) -> None:
        self._whole.__exit__(None, None, None)
