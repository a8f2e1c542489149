"""One page leaves DRAM, where that frees memory now: nobody but us has it open or mapped."""

from __future__ import annotations

import fcntl
import logging
import os
from typing import TYPE_CHECKING

import trio

from kvfs import holding as holdings
from kvfs.counters import LimitedLog
from kvfs.index import Entry
from kvfs.sealing import lease_is_free
from kvfs.steps import step
from kvfs.storage.described import RESIDENT

if TYPE_CHECKING:
    from kvfs.pool import Pool

log = logging.getLogger("kvfs.leaving")

MUCH_FREED = 16 << 20
"""Bytes of one file, which take some 0.1 ms to free: to ask a thread costs as much."""
INLINE_FREED = 4 << 20
"""Bytes: a thread costs more than giving so much memory back, which takes some 0.1 ms."""


def allocated(fd: int) -> int:
    """What a file occupies, in bytes."""
    return os.fstat(fd).st_blocks * 512


def _close_all(descriptors: list[int]) -> None:
    for fd in descriptors:
        os.close(fd)


async def let_go(fd: int) -> None:
    """Closes the last descriptor of a removed file, -1 for none: in a thread when that frees much memory."""
    if fd < 0:
        return
    if allocated(fd) > MUCH_FREED:
        await trio.to_thread.run_sync(os.close, fd)
    else:
        os.close(fd)


async def close_files(descriptors: list[int]) -> None:
    """Closes files, whose memory a thread frees where it is much, and empties the list."""
    if sum(map(allocated, descriptors)) > INLINE_FREED:
        batch = list(descriptors)
        descriptors.clear()
        with trio.CancelScope(shield=True):  # whoever waits may give up meanwhile
            await trio.to_thread.run_sync(_close_all, batch)
    else:
        _close_all(descriptors)
        descriptors.clear()
        await trio.lowlevel.checkpoint()


class Leaving:
    """Belongs to the event loop; one at a time, under the lock of the `Evictor`."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._log = LimitedLog(log)

    def evict(self, entry: Entry, descriptors: list[int]) -> int:
        """Evicts one page if that frees memory now: its bytes, and the descriptor to close; -1 if not."""
        fd = self.open_unused(entry)
        if fd < 0:
            return -1
        descriptors.append(fd)
        size = allocated(fd)
        step("evict.begun")
        self._pool.policy.remove(entry, evicted=True)  # while it has the name by which it is known again
        try:
            self._take_out(entry, fd)
        except OSError:
            if entry.parent is not None:
                self._pool.policy.add(entry)
            raise
        step("evict.unlinked")
        self._pool.counters.evictions += 1
        self._pool.counters.evicted_bytes += size
        return size

    def _take_out(self, entry: Entry, fd: int) -> None:
        if entry.stored == RESIDENT:
            self._pool.leave_dram(entry, os.fstat(fd))
        else:
            self._pool.uses.note_gone(entry, evicted=True)
            self._pool.remove_everywhere(entry)

    def is_unused(self, entry: Entry) -> bool:
        """Whether `evict` would free memory now."""
        fd = self.open_unused(entry)
        if fd < 0:
            return False
        os.close(fd)
        return True

    def open_unused(self, entry: Entry) -> int:
        """The only descriptor of a page, ours included, or -1 while somebody uses the page."""
        pool = self._pool
        holding = entry.holding
        if pool.storage is not None and not pool.storage.precautions.may_leave_dram(entry):
            return -1
        if entry.ready_id and not pool.idle.release_ready(entry):
            return -1
        if holding is not None and (holding.in_use or pool.face.withdraw(entry)):
            if not holding.in_use:
                pool.face.publish(entry)
            return -1
        if holding is not None:
            # Our own id and descriptor would count as users of the file.
            pool.idle.discard(entry)
            holdings.close(entry, pool.face)
        try:
            fd = pool.tier.open(entry.path(), os.O_RDWR)
        except FileNotFoundError:
            pool.vanished(entry)
            return -1
        except OSError as error:
            self._log.warning("open", f"a page cannot be evicted: {error}")
            return -1
        if not lease_is_free(fd, fcntl.F_WRLCK):  # somebody maps it
            os.close(fd)
            return -1
        return fd
