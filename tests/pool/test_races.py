"""Many programs at once on few files: whoever reads a page reads one whole copy, and keeps it."""

from __future__ import annotations

import hashlib
import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio

from kvfs import opening, sealing
from kvfs.errors import StalePage
from kvfs.index import SEALED, Entry
from kvfs.opening import Openings
from kvfs.pool import Pool
from tests.conftest import LogGuard
from tests.pool import files
from tests.pool.checks import check_pool
from tests.pool.faces import KernelFace
from tests.pool.files import KIB, MIB, settled
from tests.pool.test_accounts import check_accounts

NAMES = [b"key %d" % number for number in range(6)]


def copy_of(number: int, size: int) -> bytes:
    """Bytes that tell whether they are whole."""
    body = files.pattern(size, number)
    return hashlib.md5(body, usedforsecurity=False).digest() + body


def is_whole(data: bytes) -> bool:
    return hashlib.md5(data[16:], usedforsecurity=False).digest() == data[:16]


class Program:
    """Does what engines do, and is interrupted wherever it waits."""

    serial = 0
    done: Counter[str]

    def __init__(
        self, pool: Pool, openings: Openings, face: KernelFace, seed: int, written: set[Entry]
    ) -> None:
        self.pool, self.openings, self.face = pool, openings, face
        self.choices = random.Random(seed)
        self.name = b"temporary %d" % seed
        self.written = written
        """Drafts that one of all programs writes now: two writers of one file are not what this is about."""
        self.done = Counter()

    async def pause(self) -> None:
        for _ in range(self.choices.randrange(4)):
            await trio.lowlevel.checkpoint()
        if self.choices.random() < 0.05:
            await trio.sleep(0.003)

    def copy(self) -> bytes:
        Program.serial += 1
        return copy_of(Program.serial, self.choices.choice((100, 5000, 70 * KIB, 400 * KIB)))

    async def write(self, entry: Entry) -> None:
        data = self.copy()
        half = len(data) // 2
        files.put(entry, data[:half])
        await self.pause()
        files.put(entry, data[half:], half)
        await self.pause()
        self.pool.remove_writer(entry)

    async def publish(self) -> None:
        root = self.pool.index.root
        if self.name in root.children:
            return
        await self.write(files.create(self.pool, self.name))
        await self.pause()
        if self.name in root.children:
            fd = self.pool.names.rename(root, self.name, root, self.choices.choice(NAMES), 0)
            if fd >= 0:
                os.close(fd)

    @contextmanager
    def looked_up(self) -> Iterator[Entry | None]:
        """The kernel knows the entry for as long as it is used."""
        entry = self.pool.index.root.children.get(self.choices.choice(NAMES))
        if entry is None:
            yield None
            return
        entry.lookups += 1
        yield entry
        files.forget(self.pool, entry.number, 1)

    async def overwrite(self) -> None:
        with self.looked_up() as entry:
            if entry is not None:
                await self.overwrite_it(entry)

    async def overwrite_it(self, entry: Entry) -> None:
        await self.pause()
        if entry in self.written:
            return
        self.written.add(entry)
        try:
            await self.openings.open_writing(entry, truncate=True)
        except StalePage:
            self.done["stale"] += 1
            return
        else:
            await self.write(entry)
            self.done["overwritten"] += 1
        finally:
            self.written.discard(entry)

    async def read(self) -> None:
        with self.looked_up() as entry:
            if entry is not None:
                await self.read_it(entry)

    async def read_it(self, entry: Entry) -> None:
        await self.pause()
        if self.face.can_open_natively(entry) and self.choices.random() < 0.5:
            fd = self.face.open_natively(entry)
            await self.keep(entry, fd)
            self.face.close_natively(self.pool, entry, fd)
            return
        try:
            holding = await self.openings.open_reading(entry)
        except StalePage:
            return
        if entry.state == SEALED:
            await self.keep(entry, holding.read_fd)
        self.openings.close_reading(entry)

    async def keep(self, entry: Entry, fd: int) -> None:
        first = os.pread(fd, MIB, 0)
        assert is_whole(first)
        await self.pause()
        await self.pause()
        assert os.pread(fd, MIB, 0) == first, "a page changed under its reader"
        self.done["read"] += 1

    async def remove(self) -> None:
        name = self.choices.choice(NAMES)
        if name in self.pool.index.root.children:
            fd = self.pool.names.unlink(self.pool.index.root, name)
            if fd >= 0:
                await trio.to_thread.run_sync(os.close, fd)

    async def evict(self) -> None:
        await self.pool.evictor.free(self.choices.choice((1, MIB)))

    async def run(self, steps: int) -> None:
        kinds = [self.publish, self.overwrite, self.read, self.remove, self.evict]
        for _ in range(steps):
            (kind,) = self.choices.choices(kinds, (4, 4, 10, 1, 0.3))
            await kind()
            await self.pause()


@pytest.mark.parametrize("tier", [16 * MIB], indirect=True)
@pytest.mark.parametrize("inline", [True, False])
async def test_everything_at_once(
    pool: Pool,
    openings: Openings,
    face: KernelFace,
    monkeypatch: pytest.MonkeyPatch,
    expect_log: LogGuard,
    inline: bool,
) -> None:
    if not inline:
        monkeypatch.setattr(sealing, "INLINE_BYTES", -1)
    monkeypatch.setattr(opening, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(sealing, "FIRST_RETRY", 0.0005)
    pool.idle.limit = 3
    written: set[Entry] = set()
    programs = [Program(pool, openings, face, seed, written) for seed in range(8)]
    async with trio.open_nursery() as nursery:
        for program in programs:
            nursery.start_soon(program.run, 200)
    await settled(pool)
    check_pool(pool, face)
    check_accounts(pool)
    assert not written
    for name, entry in pool.index.root.children.items():
        if entry.state == SEALED:
            assert is_whole(files.content(pool, name))
    done = sum((program.done for program in programs), Counter())
    assert min(done["read"], done["overwritten"], done["stale"]) > 10, done
    if expect_log.lines:  # as it happens
        expect_log("every page left is in use|is dropped: (the pool was full|the program that was to)")
