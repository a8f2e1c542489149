"""What the SSD holds at the start becomes part of the pool again: directories, and pages only it has."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from kvfs.errors import AttributeMissing, DamagedPage, NoSuchPage, TierFailed, TimedOut
from kvfs.garbage import making_what_stays
from kvfs.index import OTHER, STORED, Directory, Entry
from kvfs.page import OWNER, TTL, Owner
from kvfs.sizes import format_count, format_size
from kvfs.storage import described
from kvfs.storage.conflicts import Conflicts
from kvfs.storage.directory_times import recorded_ns
from kvfs.storage.set_aside import copies_were_set_aside
from kvfs.tiers.ssd_directory import is_ours
from kvfs.tiers.ssd_names import is_reserved
from kvfs.tiers.ssd_record import Record
from kvfs.tiers.ssd_scan import Stored, scan_in_background

if TYPE_CHECKING:
    from kvfs.storage.storage import Storage
    from kvfs.tiers.ssd import SsdTier

log = logging.getLogger("kvfs.storage.adoption")

MOST_LOOKS: Final = 8
"""How often names that changed during the walk are looked at, since others change meanwhile."""
AT_ONCE: Final = 64
"""Names that a thread looks at before the event loop hears of it."""


class Adoption:
    """One walk over the SSD; what DRAM has already is right where the two differ."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._conflicts = Conflicts(storage)
        self._by_inode: dict[int, Entry] = {}
        self._pages: list[tuple[int, Entry]] = []
        self._bytes = 0
        self.found = 0
        """How many names there were so far."""
        self.is_scanned = False
        """Whether all has been found: what is asked of the disk then has deadlines of its own."""
        self.progressed = 0.0
        """When the walk began, or found the last of them (trio's clock)."""

    async def run(self) -> None:
        """Takes over everything while the mount serves, and puts the pages in the order of their last use."""
        storage = self._storage
        try:
            await self._adopt_root()
            set_aside = partial(copies_were_set_aside, storage)
            with making_what_stays(lambda: self.found):
                findings = await scan_in_background(storage.tier, self.adopt, set_aside)
                self.is_scanned = True
                await self._look_again()
                self._put_in_order()
        except OSError as error:
            storage.give_up(f"it cannot be walked: {error.strerror}")
            return
        storage.tier.suspect = False  # each page is compared with its digest when it is brought up
        for entry in storage.pool.index.entries():
            if entry.stored is None and entry in storage.pool.policy:
                storage.demotions.lacks_copy(entry)
        log.info(
            "%s, %s only on the SSD; %s there damaged, %s not ours",
            format_count(len(self._pages), "page"),
            format_size(self._bytes),
            format_count(sum(findings.damaged.values()), "page"),
            format_count(findings.foreign, "file"),
        )

    async def _look_again(self) -> None:
        """At what names mean there that changed during the walk. Then DRAM and the SSD can be compared."""
        history = self._storage.history
        for _ in range(MOST_LOOKS):
            names = list(history.named)
            history.named.clear()
            for path in names:
                self._conflicts.forget(path)
            with suppress(OSError, TierFailed, TimedOut):
                for path in names:
                    await history.followed(path)
                for place in range(0, len(names), AT_ONCE):
                    await self._look_at(names[place : place + AT_ONCE])
            if await self._conflicts.resolve():
                return
        self._conflicts.drop(history.named)  # names change faster than one can look

    async def _look_at(self, names: list[bytes]) -> None:
        tier = self._storage.tier
        looks = await self._storage.in_thread(lambda _: [look(tier, path) for path in names], b"")
        self.adopt([found for found in looks if found is not None and not found.is_directory])

    def _put_in_order(self) -> None:
        """By the time of the last use; what was used meanwhile is there already."""
        order = self._storage.order
        self._pages.sort(key=lambda page: page[0])
        for _, entry in self._pages:
            if entry.state == STORED and entry.parent is not None and entry not in order:
                order.add(entry)

    async def _adopt_root(self) -> None:
        tier, root = self._storage.tier, self._storage.pool.index.root
        with suppress(AttributeMissing):
            text = await trio.to_thread.run_sync(tier.get_attribute, b"", TTL, abandon_on_cancel=True)
            if not self._storage.pool.lifetimes.directory_attributes(root):
                self._adopt_default(root, {TTL: text})

    def adopt(self, batch: list[Stored]) -> None:
        """What was found, parents before their children; what is known already stays as it is."""
        if self._storage.history.is_lost:
            return
        self.found += len(batch)
        self.progressed = trio.current_time()
        last_path, parent = b"", self._storage.pool.index.find(b"")
        for found in batch:
            parent_path, _, name = found.path.rpartition(b"/")
            if parent_path != last_path:  # what is in one directory comes together
                last_path, parent = parent_path, self._storage.pool.index.find(parent_path)
            if isinstance(parent, Directory):
                if found.is_directory:
                    self._adopt_directory(parent, name, found)
                else:
                    self._adopt_page(parent, name, found)
            else:
                self._storage.history.unlink(found.path)

    def _adopt_directory(self, parent: Directory, name: bytes, found: Stored) -> None:
        pool = self._storage.pool
        existing = parent.children.get(name)
        if existing is not None:
            if not isinstance(existing, Directory):
                self._storage.history.remove_directory(found.path)
            return
        owner = found.record.owner
        if owner is None or not stat.S_ISDIR(owner.mode):
            owner = Owner(stat.S_IFDIR | 0o755, os.geteuid(), os.getegid())
        with pool.directories.unseen(parent):
            pool.tier.mkdir(found.path)
        pool.tier.set_attribute(found.path, OWNER, owner.format().encode())
        pool.tier.utime(found.path, (found.atime_ns, recorded_ns(found.attributes, found.mtime_ns)))
        self._adopt_default(pool.index.add(parent, name, owner, OTHER), found.attributes)

    def _adopt_default(self, directory: Entry, attributes: Mapping[str, bytes]) -> None:
        """How long the pages live that are sealed below a directory that DRAM did not have."""
        if TTL in attributes:
            self._storage.pool.tier.set_attribute(directory.path(), TTL, attributes[TTL])
            self._storage.pool.lifetimes.found(directory, attributes)

    def _adopt_page(self, parent: Directory, name: bytes, found: Stored) -> None:
        storage, pool = self._storage, self._storage.pool
        existing = parent.children.get(name)
        digest, owner = found.record.digest, found.record.owner
        if found.path in storage.history.named:  # it may have another name by now, or none
            return
        if existing is not None:
            if existing.stored is not None:
                return
            if digest is None or existing in storage.rewritten:
                storage.history.unlink(found.path)
            elif self._conflicts.digest(existing) == digest:
                self._conflicts.has_copy(existing, found.path)
            else:
                self._conflicts.add(found.path, digest)
            return
        if digest is None or owner is None or not stat.S_ISREG(owner.mode):
            storage.history.unlink(found.path)
            return
        linked = self._by_inode.get(found.inode) if found.links > 1 else None
        if linked is not None and linked.state == STORED and linked.parent is not None:
            pool.index.add_link(linked, parent, name)
            return
        entry = pool.index.add(parent, name, owner, STORED)
        entry.size = pool.index.intern_size(digest.size)
        entry.hits = found.record.hits
        entry.stored = described.pack(found.size, found.blocks, found.atime_ns, found.mtime_ns)
        if found.attributes:
            pool.lifetimes.found(entry, found.attributes)
        if found.links > 1:
            self._by_inode[found.inode] = entry
        self._pages.append((max(found.atime_ns, found.mtime_ns), entry))
        self._bytes += found.size


def look(tier: SsdTier, path: bytes) -> Stored | None:
    """In a thread: what the SSD has under one path. A damaged page is set aside."""
    try:
        opened = tier.open_page(path)
    except DamagedPage as error:
        tier.set_aside(path, error.reason, error.inode)
        return None
    except NoSuchPage:
        return _look_for_directory(tier, path)
    os.close(opened.fd)
    return _found(path, opened.status, opened.record, opened.attributes)


def _look_for_directory(tier: SsdTier, path: bytes) -> Stored | None:
    if is_reserved(path):
        return None
    try:
        fd = tier.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        status = os.fstat(fd)
        record, attributes = tier.records.examine(fd)
    finally:
        os.close(fd)
    if record is None or not is_ours(status):
        return None
    return _found(path, status, record, attributes)


def _found(path: bytes, status: os.stat_result, record: Record, attributes: dict[str, bytes]) -> Stored:
    return Stored(
        path,
        stat.S_ISDIR(status.st_mode),
        record,
        attributes,
        status.st_size,
        status.st_blocks,
        status.st_nlink,
        status.st_ino,
        status.st_mtime_ns,
        status.st_atime_ns,
    )
