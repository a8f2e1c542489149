"""How long pages stay: some are pinned, some expire.

Both are attributes of a page's files on every tier it is on, so they outlive the daemon. Belongs to the event
loop.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import trio

from kvfs.counters import LimitedLog
from kvfs.errors import AttributeMissing, KvfsError, StalePage, TooManyPins
from kvfs.index import DRAFT, STORED, Directory, Entry
from kvfs.leaving import close_files
from kvfs.page import PIN, TTL, Lifetime
from kvfs.policy import Expiry
from kvfs.sizes import format_size

if TYPE_CHECKING:
    from kvfs.pool import Pool
    from kvfs.tiers.attributes import Target

log = logging.getLogger("kvfs.lifetimes")

BATCH = 64
"""Pages that are removed between two turns of the event loop."""
MOST_CHANGES = 8192
"""Changes that may wait for the SSD before further pages are removed."""
LONGEST_REST = 1.0
"""Seconds: clocks may be set."""
RETRY_SECONDS = 10.0
MOST_LISTED = 1000
"""Pages that are named; all are counted."""


class Lifetimes:
    """Which pages are pinned, within a budget, and when the others expire."""

    def __init__(self, pool: Pool, pin_percent: float) -> None:
        self._pool = pool
        self._pin_percent = pin_percent
        self._pinned: dict[Entry, None] = {}
        self.pinned_bytes = 0
        self._defaults: dict[Directory, float] = {}
        """For directories that have one, the seconds that the pages live which are sealed below them."""
        self._expiry = Expiry()
        self._log = LimitedLog(log)

    # Pins

    @property
    def budget_bytes(self) -> int:
        """How much of DRAM pinned pages may take."""
        return int(self._pool.tier.target_bytes * self._pin_percent / 100)

    def is_pinned(self, entry: Entry) -> bool:
        return entry in self._pinned

    async def pin(self, entry: Entry) -> None:
        """Keeps a page in DRAM, and brings it there; a draft, once it is a page.

        Raises TooManyPins beyond the budget, and what bringing up a page raises.
        """
        self._require_budget(entry)
        if entry.state == STORED and self._pool.storage is not None:
            await self._pool.storage.promotions.promote(entry)
        if entry.parent is None:
            raise StalePage("the file was removed")
        self._require_budget(entry)
        self._set_attribute(entry, PIN, b"1")
        if entry.state != DRAFT:
            self._keep(entry)

    def unpin(self, entry: Entry) -> None:
        """The page may leave again; it expires now if its time is over."""
        with suppress(AttributeMissing):
            self._remove_attribute(entry, PIN)
        self._let_go(entry)
        if second := self._expiry.get(entry.number):
            self._expiry.set(entry.number, second)

    def _require_budget(self, entry: Entry) -> None:
        size = entry.size or self._pool.status(entry).st_size
        if entry not in self._pinned and self.pinned_bytes + size > self.budget_bytes:
            raise TooManyPins(
                f"pinned pages may take {format_size(self.budget_bytes)}, of which "
                f"{format_size(self.pinned_bytes)} are taken: no room for another {format_size(size)}"
            )

    def _keep(self, entry: Entry) -> None:
        if entry not in self._pinned:
            self._pinned[entry] = None
            self.pinned_bytes += entry.size
        if entry in self._pool.policy:
            self._pool.policy.pin(entry)
        if self._pool.storage is not None:
            self._pool.storage.demotions.touched(entry)

    def _let_go(self, entry: Entry) -> None:
        if entry in self._pinned:
            del self._pinned[entry]
            self.pinned_bytes -= entry.size
            if entry in self._pool.policy:
                self._pool.policy.unpin(entry)

    def keep_if_possible(self, entry: Entry) -> None:
        """A page that is in the order of its tier says of itself that it is pinned."""
        try:
            self._require_budget(entry)
        except TooManyPins as error:
            name = entry.path().decode(errors="backslashreplace")
            self._log.warning("budget", f"{name} is pinned no longer: {error}")
            self.unpin(entry)
        else:
            self._keep(entry)

    def arrived(self, entry: Entry) -> None:
        """A page is in DRAM now that was not before."""
        if entry in self._pinned:
            self._pool.policy.pin(entry)

    async def run(self) -> None:
        """Removes what expires, and brings up what is pinned, for as long as the mount serves."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._remove_when_due)
            if self._pool.storage is not None:
                nursery.start_soon(self._bring_up_pinned)

    async def _bring_up_pinned(self) -> None:
        """Pages that are pinned and not in DRAM: after a start, or because they were damaged there."""
        storage = self._pool.storage
        assert storage is not None
        await storage.walked.wait()
        while True:
            for entry in [entry for entry in self._pinned if entry.state == STORED]:
                try:
                    await storage.promotions.promote(entry)
                except (OSError, KvfsError) as error:
                    self._log.warning("pinned", f"a pinned page is not in DRAM: {error}")
                except Exception as error:  # no failure may end the mount
                    self._log.warning("bug", "a pinned page could not be brought into DRAM", error)
            await trio.sleep(RETRY_SECONDS)

    # Expiring

    async def set_ttl(self, entry: Entry, seconds: float) -> None:
        """Has a page expire so long after it was sealed, a draft after it will be; a directory is given the
        time for what is sealed below it from now on."""
        if isinstance(entry, Directory):
            self._set_attribute(entry, TTL, Lifetime(seconds).format().encode())
            self._defaults[entry] = seconds
            return
        sealed_ns = 0
        if entry.state != DRAFT:
            sealed_ns = await self._sealed_ns(entry)
        if entry.parent is None:
            raise StalePage("the file was removed")
        if entry.state == DRAFT:  # perhaps since a moment ago
            sealed_ns = 0
        lifetime = Lifetime(seconds, sealed_ns)
        self._set_attribute(entry, TTL, lifetime.format().encode())
        self._note(entry, lifetime)

    async def _sealed_ns(self, entry: Entry) -> int:
        """When a page was sealed; when it was modified, where that was not noted."""
        sealed_ns = 0
        with suppress(AttributeMissing, ValueError):
            sealed_ns = Lifetime.parse(await self.read_attribute(entry, TTL)).sealed_ns
        return sealed_ns or self._pool.status(entry).st_mtime_ns

    def remove_ttl(self, entry: Entry) -> None:
        """Raises AttributeMissing where a file or directory that is in DRAM has none."""
        self._remove_attribute(entry, TTL)
        self._expiry.discard(entry.number)
        if isinstance(entry, Directory):
            self._defaults.pop(entry, None)

    def _note(self, entry: Entry, lifetime: Lifetime) -> None:
        if lifetime.sealed_ns:
            self._expiry.set(entry.number, math.ceil(lifetime.sealed_ns / 1e9 + lifetime.seconds))

    def _default(self, directory: Directory | None) -> float:
        """How long what is sealed in a directory lives; 0 for ever."""
        while directory is not None:
            if directory in self._defaults:
                return self._defaults[directory]
            directory = directory.parent
        return 0.0

    async def _remove_when_due(self) -> None:
        while True:
            now = time.time()
            await trio.sleep(min(max(self._expiry.next_second() - now, 0.05), LONGEST_REST))
            while due := self._expiry.take_due(time.time(), BATCH):
                await self._remove(due)

    async def _remove(self, numbers: list[int]) -> None:
        pool = self._pool
        descriptors: list[int] = []
        for number in numbers:
            entry = pool.index.by_number(number)
            if entry is None or entry.parent is None or entry in self._pinned:
                continue
            try:
                self._expire(entry, descriptors)
            except Exception as error:  # no failure may end the mount
                self._log.warning("expired", "a page that has expired could not be removed", error)
                self._expiry.set(number, int(time.time() + RETRY_SECONDS))
        await close_files(descriptors)
        if pool.storage is not None and len(pool.storage.history) > MOST_CHANGES:
            await pool.storage.history.settled()

    def _expire(self, entry: Entry, descriptors: list[int]) -> None:
        if entry.state != STORED:
            with suppress(FileNotFoundError):  # kept open, so that a thread frees the memory
                descriptors.append(self._pool.tier.open(entry.path(), os.O_RDONLY))
        self._pool.uses.count_miss(entry, "expired")
        self._pool.remove_everywhere(entry)

    # What becomes of a page

    def stamp(self, entry: Entry, fd: int) -> bool:
        """A draft is about to become a page: its time counts from now on. Says whether it is to be pinned."""
        tier = self._pool.tier
        names = tier.list_attributes(fd)
        seconds = self._default(entry.parent) if self._defaults else 0.0
        if TTL in names:
            with suppress(ValueError):
                seconds = Lifetime.parse(tier.get_attribute(fd, TTL)).seconds
        if seconds:
            lifetime = Lifetime(seconds, time.time_ns())
            tier.set_attribute(fd, TTL, lifetime.format().encode())
            self._note(entry, lifetime)
        return PIN in names

    def found(self, entry: Entry, attributes: Mapping[str, bytes]) -> None:
        """A page or directory was there at the start."""
        lifetime = None
        with suppress(KeyError, ValueError):
            lifetime = Lifetime.parse(attributes[TTL])
        if isinstance(entry, Directory):
            if lifetime is not None:
                self._defaults[entry] = lifetime.seconds
            return
        if lifetime is not None:
            self._note(entry, lifetime)
        if PIN in attributes:
            self.keep_if_possible(entry)

    def forget(self, entry: Entry) -> None:
        """A page is written again, or gone, as a directory may be."""
        self._let_go(entry)
        self._expiry.discard(entry.number)
        if isinstance(entry, Directory):
            self._defaults.pop(entry, None)

    def said_of(self, entry: Entry) -> tuple[bool, int]:
        """Whether a page is pinned, and the second at which it expires, 0 for never."""
        return entry in self._pinned, self._expiry.get(entry.number)

    def say(self, entry: Entry, said: tuple[bool, int]) -> None:
        """An entry stands for a page of which this was said."""
        is_pinned, second = said
        if is_pinned:
            self.keep_if_possible(entry)
        if second:
            self._expiry.set(entry.number, second)

    def directory_attributes(self, directory: Directory) -> dict[str, bytes]:
        """What a directory has of these attributes."""
        if directory not in self._defaults:
            return {}
        return {TTL: Lifetime(self._defaults[directory]).format().encode()}

    # What is told

    def statistics(self) -> dict[str, Any]:
        """For status: pages and bytes."""
        pinned = {"pages": len(self._pinned), "bytes": self.pinned_bytes, "budget_bytes": self.budget_bytes}
        return {"pinned": pinned, "expiring": {"pages": len(self._expiry)}}

    def expired(self) -> dict[str, Any]:
        """Pages that are over and not removed, because they are pinned or it was not come to them yet: how
        many, their bytes, and which."""
        now = time.time()
        rows: list[dict[str, Any]] = []
        count = size = 0
        for number in self._expiry.overdue(now):
            entry = self._pool.index.by_number(number)
            if entry is None or entry.parent is None:
                continue
            count, size = count + 1, size + entry.size
            if len(rows) < MOST_LISTED:
                age = round(now - self._expiry.get(number), 1)
                path = entry.path().decode(errors="surrogateescape")
                rows.append(
                    {"path": path, "pinned": entry in self._pinned, "bytes": entry.size, "age_seconds": age}
                )
        return {"count": count, "bytes": size, "files": rows}

    # Attributes on the tiers

    async def read_attribute(self, entry: Entry, name: str) -> bytes:
        """Raises AttributeMissing."""
        if entry.state == STORED and self._pool.storage is not None:
            return await self._pool.storage.read_attribute(entry, name)
        return self._pool.tier.get_attribute(self._target(entry), name)

    def _target(self, entry: Entry) -> Target:
        return entry.path() if entry.holding is None else entry.holding.read_fd

    def _set_attribute(self, entry: Entry, name: str, value: bytes) -> None:
        if entry.state != STORED:
            self._pool.tier.set_attribute(self._target(entry), name, value)
        if entry is self._pool.index.root and self._pool.storage is not None:
            tier = self._pool.storage.tier
            self._pool.storage.history.append(lambda: tier.set_attribute(b"", name, value))
        elif self._is_on_ssd(entry):
            self._pool.history.set_attribute(entry.path(), name, value)
        self._pool.changed(entry)

    def _remove_attribute(self, entry: Entry, name: str) -> None:
        if entry.state != STORED:
            self._pool.tier.remove_attribute(self._target(entry), name)
        if entry is self._pool.index.root and self._pool.storage is not None:
            tier = self._pool.storage.tier
            self._pool.storage.history.append(lambda: tier.remove_attribute(b"", name))
        elif self._is_on_ssd(entry):
            self._pool.history.remove_attribute(entry.path(), name)
        self._pool.changed(entry)

    @staticmethod
    def _is_on_ssd(entry: Entry) -> bool:
        return entry.stored is not None or entry.is_directory
