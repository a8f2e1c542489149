"""A double of the kernel's side: it says which handles are open without asking, and checks the pool."""

from __future__ import annotations

import os
import stat
from collections import Counter
from dataclasses import dataclass, field

from kvfs.holding import Holding
from kvfs.index import SEALED, Directory, Entry
from kvfs.pool import Pool


@dataclass
class Record:
    """What the pool published of an entry, as the channel's table has it."""

    holding: Holding | None
    backing_id: int
    sealed: bool
    opens: int = 0


@dataclass
class KernelFace:
    """Implements `kvfs.holding.Face`. ``faults`` lists what the pool did that no kernel would forgive."""

    records: dict[int, Record] = field(default_factory=dict)
    ids: dict[int, int] = field(default_factory=dict)
    """Backing ids, each with the descriptor of its file that a real kernel keeps."""
    marks: dict[int, tuple[bool, bool]] = field(default_factory=dict)
    touched: Counter[int] = field(default_factory=Counter)
    names: dict[tuple[int, bytes], int] = field(default_factory=dict)
    directories: dict[int, int] = field(default_factory=dict)
    described: dict[int, os.stat_result] = field(default_factory=dict)
    lookups: Counter[int] = field(default_factory=Counter)
    invalidated: list[tuple[int, bytes]] = field(default_factory=list)
    gone: dict[tuple[int, bytes], bool] = field(default_factory=dict)
    """Names that pages lost without a program, and whether that was by eviction."""
    misses: tuple[int, int] = (0, 0)
    ended: tuple[list[int], list[tuple[int, int]]] = field(default_factory=lambda: ([], []))
    faults: list[str] = field(default_factory=list)
    next_id: int = 1

    # What the pool calls

    def publish(self, entry: Entry) -> None:
        holding, backing_id = entry.holding, entry.ready_id
        if holding is not None:
            self.described.pop(entry.number, None)
            self._check_descriptors(entry, holding)
            if not holding.backing_id:
                holding.backing_id = self._new_id(holding.read_fd)
            backing_id = holding.backing_id
        elif entry.number not in self.described:
            self.faults.append(f"{entry.number}: published without a descriptor and without a description")
        if backing_id not in self.ids:
            self.faults.append(f"{entry.number}: published with an id that is closed")
        sealed = entry.state == SEALED and entry.parent is not None
        record = self.records.setdefault(entry.number, Record(holding, backing_id, sealed))
        if record.backing_id != backing_id:
            self.faults.append(f"{entry.number}: another id is published before the first was released")
        record.holding, record.sealed = holding, sealed

    def _check_descriptors(self, entry: Entry, holding: Holding) -> None:
        status = os.fstat(holding.read_fd)
        if holding.write_fd >= 0 and os.fstat(holding.write_fd).st_ino != status.st_ino:
            self.faults.append(f"{entry.number}: the descriptors are of two files")
        backing = self.ids.get(holding.backing_id)
        if backing is not None and os.fstat(backing).st_ino != status.st_ino:
            self.faults.append(f"{entry.number}: the id is of another file")

    def _new_id(self, fd: int) -> int:
        backing_id, self.next_id = self.next_id, self.next_id + 1
        self.ids[backing_id] = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        return backing_id

    def publish_directory(self, directory: Directory, fd: int) -> None:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            self.faults.append(f"{directory.number}: published as a directory, and is none")
        self.directories[directory.number] = fd

    def describe(self, entry: Entry, status: os.stat_result) -> None:
        self.described[entry.number] = status

    def withdraw(self, entry: Entry) -> int:
        record = self.records.get(entry.number)
        if record is None:
            return 0
        record.sealed = False
        return record.opens

    def release(self, entry: Entry, backing_id: int) -> None:
        self.directories.pop(entry.number, None)
        record = self.records.pop(entry.number, None)
        entry.lookups += self.lookups.pop(entry.number, 0)
        if hits := self.touched.pop(entry.number, 0):
            self.touched[0] += hits
        if record is not None and record.opens:
            self.faults.append(f"{entry.number}: released while {record.opens} handles are open")
        if backing_id > 0:
            os.close(self.ids.pop(backing_id))

    def opens(self, entry: Entry) -> int:
        record = self.records.get(entry.number)
        return 0 if record is None else record.opens

    def take_marks(self, entry: Entry) -> tuple[bool, bool]:
        return self.marks.pop(entry.number, (False, False))

    def take_ended(self) -> tuple[list[int], list[tuple[int, int]]]:
        ended, self.ended = self.ended, ([], [])
        return ended

    def take_touched(self) -> list[tuple[int, int]]:
        touched = list(self.touched.items())
        self.touched.clear()
        return touched

    def take_lookups(self, entry: Entry) -> int:
        return self.lookups.pop(entry.number, 0)

    def name_add(self, parent: int, name: bytes, number: int) -> None:
        self.names[parent, name] = number

    def name_remove(self, parent: int, name: bytes) -> None:
        if self.names.pop((parent, name), None) is None:
            self.faults.append(f"the name {name!r} in {parent} was removed, and was not there")

    def name_gone(self, parent: int, name: bytes, evicted: bool) -> None:
        if (parent, name) not in self.names:
            self.faults.append(f"the name {name!r} in {parent} is said to go, and was not there")
        self.gone[parent, name] = evicted

    def name_searched(self, parent: int, name: bytes, task: int) -> None:
        if (parent, name) in self.names:
            self.faults.append(f"the name {name!r} in {parent} is said not to be there, and is")

    def take_misses(self) -> tuple[int, int]:
        misses, self.misses = self.misses, (0, 0)
        return misses

    def invalidate(self, parent: int, name: bytes) -> None:
        self.invalidated.append((parent, name))

    async def told(self) -> None: ...

    # What the kernel does

    def end(self) -> None:
        """The connection ends, and with it every id."""
        while self.ids:
            os.close(self.ids.popitem()[1])

    def can_open_natively(self, entry: Entry) -> bool:
        record = self.records.get(entry.number)
        return record is not None and record.sealed

    def open_natively(self, entry: Entry) -> int:
        """A program opens a page for reading and the pool is not asked: a descriptor of the file."""
        assert self.can_open_natively(entry), "the pool would be asked"
        record = self.records[entry.number]
        record.opens += 1
        self.touched[entry.number] += 1
        return os.open(f"/proc/self/fd/{self.ids[record.backing_id]}", os.O_RDONLY | os.O_CLOEXEC)

    def close_natively(self, pool: Pool, entry: Entry, fd: int) -> None:
        """The program closes it; the pool hears of that where the record was withdrawn."""
        os.close(fd)
        record = self.records.get(entry.number)
        if record is not None and record.opens:
            record.opens -= 1
        else:
            self.faults.append(f"{entry.number}: a handle is closed that nobody counted")
        if record is None or not record.sealed:
            pool.settle(entry)
