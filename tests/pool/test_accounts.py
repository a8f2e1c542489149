"""Ten thousand random operations: the accounts are right, nobody reads other bytes, nothing stays open."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from kvfs import opening
from kvfs.errors import OutOfRoom, StalePage
from kvfs.index import DRAFT, SEALED, Directory, Entry
from kvfs.opening import Openings
from kvfs.page import digest_of
from kvfs.pool import Pool
from kvfs.syscalls import RENAME_EXCHANGE
from tests.conftest import LogGuard
from tests.pool import files
from tests.pool.checks import check_pool
from tests.pool.faces import KernelFace
from tests.pool.files import KIB, MIB, settled

SIZES = (1, 100, 4 * KIB, 5000, 64 * KIB, 70_000, 300 * KIB)


@dataclass
class Open:
    """A handle that a program has."""

    entry: Entry
    close: Callable[[], None]
    check: Callable[[], None] = lambda: None


@dataclass
class Programs:
    """Programs that use a pool at random, and what they know of its bytes."""

    pool: Pool
    openings: Openings
    face: KernelFace
    choices: random.Random
    bytes_of: dict[Entry, bytes] = field(default_factory=dict)
    """What each entry holds, for those whose writers have all finished."""
    opened: list[Open] = field(default_factory=list)
    mappings: list[Open] = field(default_factory=list)
    serial: int = 0

    # Choosing

    def directories(self) -> list[Directory]:
        found = [self.pool.index.root]
        found += [entry for entry in self.pool.index.root.children.values() if isinstance(entry, Directory)]
        return found

    def place(self) -> tuple[Directory, bytes]:
        return self.choices.choice(self.directories()), b"f%d" % self.choices.randrange(25)

    def some_file(self) -> tuple[Directory, bytes, Entry] | None:
        named = [
            (directory, name, entry)
            for directory in self.directories()
            for name, entry in directory.children.items()
            if entry.is_file
        ]
        return self.choices.choice(named) if named else None

    def known(self, entry: Entry) -> Entry:
        """The kernel looks a name up before it opens it."""
        entry.lookups += 1
        return entry

    def data(self) -> bytes:
        self.serial += 1
        return files.pattern(self.choices.choice(SIZES), self.serial)

    # What programs do

    def store(self) -> None:
        directory, name = self.place()
        if name in directory.children:
            return
        entry = self.known(self.pool.names.create(directory, name, files.OWNER))
        self.pool.face.publish(entry)
        data = self.data()
        files.put(entry, data)
        self.bytes_of[entry] = data
        if self.choices.random() < 0.9:
            self.pool.remove_writer(entry)
        else:
            self.opened.append(Open(entry, lambda: self.pool.remove_writer(entry)))

    async def overwrite(self) -> None:
        found = self.some_file()
        if found is None:
            return
        directory, name, entry = found
        truncate = self.choices.random() < 0.7
        for _ in range(2):
            self.known(entry)
            try:
                await self.openings.open_writing(entry, truncate)
                break
            except StalePage:
                if name not in directory.children:
                    return
                fresh = directory.children[name]
                if truncate:
                    self.bytes_of[fresh] = b""
                elif entry in self.bytes_of:
                    self.bytes_of[fresh] = self.bytes_of[entry]
                entry = fresh
        else:
            raise AssertionError("stale twice, though nobody was in between")
        data = self.data()
        files.put(entry, data)
        before = b"" if truncate else self.bytes_of.get(entry, b"")
        self.bytes_of[entry] = data + before[len(data) :]
        self.pool.remove_writer(entry)

    async def open_for_reading(self) -> None:
        found = self.some_file()
        if found is None:
            return
        entry = self.known(found[2])
        if self.face.can_open_natively(entry) and self.choices.random() < 0.5:
            fd = self.face.open_natively(entry)
            close = lambda: self.face.close_natively(self.pool, entry, fd)  # noqa: E731
        else:
            holding = await self.openings.open_reading(entry)
            fd = holding.read_fd
            close = lambda: self.openings.close_reading(entry)  # noqa: E731
        if entry.state != SEALED:
            self.opened.append(Open(entry, close))
            return
        expected = self.bytes_of[entry]

        def check() -> None:
            assert os.pread(fd, len(expected) + 1, 0) == expected, "a page changed under its reader"

        check()
        self.opened.append(Open(entry, close, check))

    def close_one(self) -> None:
        if self.opened:
            handle = self.opened.pop(self.choices.randrange(len(self.opened)))
            handle.check()
            handle.close()

    def map_or_unmap(self) -> None:
        if len(self.mappings) > 5:
            oldest = self.mappings.pop(0)
            oldest.check()
            oldest.close()
            return
        found = self.some_file()
        if found is None or found[2].state != SEALED:
            return
        entry = found[2]
        expected = self.bytes_of[entry]
        fd = files.tier_file(self.pool, entry.path())
        mapping = mmap.mmap(fd, len(expected), mmap.MAP_SHARED, mmap.PROT_READ)
        os.close(fd)

        def check() -> None:
            assert mapping[:] == expected, "a page changed under its mapping"

        self.mappings.append(Open(entry, mapping.close, check))

    def remove(self) -> None:
        found = self.some_file()
        if found is not None:
            self.let_go(self.pool.names.unlink(found[0], found[1]))

    def rename(self) -> None:
        found, (directory, name) = self.some_file(), self.place()
        if found is None:
            return
        target = directory.children.get(name)
        if target is not None and target.is_directory:
            return
        flags = RENAME_EXCHANGE if target is not None and self.choices.random() < 0.3 else 0
        self.let_go(self.pool.names.rename(found[0], found[1], directory, name, flags))

    def link(self) -> None:
        found, (directory, name) = self.some_file(), self.place()
        if found is not None and name not in directory.children:
            self.pool.names.link(found[2], directory, name)

    def make_or_remove_directory(self) -> None:
        name = b"d%d" % self.choices.randrange(4)
        entry = self.pool.index.root.children.get(name)
        if entry is None:
            files.mkdir(self.pool, name)
        elif isinstance(entry, Directory) and not entry.children:
            self.pool.names.remove_directory(self.pool.index.root, name)

    async def resize(self) -> None:
        found = self.some_file()
        if found is None:
            return
        directory, name, entry = found
        size = self.choices.choice((1, 4096, 100_000, 200_000))
        before = self.bytes_of.get(entry, b"")
        try:
            await self.openings.resize(entry, size)
        except StalePage:
            if name in directory.children:
                self.bytes_of[directory.children[name]] = before
            return
        self.bytes_of[entry] = before[:size].ljust(size, b"\0")

    async def evict(self) -> None:
        await self.pool.evictor.free(self.choices.choice((1, 100 * KIB, MIB)))

    def forget(self) -> None:
        """The kernel forgets what nobody has open and nobody can find."""
        in_use = {handle.entry for handle in self.opened}
        for entry in list(self.pool.index.entries()):
            if (
                entry.lookups
                and entry not in in_use
                and (entry.parent is None or self.choices.random() < 0.2)
            ):
                files.forget(self.pool, entry.number, entry.lookups)

    @staticmethod
    def let_go(fd: int) -> None:
        if fd >= 0:
            os.close(fd)

    async def step(self) -> None:
        operations: list[tuple[Callable[[], object], int]] = [
            (self.store, 20),
            (self.overwrite, 10),
            (self.open_for_reading, 20),
            (self.close_one, 22),
            (self.map_or_unmap, 4),
            (self.remove, 6),
            (self.rename, 8),
            (self.link, 4),
            (self.make_or_remove_directory, 2),
            (self.resize, 3),
            (self.evict, 1),
            (self.forget, 3),
        ]
        names, weights = zip(*operations, strict=True)
        (operation,) = self.choices.choices(names, weights)
        try:
            result = operation()
            if hasattr(result, "__await__"):
                await result
        except (StalePage, OutOfRoom):
            pass

    def close_all(self) -> None:
        for handle in (*self.opened, *self.mappings):
            handle.check()
            handle.close()
        self.opened.clear()
        self.mappings.clear()
        self.forget()


def check_accounts(pool: Pool) -> None:
    """Room used = what the files occupy = what a walk finds."""
    found = {one.inode: one.blocks * 512 for one in pool.tier.walk() if not one.is_directory}
    by_status = {
        entry.number: pool.status(entry).st_blocks * 512 for entry in pool.index.entries() if entry.is_file
    }
    assert pool.tier.room().used_bytes == sum(found.values()) == sum(by_status.values())


@pytest.mark.parametrize("tier", [16 * MIB], indirect=True)
@pytest.mark.parametrize("seed", [1, 2])
async def test_ten_thousand_random_operations(
    pool: Pool,
    openings: Openings,
    face: KernelFace,
    monkeypatch: pytest.MonkeyPatch,
    expect_log: LogGuard,
    seed: int,
) -> None:
    monkeypatch.setattr(opening, "RETRY_SECONDS", 0.02)
    pool.idle.limit = 10
    before = set(os.listdir("/proc/self/fd"))
    programs = Programs(pool, openings, face, random.Random(seed))
    for number in range(5000):
        await programs.step()
        if number % 500 == 499:
            await settled(pool)
            assert face.faults == []
    programs.close_all()
    await settled(pool)
    programs.forget()
    check_pool(pool, face)
    check_accounts(pool)
    for entry in pool.index.entries():
        if entry.is_file:
            assert entry.state == SEALED or pool.status(entry).st_size == 0
            assert files.content(pool, entry.path()) == programs.bytes_of[entry]
        if entry.state == SEALED:
            assert files.stored_digest(pool, entry.path()) == digest_of(programs.bytes_of[entry])
    assert not pool.drafts
    assert pool.unsealed == 0
    assert DRAFT not in {entry.state for entry in pool.policy.victims()}
    for directory in programs.directories()[::-1]:
        for name in list(directory.children):
            if not isinstance(directory.children[name], Directory):
                programs.let_go(pool.names.unlink(directory, name))
    programs.forget()
    assert pool.tier.room().used_bytes == 0
    assert pool.pages == len(pool.idle) == 0
    if expect_log.lines:  # as it happens
        expect_log("every page left is in use|is dropped: the pool was full")
    left = set(os.listdir("/proc/self/fd")) - before
    open_twice = len(pool.directories)
    assert len(left) <= len(programs.directories()) + open_twice, "only directories of the tier are open"
