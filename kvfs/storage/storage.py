"""The SSD of a pool: the parts put together, its order of eviction, and what it tells of itself."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from kvfs.counters import LimitedLog
from kvfs.errors import TierFull, TierUncounted
from kvfs.index import DRAFT, SEALED, STORED, UNCHECKED, Directory, Entry
from kvfs.page import OWNER, Digest
from kvfs.policy import LeastRecentlyUsed
from kvfs.storage.demotion import Demotions
from kvfs.storage.described import RESIDENT
from kvfs.storage.history import History
from kvfs.storage.promotion import Promotions
from kvfs.tiers.ssd_accounts import Reservation
from kvfs.tiers.ssd_health import Health

if TYPE_CHECKING:
    from kvfs.pool import Pool
    from kvfs.tiers.ssd import SsdTier

log = logging.getLogger("kvfs.storage")

LEAST_EVICTED = 16 << 20
"""Bytes: making a little more room than is asked for saves asking the disk for each page."""

Copy = Callable[[int, int, int], Digest]
"""``copy(source_fd, target_fd, size)``: so many bytes from offset 0, and the digest of what was read."""


class Storage:
    """What a pool has below DRAM. Belongs to the event loop."""

    def __init__(
        self,
        pool: Pool,
        tier: SsdTier,
        *,
        write: Copy,
        read: Copy,
        settle_seconds: float = 1.0,
        io_timeout: float = 30.0,
    ) -> None:
        self.pool = pool
        self.tier = tier
        self.write = write
        self.read = read
        self.health = Health("SSD tier")
        self.history = History(tier, self._give_up)
        self.demotions = Demotions(self, settle_seconds)
        self.promotions = Promotions(self, io_timeout)
        self.order: LeastRecentlyUsed[Entry] = LeastRecentlyUsed()
        """Pages that are on the SSD only."""
        self.nursery: trio.Nursery
        self.evictions = 0
        self.evicted_bytes = 0
        self._log = LimitedLog(log)
        self._making_room = trio.Lock()
        pool.storage = self
        pool.history = self.history

    def start(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        nursery.start_soon(self.history.run)
        nursery.start_soon(self.demotions.run, nursery)

    @property
    def open_flags(self) -> int:
        """With which flags a page is opened for reading."""
        return os.O_DIRECT if self.tier.direct else os.O_RDONLY

    @property
    def is_working(self) -> bool:
        """Whether pages may be written to the SSD now."""
        return not self.history.is_lost and not self.history.failure

    def parents(self, directory: Directory) -> list[dict[str, bytes]]:
        """The attributes of the directories on the way to what lies in ``directory``, from the top."""
        attributes = []
        while directory.parent is not None:
            attributes.append({OWNER: directory.owner.format().encode()})
            directory = directory.parent
        attributes.reverse()
        return attributes

    # Between DRAM and the SSD

    def wants(self, entry: Entry) -> bool:
        """Whether a page is to be copied before it leaves DRAM."""
        return entry.stored != RESIDENT and self.is_working and entry.state in (SEALED, UNCHECKED)

    def demoted(self, entry: Entry, described: bytes) -> None:
        """A page that has a copy left DRAM; ``described`` is what stat told of it there."""
        entry.state, entry.stored = STORED, described
        self.order.add(entry)

    def begin_anew(self, entry: Entry) -> None:
        """A page that is only on the SSD is opened to be written from nothing: an empty draft in DRAM."""
        pool = self.pool
        (parent, name), *links = entry.names()
        path = parent.child_path(name)
        os.close(pool.tier.create(path))
        for further_parent, further_name in links:
            pool.tier.link(path, further_parent.child_path(further_name))
        pool.leave_order(entry)
        self.forget_copy(entry)
        entry.state, entry.size = DRAFT, 0
        pool.drafts.add(entry)

    def forget_copy(self, entry: Entry) -> None:
        """A page will change: its copy on the SSD goes."""
        self.demotions.forget(entry)
        if entry.stored is None:
            return
        for parent, name in entry.names():
            self.history.unlink(parent.child_path(name))
        entry.stored = None

    # Room on the SSD

    async def reserve(self, size: int) -> Reservation:
        """Room for a page of ``size`` bytes, by evicting if need be. Raises TierFull, NotStorable."""
        try:
            return self.tier.reserve(size)
        except TierUncounted:
            raise
        except TierFull as error:
            await self.make_room(max(error.missing_bytes, 1), error.missing_inodes)
        return self.tier.reserve(size)

    async def make_room(self, missing_bytes: int, missing_inodes: int = 0) -> None:
        """Evicts pages that are only here, the coldest first, and then copies of the coldest in DRAM."""
        async with self._making_room:
            freed = count = 0
            wanted = max(missing_bytes, min(LEAST_EVICTED, self.tier.accounts.capacity_bytes // 16))
            for entry in self.order.victims():
                if freed >= wanted and count >= missing_inodes:
                    break
                freed += entry.size
                count += 1
                self.evictions += 1
                self.evicted_bytes += entry.size
                self.pool.remove_everywhere(entry)
            for entry in self.pool.policy.victims():
                if freed >= wanted and count >= missing_inodes:
                    break
                if entry.stored == RESIDENT:
                    freed += entry.size
                    count += 1
                    self.forget_copy(entry)
            await self.history.settled()

    def _give_up(self, reason: str) -> None:
        """The SSD can never catch up: what is only there is lost, and it is not used until the next mount."""
        self._log.warning("given-up", f"the SSD tier is given up: {reason}")
        for entry in list(self.pool.index.entries()):
            if entry.state == STORED:
                self.pool.remove_everywhere(entry)
            else:
                entry.stored = None
