"""The channel: the kernel's side of the pool.

It sits between /dev/fuse and libfuse. Its native half answers from a table, without Python, what needs no
decision: look-ups, opens for reading of sealed pages, attributes of what is open or ready, and the bytes
where the kernel does not move them by passthrough. This half fills the table, and is the pool's `Face`.

Only the event loop calls it, except for `notify`, which the invalidation thread calls because it may block.
"""

from __future__ import annotations

import errno
import logging
import os
import resource

from kvfs.fs._channel import Channel
from kvfs.fs.invalidation import Invalidations
from kvfs.index import SEALED, Directory, Entry

log = logging.getLogger("kvfs.channel")

NATIVE_HANDLE = 1 << 63
"""Marks a handle that the native half gave; the rest of the bits are the entry's number."""
KILLED_HANDLE = 1 << 62
"""Added to the handle of a RELEASE whose program was ended by a signal."""
UNFLUSHED_HANDLE = 1 << 61
"""Added to the handle of a RELEASE whose program never closed a descriptor: it ended inside open."""

WANTED_DESCRIPTORS = 1 << 18
TABLE_SIZE = 1 << 24
"""Entries that the table can hold. Memory is used only for those that were ever open."""


class KernelChannel:
    """The face of a mounted pool."""

    def __init__(self, device: int, tier_fd: int, *, passthrough_off: str, statfs: bool) -> None:
        """``passthrough_off`` says why passthrough is not to be asked for; empty if it is."""
        self._native = Channel(
            device=device,
            tier=tier_fd,
            passthrough=not passthrough_off,
            statfs=statfs,
            table_size=TABLE_SIZE,
        )
        self._refused = passthrough_off
        self.invalidations = Invalidations(self._native.invalidate_entry)

    @property
    def session_fd(self) -> int:
        """What libfuse takes for the kernel."""
        return self._native.session_fd

    @property
    def ended_fd(self) -> int:
        """Readable once the mount is gone or the connection was aborted."""
        return self._native.ended_fd

    @property
    def news_fd(self) -> int:
        """Readable when handles were closed, or entries forgotten, of which nobody has heard yet."""
        return self._native.news_fd

    def start(self) -> None:
        self._native.start()
        self.invalidations.start()

    def stop(self) -> None:
        """Ends the threads; call it once `ended_fd` is readable and libfuse has stopped reading."""
        self.invalidations.stop()
        self._native.stop()

    @property
    def passthrough_active(self) -> bool:
        return self._native.passthrough_active and not self._refused

    @property
    def passthrough_reason(self) -> str:
        """Why passthrough is off; empty while it is on."""
        if self._refused or self._native.passthrough_active:
            return self._refused
        return "this kernel does not offer it: Linux 6.9 or later with CONFIG_FUSE_PASSTHROUGH does"

    def statistics(self) -> dict[str, int]:
        """Requests answered natively, forwarded to Python, and replies that the kernel did not take."""
        return self._native.statistics()

    def set_limits(self, file_bytes: int, write_budget: int | None) -> None:
        """Bounds fallocate, and growth by writes that pass through the daemon (None: no bound of ours)."""
        self._native.set_limits(file_bytes, -1 if write_budget is None else write_budget)

    def set_names_complete(self, complete: bool) -> None:
        """Whether names that the channel was not told of do not exist; until then each is asked for."""
        self._native.set_names_complete(complete)

    def take_growth(self) -> int:
        """Bytes that bounded writes added since the last call."""
        return self._native.take_growth()

    # Face

    def publish(self, entry: Entry) -> None:
        holding, owner = entry.holding, entry.owner
        read_fd = write_fd = -1
        backing_id = entry.ready_id
        if holding is not None:
            if not holding.backing_id and self._native.passthrough_active:
                holding.backing_id = self._backing_id(holding.read_fd)
            read_fd, write_fd, backing_id = holding.read_fd, holding.write_fd, holding.backing_id
        self._native.publish(
            entry.number,
            read_fd,
            write_fd,
            max(backing_id, 0),
            # Of a removed page the pool waits for the last close, so that it is told of each.
            entry.state == SEALED and entry.parent is not None,
            owner.mode,
            owner.uid,
            owner.gid,
            entry.changed_ns,
        )

    def publish_directory(self, directory: Directory, fd: int) -> None:
        owner = directory.owner
        self._native.publish(
            directory.number, fd, -1, 0, False, owner.mode, owner.uid, owner.gid, directory.changed_ns
        )

    def _backing_id(self, fd: int) -> int:
        """An id, or -1: all opens of a file that are alive at once must agree, so it is not tried again."""
        try:
            return self._native.backing_open(fd)
        except OSError as error:
            if error.errno == errno.ENODEV:
                return -1  # unmounted
            if not self._refused:
                self._refused = f"the kernel refused a file: {error.strerror}"
                log.warning("passthrough is off: %s", self._refused)
            return -1

    def describe(self, entry: Entry, status: os.stat_result) -> None:
        self._native.describe(
            entry.number,
            status.st_size,
            status.st_blocks,
            status.st_nlink,
            status.st_blksize,
            status.st_atime_ns,
            status.st_mtime_ns,
        )

    def withdraw(self, entry: Entry) -> int:
        return self._native.withdraw(entry.number)

    def release(self, entry: Entry, backing_id: int) -> None:
        entry.lookups += self._native.forget(entry.number)
        if backing_id > 0:
            try:
                self._native.backing_close(backing_id)
            except OSError as error:
                if error.errno not in (errno.ENODEV, errno.ENOTCONN, errno.EPERM):
                    raise

    def opens(self, entry: Entry) -> int:
        return self._native.opens(entry.number)

    def take_marks(self, entry: Entry) -> tuple[bool, bool]:
        return self._native.take_marks(entry.number)

    def take_lookups(self, entry: Entry) -> int:
        return self._native.take_lookups(entry.number)

    def name_add(self, parent: int, name: bytes, number: int) -> None:
        self._native.name_add(parent, name, number)

    def name_remove(self, parent: int, name: bytes) -> None:
        self._native.name_remove(parent, name)

    def name_gone(self, parent: int, name: bytes, evicted: bool) -> None:
        self._native.name_gone(parent, name, evicted)

    def name_searched(self, parent: int, name: bytes, task: int) -> None:
        self._native.name_searched(parent, name, task)

    def take_misses(self) -> tuple[int, int]:
        return self._native.take_misses()

    def take_ended(self) -> tuple[list[int], list[tuple[int, int]]]:
        return self._native.take_ended()

    def take_touched(self) -> list[tuple[int, int]]:
        return self._native.take_touched()

    def invalidate(self, parent: int, name: bytes) -> None:
        self.invalidations.add(parent, name)

    async def told(self) -> None:
        await self.invalidations.told()


def raise_descriptor_limit() -> int:
    """Lets this process open as many files as it may; returns how many. A ready page holds one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (max(hard, WANTED_DESCRIPTORS), max(hard, WANTED_DESCRIPTORS))
        )
    except ValueError:  # only CAP_SYS_RESOURCE goes beyond the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
