"""Room on the SSD: what leaves it for a page that is worth more."""

from __future__ import annotations

from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

import trio

from kvfs.errors import NotWanted, TierFull
from kvfs.index import STORED, Entry
from kvfs.storage.described import RESIDENT
from kvfs.tiers.ssd_accounts import Reservation

if TYPE_CHECKING:
    from kvfs.storage.storage import Storage

LEAST_EVICTED = 16 << 20
"""Bytes: making a little more room than is asked for saves asking the disk for each page."""


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

    async def make(self, missing_bytes: int, missing_inodes: int, page: Entry) -> None:
        """Evicts for a page of DRAM what is worth less: pages that are only here, the coldest first, and then
        copies of what is colder in DRAM. Raises NotWanted, and evicts nothing, where that is not enough.
        """
        async with self._lock:
            await self._make(missing_bytes, missing_inodes, page)

    async def _make(self, missing_bytes: int, missing_inodes: int, page: Entry) -> None:
        storage, victims, freed = self._storage, list[Entry](), 0
        wanted = max(missing_bytes, min(LEAST_EVICTED, storage.tier.accounts.capacity_bytes // 16))
        coldest_first = chain(storage.order.victims(), storage.pool.policy.victims())
        for entry in coldest_first:
            if freed >= wanted and len(victims) >= missing_inodes:
                break
            if entry is page:
                is_missed = freed < missing_bytes or len(victims) < missing_inodes
                if is_missed and any(warmer.stored == RESIDENT for warmer in coldest_first):
                    raise NotWanted("the SSD tier is full of pages that are worth more")
                break
            is_there = entry.stored == RESIDENT or entry.state == STORED
            if is_there and not storage.pool.lifetimes.is_pinned(entry):
                freed += entry.size
                victims.append(entry)
        for entry in victims:
            self._evict(entry)
        await storage.history.caught_up()

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
