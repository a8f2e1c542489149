"""Keeps room free: evicts the coldest pages while programs write.

Programs write through the kernel, which asks nobody: so a reserve is kept free, and what statvfs says is
polled every few milliseconds while anyone writes. Where programs do ask, when they open a file for writing or
give it a size, room is made before they are answered. Room is what the tmpfs says, of bytes and of inodes;
pages that are unlinked but still mapped count as used.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from kvfs.counters import LimitedLog
from kvfs.errors import OutOfRoom, PageInUse, TierFailed
from kvfs.index import SEALED, STORED, UNCHECKED, Entry
from kvfs.leaving import Leaving, allocated, close_files
from kvfs.sizes import format_size
from kvfs.storage.described import RESIDENT

if TYPE_CHECKING:
    from kvfs.pool import Pool

log = logging.getLogger("kvfs.room")

POLL_SECONDS = 0.003
IDLE_SECONDS = 1.0
LEAST_RESERVE = 64 << 20
LARGEST_RESERVE_SHARE = 0.25
"""A small pool would otherwise be all reserve."""
LARGEST_EXPECTED_SHARE = 0.5
"""Of the pool, for what is being written: the rest is for the file that was written just before."""
SEALING_SECONDS = 5.0
"""How long whoever wants room waits for files that were just closed: they can be evicted once sealed."""
INODE_RESERVE_PART = 64
"""So many inodes of all are kept free: every new file needs one, the smallest too."""
LEAST_FOR_A_NAME = 1 << 20
BATCH = 64
"""Victims between two turns of the event loop."""


@dataclass(slots=True)
class _Want:
    """How much is to be freed, and how far that has come."""

    bytes: int
    inodes: int
    freed: int = 0
    freed_inodes: int = 0
    unstored: list[Entry] = field(default_factory=list)
    """Pages that can go once they have been copied to the SSD."""
    unstored_bytes: int = 0

    @property
    def is_met(self) -> bool:
        """Whether nothing more need be looked for."""
        count = self.freed_inodes + len(self.unstored)
        return self.freed + self.unstored_bytes >= self.bytes and count >= self.inodes

    @property
    def is_missed(self) -> bool:
        return self.freed < self.bytes or self.freed_inodes < self.inodes


class Evictor:
    """Frees DRAM by evicting pages, the coldest first."""

    def __init__(self, pool: Pool, reserve_percent: float) -> None:
        self._pool = pool
        self._leaving = Leaving(pool)
        self._reserve_percent = reserve_percent
        self._largest = 0
        self._lock = trio.Lock()
        self._wanted = trio.Event()
        self._rest_until = 0.0
        """Until then (trio's clock) writers do not wait for room: looking for it was in vain just now."""
        self._log = LimitedLog(log)
        self.on_evicted: Callable[[], None] = lambda: None
        """Called when pages have left, before anybody who waited for that goes on."""
        self.stuck = False
        """Whether the last attempt found nothing more that it could free."""

    def note_size(self, size: int) -> None:
        """A file has become so large: others may become so too."""
        self._largest = max(self._largest, size)

    @property
    def reserve_bytes(self) -> int:
        """What is kept free: 5 % (``--reserve-percent``), at least 64 MiB or the largest file seen, at most a
        quarter of the pool; and more while the files that are being written may need more."""
        capacity = self._pool.tier.target_bytes
        wanted = max(int(capacity * self._reserve_percent / 100), LEAST_RESERVE, self._largest)
        reserve = min(wanted, int(capacity * LARGEST_RESERVE_SHARE))
        if self._largest * len(self._pool.writing) <= reserve:
            return reserve
        return max(reserve, self._expected_bytes())

    def _expected_bytes(self) -> int:
        """What the files that are being written need until each is as large as the largest file seen, but at
        most half of the pool."""
        expected = sum(max(0, self._largest - self._occupied(entry)) for entry in self._pool.writing)
        return min(expected, int(self._pool.tier.target_bytes * LARGEST_EXPECTED_SHARE))

    @staticmethod
    def _occupied(draft: Entry) -> int:
        return 0 if draft.holding is None else allocated(draft.holding.read_fd)

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
        with self._surviving("the reserve could not be kept"):
            self._pool.uses.collect_misses()
            for _ in self._pool.uses.steps():
                await trio.lowlevel.checkpoint()
            await self.keep_reserve()

    @contextmanager
    def _surviving(self, failure: str) -> Iterator[None]:
        """Around what is done for the reserve: nobody else's request may fail with it."""
        try:
            yield
        except OSError as error:
            self._log.warning("error", f"{failure}: {error}")
        except Exception as error:
            self._log.warning("bug", failure, error)

    async def keep_reserve(self) -> None:
        """One look at the room, and what follows from it."""
        self._note_full_drafts()
        async with self._lock:
            room = self._pool.tier.room()
            missing_bytes = self.reserve_bytes - room.free_bytes
            missing_inodes = room.total_inodes // INODE_RESERVE_PART - room.free_inodes
            if missing_bytes > 0 or missing_inodes > 0:
                await self._free(missing_bytes, missing_inodes)
            else:
                self.stuck = False

    def _note_full_drafts(self) -> None:
        """A writer may have been refused: whether it heeds that or not, its draft is not to be trusted."""
        if not self._pool.writing or not self.is_full():
            return
        for entry in self._pool.writing:
            if entry.holding is not None and not entry.holding.failure:
                entry.holding.failure = "no-room"

    async def require(self, size: int) -> None:
        """Makes ``size`` bytes free on top of nothing: for growth that the daemon itself allocates.

        Raises OutOfRoom, and evicts nothing, when that much cannot be freed now.
        """
        # With nothing left the pool would count as full, and what is being written would be dropped.
        wanted = size + self._pool.tier.room().block_size
        if not await self._make_free(wanted) and not await self._make_free(size):
            raise OutOfRoom(f"the pool has no room for another {format_size(size)}")

    async def expect_growth(self) -> None:
        """Somebody was just given a file to write, and will not ask for room: makes it before they begin.

        Nobody is refused: where room cannot be had now, the writer finds that out. Nobody waits long either,
        for a page to be sealed or copied: the kernel holds their directory meanwhile.
        """
        room, begin = self._pool.tier.room(), trio.current_time()
        if room.free_bytes > self._largest * len(self._pool.writing) or begin < self._rest_until:
            return
        is_free = False
        with self._surviving("no room could be made for a writer"), trio.move_on_after(SEALING_SECONDS):
            is_free = await self._make_free(self._expected_bytes() + room.block_size)
        if not is_free:
            end = trio.current_time()
            self._rest_until = end + (end - begin)

    async def _make_free(self, size: int) -> bool:
        """Makes ``size`` bytes free if that is possible, and else evicts nothing and says false.

        Waits for files that were just closed, if they are needed.
        """
        deadline = trio.current_time() + SEALING_SECONDS
        while (missing := size - self._free_bytes()) > 0:
            async with self._lock:
                missing = size - self._free_bytes()
                possible = await self._can_free(missing)
                if possible:
                    await self._free(missing)
            if not possible and not await self._progress(deadline):
                return False
        return True

    async def _progress(self, deadline: float) -> bool:
        """Waits until something may have become evictable; says whether there was anything to wait for."""
        storage = self._pool.storage
        if await self._pool.sealer.progress(deadline):
            return True
        return storage is not None and await storage.history.progress(deadline)

    def _free_bytes(self) -> int:
        return self._pool.tier.room().free_bytes

    async def _can_free(self, wanted: int) -> bool:
        """Whether evicting would free ``wanted`` bytes now."""
        if wanted <= 0:
            return True
        for attempt, entry in enumerate(self._pool.policy.victims(), 1):
            if (fd := self._leaving.open_unused(entry)) >= 0:
                wanted -= allocated(fd)
                os.close(fd)
            if wanted <= 0:
                return True
            if attempt % BATCH == 0:
                await trio.lowlevel.checkpoint()
        return False

    async def for_a_name(self) -> None:
        """A new file or directory found no room: evicts what is missing for a few, so that it is worth
        trying again."""
        async with self._lock:
            room = self._pool.tier.room()
            await self._free(LEAST_FOR_A_NAME - room.free_bytes, BATCH - room.free_inodes)

    async def evict(self, entry: Entry) -> None:
        """Evicts one page, wherever it is in the order; with an SSD once that has a copy. Nothing happens
        where it is not in DRAM.

        Raises PageInUse while somebody uses or writes it, or where it is pinned, and TierFailed where the SSD
        does not take it.
        """
        if self._pool.lifetimes.is_pinned(entry):
            raise PageInUse("the page is pinned")
        storage = self._pool.storage
        is_page = entry.state in (SEALED, UNCHECKED)
        if storage is not None and is_page:
            await storage.demotions.copy(entry)
            await storage.precautions.before_leaving_dram(entry)
        async with self._lock:
            if entry.state == STORED:
                return
            # It may have become a page while others evicted, and was not copied then.
            if not is_page or entry.state not in (SEALED, UNCHECKED) or entry.parent is None:
                if self._is_empty(entry):
                    return  # and stays so: it takes no room
                raise PageInUse("the file is being written, or waits for its digest")
            if storage is not None and entry.stored != RESIDENT:
                raise TierFailed("the SSD tier does not take the page: it stays in DRAM")
            descriptors: list[int] = []
            try:
                if self._leaving.evict(entry, descriptors) < 0:
                    raise PageInUse("somebody has the page open or mapped")
            finally:
                await close_files(descriptors)
                self.on_evicted()

    def _is_empty(self, entry: Entry) -> bool:
        pool = self._pool
        return entry.is_file and entry not in pool.writing and not pool.status(entry).st_size

    async def free(self, wanted: int, wanted_inodes: int = 0) -> int:
        """Evicts until about ``wanted`` bytes and inodes were freed; returns how many bytes were."""
        async with self._lock:
            return await self._free(wanted, wanted_inodes)

    async def _free(self, wanted: int, wanted_inodes: int = 0) -> int:
        """`free`, for who has the lock: what is missing is counted under it too, so that nobody evicts for
        what another is about to free."""
        self._pool.uses.collect()
        # What is being sealed now can be evicted in a moment.
        hopeful = self._pool.sealer.under_way
        want = _Want(wanted, wanted_inodes)
        descriptors: list[int] = []
        try:
            for attempt, entry in enumerate(self._pool.policy.victims(), 1):
                if want.is_met:
                    break
                self._evict_or_copy(entry, descriptors, want)
                if attempt % BATCH == 0:
                    await close_files(descriptors)
            await self._copy_and_evict(descriptors, want)
        finally:
            await close_files(descriptors)
            self.on_evicted()
        self._note_stuck(not hopeful and want.is_missed)
        return want.freed

    def _evict_or_copy(self, entry: Entry, descriptors: list[int], want: _Want) -> None:
        """Evicts a page, unless it is to be copied to the SSD first."""
        storage = self._pool.storage
        if storage is not None and storage.wants(entry) and self._leaving.is_unused(entry):
            want.unstored.append(entry)
            want.unstored_bytes += entry.size
        elif (size := self._leaving.evict(entry, descriptors)) >= 0:
            want.freed += size
            want.freed_inodes += 1

    async def _copy_and_evict(self, descriptors: list[int], want: _Want) -> None:
        """What had to be copied first goes now, copied or not: the SSD may have refused it."""
        storage = self._pool.storage
        if storage is None or not want.unstored:
            return
        await storage.demotions.copy_all(want.unstored)
        for entry in want.unstored:
            if entry in self._pool.policy and (size := self._leaving.evict(entry, descriptors)) >= 0:
                want.freed += size
                want.freed_inodes += 1

    def _note_stuck(self, stuck: bool) -> None:
        if stuck and not self.stuck and self._pool.writing:
            self._log.warning("stuck", "the pool is full and every page left is in use: writers get ENOSPC")
        self.stuck = stuck

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
