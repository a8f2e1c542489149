"""What only entries in use need: descriptors, users, and what may go wrong with a draft."""

from __future__ import annotations

import os
import time
from typing import Protocol

from kvfs.index import Directory, Entry
from kvfs.page import Owner


class Holding:
    """The open side of one entry: our descriptors of its file, and who uses them through the daemon.

    ``read_fd`` is always open; ``write_fd`` only while somebody writes. ``readers`` and ``writers`` count
    the handles that the daemon gave; those which the channel gave by itself are counted by the channel.
    """

    __slots__ = (
        "awaited",
        "backing_id",
        "epoch",
        "failure",
        "kept_if_empty",
        "read_fd",
        "readers",
        "sealing",
        "sized",
        "until_forgotten",
        "write_fd",
        "writers",
    )

    def __init__(self, read_fd: int) -> None:
        self.read_fd = read_fd
        self.write_fd = -1
        self.backing_id = 0
        self.readers = 0
        self.writers = 0
        self.epoch = 0
        """Goes up whenever somebody may begin to change the bytes."""
        self.failure = ""
        """Why the draft must not become a page; empty while nothing is known against it."""
        self.sized = False
        """Whether a program gave the file its size, so that holes are meant."""
        self.kept_if_empty = True
        """Whether an empty draft may be what its writer wants, though the writer failed: not where it was
        made, or had bytes, when the writing began."""
        self.until_forgotten = False
        """Whether the kernel may still open the file by its number: another one took its name by rename, and
        who looked the name up before that is not to fail."""
        self.sealing = False
        self.awaited: dict[int, float] = {}
        """Tasks whose open was answered ESTALE, which are to find this draft when the kernel looks the name
        up again; and until when (trio's clock) it waits for each."""

    @property
    def retry_until(self) -> float:
        """Until when (trio's clock) the draft waits for somebody; 0 when it does not."""
        return max(self.awaited.values(), default=0.0)

    @property
    def in_use(self) -> bool:
        return bool(self.readers or self.writers)


class Face(Protocol):
    """What the pool asks of the kernel's side. The filesystem implements it; `NoFace` stands for none."""

    def publish(self, entry: Entry) -> None:
        """The entry's holding, its ready id, owner or state changed: answer for it from now on."""

    def publish_directory(self, directory: Directory, fd: int) -> None:
        """Tell the attributes of a directory from this descriptor, until it is released."""

    def describe(self, entry: Entry, status: os.stat_result) -> None:
        """What stat tells of an entry for as long as it is published without a descriptor."""

    def withdraw(self, entry: Entry) -> int:
        """Opens are asked of the pool from now on; returns the handles given before and still open."""

    def release(self, entry: Entry, backing_id: int) -> None:
        """Nobody uses the entry, and its descriptors are about to be closed: forget all of it."""

    def opens(self, entry: Entry) -> int:
        """Handles that were given without asking the pool and are still open."""

    def take_marks(self, entry: Entry) -> tuple[bool, bool]:
        """What happened to a draft without asking the pool since the last call: whether a write was refused
        for want of room, and whether a program allocated it or punched holes into it."""

    def take_lookups(self, entry: Entry) -> int:
        """How often the kernel was told of the entry without asking the pool, since the last call."""

    def take_ended(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Handles that were released since the last call, as `Files` gave them; and numbers of entries, each
        with how many look-ups of it the kernel has forgotten."""

    def take_touched(self) -> list[tuple[int, int]]:
        """Numbers of entries, and how often each was opened without asking the pool: some hundred of those
        not given yet, none where there are no more. 0 stands for those that were released meanwhile."""

    def name_add(self, parent: int, name: bytes, number: int) -> None:
        """The name means the entry ``number`` from now on, in the directory with the number ``parent``."""

    def name_remove(self, parent: int, name: bytes) -> None:
        """The name no longer exists."""

    def name_gone(self, parent: int, name: bytes, evicted: bool) -> None:
        """A page is about to lose this name, and not because a program wants that: it is evicted, or the miss
        of whoever looks for it next has been counted already."""

    def name_searched(self, parent: int, name: bytes, task: int) -> None:
        """The kernel asked the pool for the name, on behalf of a task, and it is not there."""

    def take_misses(self) -> tuple[int, int]:
        """How often names were looked for in vain since the last call: such as were not there for all we
        know, and such as were evicted."""

    def invalidate(self, parent: int, name: bytes) -> None:
        """The name means something else, or nothing, from now on."""

    async def told(self) -> None:
        """Waits until programs see what was invalidated before."""


class NoFace:
    """The face of a pool that is not mounted."""

    def publish(self, entry: Entry) -> None: ...

    def publish_directory(self, directory: Directory, fd: int) -> None: ...

    def describe(self, entry: Entry, status: os.stat_result) -> None: ...

    def withdraw(self, entry: Entry) -> int:
        return 0

    def release(self, entry: Entry, backing_id: int) -> None: ...

    def opens(self, entry: Entry) -> int:
        return 0

    def take_marks(self, entry: Entry) -> tuple[bool, bool]:
        return False, False

    def take_lookups(self, entry: Entry) -> int:
        return 0

    def take_ended(self) -> tuple[list[int], list[tuple[int, int]]]:
        return [], []

    def take_touched(self) -> list[tuple[int, int]]:
        return []

    def name_add(self, parent: int, name: bytes, number: int) -> None: ...

    def name_remove(self, parent: int, name: bytes) -> None: ...

    def name_gone(self, parent: int, name: bytes, evicted: bool) -> None: ...

    def name_searched(self, parent: int, name: bytes, task: int) -> None: ...

    def take_misses(self) -> tuple[int, int]:
        return 0, 0

    def invalidate(self, parent: int, name: bytes) -> None: ...

    async def told(self) -> None: ...


def detach(entry: Entry, face: Face) -> int:
    """Ends an entry's holding, but for the descriptor it returns: closing that one may free much memory."""
    holding = entry.holding
    assert holding is not None
    face.release(entry, holding.backing_id)
    entry.holding = None
    if holding.write_fd >= 0:
        os.close(holding.write_fd)
    return holding.read_fd


def close(entry: Entry, face: Face) -> None:
    """Ends an entry's holding."""
    os.close(detach(entry, face))


def removed_status(owner: Owner) -> os.stat_result:
    """What fstat shows of a directory, fifo or socket that is open and has no name any more."""
    now = time.time_ns()
    seconds = now // 10**9
    fields = (owner.mode, 0, 0, 0, owner.uid, owner.gid, 0, seconds, seconds, seconds)
    times = dict.fromkeys(("st_atime_ns", "st_mtime_ns", "st_ctime_ns"), now)
    return os.stat_result(fields, {"st_blocks": 0, "st_blksize": 4096, **times})
