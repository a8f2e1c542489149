"""A program that stores, reads, moves and removes pages at random, and knows what it is owed."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

from kvfs.syscalls import RENAME_EXCHANGE, renameat2
from tests.faults.contents import make, version_of
from tests.faults.crashing import CrashingMount, Killed
from tests.faults.promises import Promises
from tests.mounted.running import MIB, digest

SIZES = (100, 5000, 70_000, 300_000, MIB, 2 * MIB, 3 * MIB, 4 * MIB, 4 * MIB, 5 * MIB)
NAMES_IN_A_DIRECTORY = 16
FEWEST_DIRECTORIES = 3
MOST_BYTES = 90 * MIB


class Workload:
    """One call at a time. ``calls`` counts them."""

    def __init__(self, mount: CrashingMount, promises: Promises, chance: random.Random) -> None:
        self._mount = mount
        self._promises = promises
        self._chance = chance
        self._version = 0
        self._sizes: dict[int, int] = {}
        self._calls = {
            self.publish: 28,
            self.overwrite: 14,
            self.read: 22,
            self.rename: 10,
            self.exchange: 8,
            self.link: 3,
            self.unlink: 8,
            self.evict: 12,
            self.rename_directory: 2,
            self.wait: 1,
        }
        self.calls = 0

    def step(self) -> None:
        """One call. Raises Killed where the daemon was."""
        (call,) = self._chance.choices(list(self._calls), list(self._calls.values()))
        if sum(self._sizes[version] for version in set(self._promises.now.values())) > MOST_BYTES:
            call = self.unlink
        self._do(call)

    def all_steps(self) -> None:
        """Calls that bring the daemon to every step of it. Raises Killed where it was."""
        self._do(self._come_to_all)

    def _do(self, call: Callable[[], object]) -> None:
        self.calls += 1
        try:
            call()
        except OSError as error:
            if self._mount.was_killed():
                raise Killed from error
            raise

    # Names

    def _path(self, name: str) -> Path:
        return self._mount.path / name

    def _directories(self) -> list[str]:
        there = sorted(os.listdir(self._mount.path))
        while len(there) < FEWEST_DIRECTORIES:
            name = self._free_directory(there)
            self._path(name).mkdir()
            there.append(name)
        return there

    @staticmethod
    def _free_directory(there: list[str]) -> str:
        return next(name for name in (f"d{number}" for number in count()) if name not in there)

    def _any_name(self) -> str:
        return f"{self._chance.choice(self._directories())}/{self._chance.randrange(NAMES_IN_A_DIRECTORY)}"

    def _known(self) -> str | None:
        names = sorted(self._promises.now)
        return self._chance.choice(names) if names else None

    # Calls

    def _write(self, name: str) -> bool:
        """Whether the file could be written: a full pool may refuse it."""
        self._version += 1
        version, size = self._version, self._chance.choice(SIZES)
        self._sizes[version] = size
        self._promises.will_have(name, version)
        try:
            with open(self._path(name), "wb", buffering=0) as file:
                file.write(make(version, size))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            with contextlib.suppress(FileNotFoundError):
                self._path(name).unlink()
            self._promises.has_nothing(name)
            return False
        self._promises.has(name, version)
        if self._chance.random() < 0.5:
            self._see_sealed(name)
        return True

    def _see_sealed(self, name: str) -> None:
        """Looks for the digest for a moment."""
        deadline = time.monotonic() + 0.05
        while time.monotonic() < deadline:
            if digest(self._path(name)) is not None:
                self._promises.is_sealed(name)
                return
            time.sleep(0.002)

    def publish(self) -> None:
        """A new file, renamed when it is written."""
        name = self._any_name()
        temporary = f"{name}.{self._version}"
        if self._write(temporary):
            self._rename(temporary, name)

    def overwrite(self) -> None:
        """A file written under its own name, which may be there; nobody else's bytes may change with it."""
        name = self._any_name()
        version = self._promises.now.get(name)
        if version is None or list(self._promises.now.values()).count(version) == 1:
            self._write(name)

    def read(self) -> None:
        name = self._known()
        if name is None:
            return
        try:
            content = self._path(name).read_bytes()
        except FileNotFoundError:
            self._gone(name)
            return
        version = version_of(content)
        assert version == self._promises.now[name], f"{name}: {version}, not {self._promises.now[name]}"

    def _gone(self, name: str) -> None:
        """A draft may have met a full pool; a page never goes by itself."""
        gone = self._promises.expected_gone([name])
        assert not gone, f"{name} was a page and is gone: {self._mount.logged}"
        self._promises.will_have(name, None)
        self._promises.has_nothing(name)

    def _rename(self, old: str, new: str) -> None:
        if self._promises.now[old] == self._promises.now.get(new):
            return  # two links of one file: POSIX leaves both
        self._promises.will_move(old, new)
        try:
            self._path(old).rename(self._path(new))
        except FileNotFoundError:
            self._gone(old)
            return
        self._promises.has_moved(old, new)

    def rename(self) -> None:
        name = self._known()
        if name is not None and (new := self._any_name()) != name:
            self._rename(name, new)

    def exchange(self) -> None:
        one, other = self._known(), self._known()
        if one is None or other is None or self._promises.now[one] == self._promises.now[other]:
            return
        promises = self._promises
        first, second = promises.now[one], promises.now[other]
        kept, stored = set(promises.kept), set(promises.stored)
        promises.will_have(one, second)
        promises.will_have(other, first)
        promises.kept, promises.stored = kept, stored
        with contextlib.ExitStack() as stack:
            parents = [os.open(self._path(name).parent, os.O_RDONLY) for name in (one, other)]
            for fd in parents:
                stack.callback(os.close, fd)
            names = [os.fsencode(self._path(name).name) for name in (one, other)]
            try:
                renameat2(parents[0], names[0], parents[1], names[1], RENAME_EXCHANGE)
            except FileNotFoundError:
                for name in (one, other):
                    if not self._path(name).exists():
                        self._gone(name)
                return
        promises.has(one, second)
        promises.has(other, first)

    def link(self) -> None:
        name, new = self._known(), self._any_name()
        if name is None or new in self._promises.now:
            return
        version = self._promises.now[name]
        self._promises.will_have(new, version)
        try:
            os.link(self._path(name), self._path(new))
        except FileNotFoundError:
            self._gone(name)
            return
        self._promises.has(new, version)

    def unlink(self) -> None:
        name = self._known()
        if name is None:
            return
        gone = self._promises.expected_gone([name])
        self._promises.will_have(name, None)
        try:
            self._path(name).unlink()
        except FileNotFoundError:
            assert not gone, f"{name} was a page and is gone: {self._mount.logged}"
        self._promises.has_nothing(name)

    def evict(self) -> None:
        """It may be a draft, of which the answer is that it is in use."""
        name = self._known()
        if name is None:
            return
        try:
            os.setxattr(self._path(name), "user.kvfs.evict", b"1")
        except FileNotFoundError:
            self._gone(name)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
        else:
            self._promises.is_stored(name)

    def rename_directory(self) -> None:
        """To a free name, or over a directory that has nothing left in it."""
        there = self._directories()
        old = self._chance.choice(there)
        empty = [name for name in there if name != old and not os.listdir(self._path(name))]
        new = empty[0] if empty else self._free_directory(there)
        inside = [name for name in self._promises.now if name.startswith(f"{old}/")]
        for name in inside:
            self._promises.will_move(name, f"{new}/{name.partition('/')[2]}")
        self._path(old).rename(self._path(new))
        for name in inside:
            self._promises.has_moved(name, f"{new}/{name.partition('/')[2]}")

    def wait(self) -> None:
        time.sleep(0.1)

    def _come_to_all(self) -> None:
        there = self._directories()
        self._path(self._free_directory(there)).mkdir()
        for number in range(4):
            self._write(f"{there[0]}/{number}")
        self._mount.wait_settled()
        for name in list(self._promises.now):
            os.setxattr(self._path(name), "user.kvfs.evict", b"1")
            self._promises.is_stored(name)
        for name in list(self._promises.now):
            assert version_of(self._path(name).read_bytes()) == self._promises.now[name]
        self.rename_directory()
        self.rename()
        self.unlink()
        self._mount.wait_settled()
