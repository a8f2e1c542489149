"""Keeps room free: evicts the coldest pages while programs write.

Programs write through the kernel, which asks nobody: so a reserve is kept free, and what statvfs says is
polled every few milliseconds while anyone writes. Room is what the tmpfs says, of bytes and of inodes; pages
that are unlinked but still mapped count as used.
"""

from __future__ import annotations

import fcntl
import logging
import os
from typing import TYPE_CHECKING

import trio

from kvfs import holding as holdings
from kvfs.counters import LimitedLog
from kvfs.errors import OutOfRoom
from kvfs.index import Entry
from kvfs.sealing import lease_is_free
from kvfs.sizes import format_size

if TYPE_CHECKING:
    from kvfs.pool import Pool

log = logging.getLogger("kvfs.room")

POLL_SECONDS = 0.003
IDLE_SECONDS = 1.0
LEAST_RESERVE = 64 << 20
LARGEST_RESERVE_SHARE = 0.25
"""A small pool would otherwise be all reserve."""
INODE_RESERVE_PART = 64
"""So many inodes of all are kept free: every new file needs one, the smallest too."""
LEAST_FOR_A_NAME = 1 << 20
BATCH = 64
"""Victims between two turns of the event loop."""


def _close_all(descriptors: list[int]) -> None:
    for fd in descriptors:
        os.close(fd)


class Evictor:
    """Frees DRAM by evicting pages, the coldest first."""

    def __init__(self, pool: Pool, reserve_percent: float) -> None:
        self._pool = pool
        self._reserve_percent = reserve_percent
        self._largest = 0
        self._lock = trio.Lock()
        self._wanted = trio.Event()
        self._log = LimitedLog(log)
        self.stuck = False
        """Whether the last attempt found nothing more that it could free."""

    def note_size(self, size: int) -> None:
        self._largest = max(self._largest, size)

    @property
    def reserve_bytes(self) -> int:
        """What is kept free: 5 % (``--reserve-percent``), at least 64 MiB or the largest page seen, and at
        most a quarter of the pool."""
        capacity = self._pool.tier.target_bytes
        wanted = max(int(capacity * self._reserve_percent / 100), LEAST_RESERVE, self._largest)
        return min(wanted, int(capacity * LARGEST_RESERVE_SHARE))

    def kick(self) -> None:
        """Somebody begins to write."""
        self._wanted.set()

    def is_full(self) -> bool:
        """Whether a writer finds no page of memory now."""
        room = self._pool.tier.room()
        return room.free_bytes < room.block_size

    async def run(self) -> None:
        """Keeps the reserve for as long as the mount serves."""
        while True:
            if self._pool.writing:
                await trio.sleep(POLL_SECONDS)
            else:
                self._wanted = trio.Event()
                with trio.move_on_after(IDLE_SECONDS):
                    await self._wanted.wait()
            await self._turn()

    async def _turn(self) -> None:
        """One turn of the loop, of which no failure may end the mount."""
        try:
            self._pool.collect_touches()
            await self.keep_reserve()
        except OSError as error:
            self._log.warning("error", f"the reserve could not be kept: {error}")
        except Exception as error:
            self._log.warning("bug", "the reserve could not be kept", error)

    async def keep_reserve(self) -> None:
        """One look at the room, and what follows from it."""
        self._note_full_drafts()
        room = self._pool.tier.room()
        missing_bytes = self.reserve_bytes - room.free_bytes
        missing_inodes = room.total_inodes // INODE_RESERVE_PART - room.free_inodes
        if missing_bytes > 0 or missing_inodes > 0:
            await self.free(missing_bytes, missing_inodes)

    def _note_full_drafts(self) -> None:
        """A writer may have been refused: whether it heeds that or not, its draft is not to be trusted."""
        if not self._pool.writing or not self.is_full():
            return
        for entry in self._pool.writing:
            if entry.holding is not None and not entry.holding.failure:
                entry.holding.failure = "no-room"

    async def require(self, size: int) -> None:
        """Makes ``size`` bytes free on top of nothing: for growth that the daemon itself allocates.

        Raises OutOfRoom when that much cannot be freed now.
        """
        missing = size - self._pool.tier.room().free_bytes
        if missing > 0 and await self.free(missing) < missing:
            raise OutOfRoom(f"the pool has no room for another {format_size(size)}")

    async def for_a_name(self) -> None:
        """A new file or directory found no room: evicts what is missing for a few, so that it is worth
        trying again."""
        room = self._pool.tier.room()
        await self.free(LEAST_FOR_A_NAME - room.free_bytes, BATCH - room.free_inodes)

    async def free(self, wanted: int, wanted_inodes: int = 0) -> int:
        """Evicts until about ``wanted`` bytes and inodes were freed; returns how many bytes were."""
        async with self._lock:
            self._pool.collect_touches()
            freed = 0
            descriptors: list[int] = []
            freed_inodes = 0
            try:
                for attempt, entry in enumerate(self._pool.policy.victims(), 1):
                    if freed >= wanted and freed_inodes >= wanted_inodes:
                        break
                    if (size := self._evict(entry, descriptors)) >= 0:
                        freed += size
                        freed_inodes += 1
                    if attempt % BATCH == 0:
                        await self._close(descriptors)
            finally:
                await self._close(descriptors)
            self._note_stuck(freed < wanted or freed_inodes < wanted_inodes)
            return freed

    async def _close(self, descriptors: list[int]) -> None:
        if descriptors:
            batch = list(descriptors)
            descriptors.clear()
            await trio.to_thread.run_sync(_close_all, batch)
        else:
            await trio.lowlevel.checkpoint()

    def _note_stuck(self, stuck: bool) -> None:
        if stuck and not self.stuck and self._pool.writing:
            self._log.warning("stuck", "the pool is full and every page left is in use: writers get ENOSPC")
        self.stuck = stuck

    def _evict(self, entry: Entry, descriptors: list[int]) -> int:
        """Evicts one page if that frees memory now: its bytes, and the descriptor to close; -1 if not."""
        pool = self._pool
        holding = entry.holding
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
        descriptors.append(fd)
        size = os.fstat(fd).st_blocks * 512
        pool.remove_everywhere(entry)
        pool.counters.evictions += 1
        pool.counters.evicted_bytes += size
        return size

    async def shrink(self) -> None:
        """Brings a tier that is larger than asked for down to its size, by evicting."""
        tier = self._pool.tier
        while tier.oversized:
            excess = tier.room().used_bytes - tier.target_bytes
            if excess > 0 and await self.free(excess + self.reserve_bytes) == 0:
                raise OutOfRoom(
                    f"the pool cannot shrink to {format_size(tier.target_bytes)}: pages of "
                    f"{format_size(tier.room().used_bytes)} are in use; end the programs that have them, or "
                    "give it a larger --pool"
                )
            tier.resize(tier.target_bytes)
