"""Room on the SSD: what leaves it for a page that is worth more."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

import trio

from kvfs.errors import NotWanted, TierFailed, TierFull
from kvfs.index import STORED, Entry
from kvfs.sizes import format_count
from kvfs.storage.described import RESIDENT
from kvfs.tiers.ssd_accounts import Reservation

if TYPE_CHECKING:
    from kvfs.storage.storage import Storage

log = logging.getLogger("kvfs.storage.space")

INTERVAL = 1.0
"""Seconds between two looks at whether the SSD is within its capacity, which ask it nothing."""
LEAST_EVICTED = 16 << 20
"""Bytes: making a little more room than is asked for saves asking the disk for each page."""
LEAST_AT_ONCE = 1 << 20
"""Bytes: far more than names and attributes take."""


class Space:
    """Belongs to the event loop. What only the SSD has counts as colder than anything in DRAM."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._lock = trio.Lock()
        """What one has made room for, no other takes."""
        self.evictions = 0
        self.evicted_bytes = 0

    async def reserve(self, size: int, page: Entry) -> Reservation:
        """Room for a page of ``size`` bytes, by evicting what is worth less if need be. Raises TierFull,
        NotWanted, TierUncounted, NotStorable, and what asking the disk raises."""
        tier = self._storage.tier
        async with self._lock:
            with suppress(TierFull):
                return tier.reserve(size)
            # Others may have taken and freed what is on this disk since it was asked last.
            await self._storage.in_thread(lambda _: tier.refresh_room(), b"")
            try:
                return tier.reserve(size)
            except TierFull as error:
                await self._make(max(error.missing_bytes, 1), error.missing_inodes, page)
            return tier.reserve(size)

    async def run(self) -> None:
        """Keeps the SSD within its capacity, for as long as the mount serves: that may be less than at the
        mount before, and directories grow beyond it."""
        storage = self._storage
        await storage.walked.wait()
        while not storage.history.is_lost:
            if storage.is_following and storage.tier.accounts.excess_bytes:
                await self._shrink()
            await trio.sleep(INTERVAL)

    async def _shrink(self) -> None:
        storage = self._storage
        async with self._lock:
            excess, freed, victims = storage.tier.accounts.excess_bytes, 0, list[Entry]()
            for entry in self._coldest_first():
                if freed >= excess:
                    break
                if self._may_go(entry):
                    freed += entry.size
                    victims.append(entry)
            for entry in victims:
                self._evict(entry)
            if victims:
                log.info("evicted %s: above the capacity of the SSD", format_count(len(victims), "page"))
            with suppress(TierFailed):  # what is evicted now goes as soon as the disk follows
                await storage.history.caught_up()

    async def make(self, missing_bytes: int, missing_inodes: int, page: Entry) -> None:
        """Evicts for a page of DRAM what is worth less: pages that are only here, the coldest first, and then
        copies of what is colder in DRAM. Raises NotWanted, and evicts nothing, where that is not enough.
        """
        async with self._lock:
            await self._make(missing_bytes, missing_inodes, page)

    async def _make(self, missing_bytes: int, missing_inodes: int, page: Entry) -> None:
        storage, victims, freed = self._storage, list[Entry](), 0
        wanted = max(missing_bytes, min(LEAST_EVICTED, storage.tier.accounts.capacity_bytes // 16))
        coldest_first = self._coldest_first()
        for entry in coldest_first:
            if freed >= wanted and len(victims) >= missing_inodes:
                break
            if entry is page:
                is_missed = freed < missing_bytes or len(victims) < missing_inodes
                if is_missed and any(warmer.stored == RESIDENT for warmer in coldest_first):
                    raise NotWanted("the SSD tier is full of pages that are worth more")
                break
            if self._may_go(entry):
                freed += entry.size
                victims.append(entry)
        for entry in victims:
            self._evict(entry)
        await storage.history.caught_up()

    def make_at_once(self) -> list[bytes]:
        """The disk is full, and a change of names waits for a few blocks: evicts a little of the coldest that
        lies on the disk where the mount says, and returns its names there."""
        storage, victims, paths, freed = self._storage, list[Entry](), list[bytes](), 0
        for entry in self._coldest_first():
            if freed >= LEAST_AT_ONCE:
                break
            names = [parent.child_path(name) for parent, name in entry.names()]
            if self._may_go(entry) and not any(map(storage.history.concerns, names)):
                freed += entry.size
                victims.append(entry)
                paths += names
        for entry in victims:
            self._evict(entry)
        return paths

    def _coldest_first(self) -> Iterator[Entry]:
        return chain(self._storage.order.victims(), self._storage.pool.policy.victims())

    def _may_go(self, entry: Entry) -> bool:
        """Whether there is a copy that nobody has pinned."""
        is_there = entry.stored == RESIDENT or entry.state == STORED
        return is_there and not self._storage.pool.lifetimes.is_pinned(entry)

    def _evict(self, entry: Entry) -> None:
        storage = self._storage
        if entry.stored == RESIDENT:
            storage.forget_copy(entry)
            storage.demotions.give_up(entry)
            return
        self.evictions += 1
        self.evicted_bytes += entry.size
        storage.pool.uses.note_gone(entry, evicted=True)
        storage.pool.remove_everywhere(entry)
