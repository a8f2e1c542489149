"""The pool: which names exist, where their bytes are, and how both change together.

A change is made on the tier first and then in the index, without an await in between, so that the two agree
whenever another task runs. What must wait for a thread looks again afterwards.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from kvfs import holding as holdings
from kvfs.busy_directories import BusyDirectories
from kvfs.counters import Counters, LimitedLog
from kvfs.errors import NoSuchPage, StalePage
from kvfs.holding import Face, Holding, NoFace
from kvfs.idle import IdlePages
from kvfs.index import (
    DRAFT,
    OTHER,
    SEALED,
    STORED,
    Directory,
    Entry,
    Index,
)
from kvfs.lifetimes import Lifetimes
from kvfs.naming import Naming
from kvfs.page import OWNER, Owner, shown
from kvfs.policy import ExpectedReuse
from kvfs.room import Evictor
from kvfs.sealing import Sealer
from kvfs.storage import described
from kvfs.storage.history import NoHistory
from kvfs.tiers.base import Room
from kvfs.tiers.dram import DramTier
from kvfs.uses import Uses

if TYPE_CHECKING:
    from kvfs.storage.storage import Storage

log = logging.getLogger("kvfs.pool")


def _key(page: Entry) -> int:
    """By what the policy knows a page when it is there again: its path."""
    return hash(page.path())


class Pool:
    """Names, drafts and pages in DRAM. Everything here belongs to the event loop."""

    def __init__(
        self,
        tier: DramTier,
        owner: Owner,
        *,
        reserve_percent: float = 5.0,
        pin_percent: float = 25.0,
        protected_percent: float = 100.0,
        idle_limit: int = 4096,
        idle_limit_without_ids: int = 4096,
    ) -> None:
        self.tier = tier
        self.index = Index(owner)
        self.lifetimes = Lifetimes(self, pin_percent)
        self.policy: ExpectedReuse[Entry] = ExpectedReuse(key_of=_key, protected_percent=protected_percent)
        """Pages in DRAM."""
        self.counters = Counters()
        self.uses = Uses(self)
        self.face: Face = NoFace()
        self.history = NoHistory()
        """Who is told of changes of names, so that the SSD follows; with an SSD, a `History`."""
        self.storage: Storage | None = None
        self.idle = IdlePages(tier, idle_limit, idle_limit_without_ids)
        self.directories = BusyDirectories(tier)
        self.names = Naming(self)
        self.evictor = Evictor(self, reserve_percent)
        self.sealer: Sealer
        self.drafts: set[Entry] = set()
        """Entries whose bytes may change: written now, or not sealed yet."""
        self.writing: set[Entry] = set()
        """Entries that a handle of the daemon has open for writing."""
        self._log = LimitedLog(log)

    def start(self, nursery: trio.Nursery) -> None:
        """Starts the background work: sealing, eviction, and what concerns the SSD."""
        self.sealer = Sealer(self, nursery)
        nursery.start_soon(self.evictor.run)
        nursery.start_soon(self.lifetimes.run)
        if self.storage is not None:
            self.storage.start(nursery)

    def attach_face(self, face: Face) -> None:
        """From now on the kernel asks; before, nothing may be held."""
        self.face = self.idle.face = self.directories.face = face
        self.index.tell(face)

    def close(self) -> None:
        """Lets go of every descriptor; the kernel asks no more, and nothing runs in the background."""
        for entry in self.index.entries():
            if entry.holding is not None:
                holdings.close(entry, self.face)
        self.directories.close()
        if self.storage is not None:
            self.storage.demotions.close()

    def room(self) -> Room:
        """What df shows: with an SSD, its capacity; a page that is in both tiers counts once."""
        dram = self.tier.room()
        if self.storage is None:
            return dram
        return self.storage.room(dram)

    # What exists

    def status(self, entry: Entry) -> os.stat_result:
        """stat(2) of the entry's file. NoSuchPage when the file has vanished from the tier."""
        if entry.holding is not None:
            return os.fstat(entry.holding.read_fd)
        if entry.state == STORED and entry.stored is not None:
            return described.status_of(entry.stored, entry.owner, len(entry.names()))
        if entry is not self.index.root and entry.parent is None:
            if entry.state == OTHER:
                return holdings.removed_status(entry.owner)
            raise StalePage(f"entry {entry.number} has no name any more")
        try:
            return self.tier.stat(entry.path())
        except FileNotFoundError:
            raise self.vanished(entry) from None

    def vanished(self, entry: Entry) -> NoSuchPage:
        """A name is in the index but not on the tier: somebody removed it there, and they are right. Forgets
        it, and with it what was in a directory, but not a link that is still there."""
        self.uses.count_miss(entry, "vanished")
        name = shown(entry.path())
        self._log.warning("vanished", f"{name} is gone from the tier behind our back: forgotten")
        if isinstance(entry, Directory):
            for child in list(entry.children.values()):
                self.vanished(child)
        names = entry.names()
        gone = [names[0], *(link for link in names[1:] if not self._is_there(*link))]
        self.abandon(entry, gone)
        for parent, link in gone:
            self.face.invalidate(parent.number, link)
        return NoSuchPage(name)

    def _is_there(self, parent: Directory, name: bytes) -> bool:
        try:
            self.tier.stat(parent.child_path(name))
        except FileNotFoundError:
            return False
        return True

    # Names that go

    def remove_everywhere(self, entry: Entry) -> None:
        """Unlinks every name of an entry, on the tier and in the index, and tells the kernel."""
        self.idle.secure(entry)
        for parent, name in entry.names():
            path = parent.child_path(name)
            with suppress(FileNotFoundError), self.directories.unseen(parent):
                if isinstance(entry, Directory):
                    self.tier.rmdir(path)
                elif entry.state != STORED:
                    self.tier.unlink(path)
            if entry.stored is not None:
                self.history.unlink(path)
            fd = self.detached(self.index.remove(parent, name))
            # Last, so that no look-up comes between and tells the kernel of the name once more.
            self.face.invalidate(parent.number, name)
            if fd >= 0:
                os.close(fd)

    def detached(self, entry: Entry) -> int:
        """A name of the entry is gone from the index; the last one takes the entry along."""
        if entry.parent is not None:
            if entry.holding is not None:
                self.face.publish(entry)
            return -1
        self.lifetimes.forget(entry)
        self.leave_order(entry)
        self.idle.discard(entry)
        if isinstance(entry, Directory):
            self.directories.forget(entry)
        if self.storage is not None:
            self.storage.demotions.forget(entry)
            self.storage.uses.forget(entry)
            entry.stored = None  # the history takes it away
        holding = entry.holding
        if holding is None:
            if entry.ready_id:
                self.idle.release_ready(entry)
            self._drop_if_forgotten(entry)
            return -1
        if self.face.withdraw(entry) or holding.in_use or self._is_kept(entry, holding):
            return -1  # whoever has it open keeps it; the rest comes with their release
        return self._end(entry)

    def _is_kept(self, entry: Entry, holding: Holding) -> bool:
        return holding.until_forgotten and self.lookups(entry) > 0

    def lookups(self, entry: Entry) -> int:
        """How often the kernel was told of an entry that it has not forgotten since."""
        entry.lookups += self.face.take_lookups(entry)
        return entry.lookups

    def leave_order(self, entry: Entry) -> None:
        """The entry is no longer a page that may be evicted."""
        if entry in self.policy:
            self.policy.remove(entry)
        elif self.storage is not None and entry in self.storage.order:
            self.storage.order.remove(entry)

    def _end(self, entry: Entry) -> int:
        self.idle.discard(entry)
        self.drafts.discard(entry)
        self.writing.discard(entry)
        fd = holdings.detach(entry, self.face)
        self._drop_if_forgotten(entry)
        return fd

    def _drop_if_forgotten(self, entry: Entry) -> None:
        if not self.lookups(entry):
            self.idle.forget(entry)
            self.index.drop(entry)

    def forget(self, number: int, lookups: int) -> int:
        """The kernel no longer knows ``lookups`` of its references to a number. Returns a descriptor to
        close, of a file that was kept for it, or -1."""
        entry = self.index.by_number(number)
        if entry is None:
            return -1
        entry.lookups = max(0, self.lookups(entry) - lookups)
        if entry.lookups == 0 and entry.parent is None and entry is not self.index.root:
            if entry.holding is None:
                self._drop_if_forgotten(entry)
            elif not entry.holding.in_use:
                return self._end(entry)
        return -1

    def abandon(self, entry: Entry, names: list[tuple[Directory, bytes]]) -> None:
        """Takes names of an entry out of the index: on the tier they mean another file already, or none. The
        caller invalidates them, once what they mean now is in the index."""
        for parent, name in names:
            if entry.stored is not None:
                self.history.unlink(parent.child_path(name))
            self.index.remove(parent, name)
        fd = self.detached(entry)
        if fd >= 0:
            os.close(fd)

    # Descriptors

    def leave_dram(self, entry: Entry, status: os.stat_result) -> None:
        """A page that nobody uses, with this status, is from now on only on the SSD."""
        assert self.storage is not None
        for parent, name in entry.names():
            with suppress(FileNotFoundError), self.directories.unseen(parent):
                self.tier.unlink(parent.child_path(name))
        self.leave_order(entry)
        self.storage.demoted(entry, described.pack_status(status))

    def close_holding(self, entry: Entry) -> None:
        """Lets go of our descriptors of an entry that nobody uses through the daemon."""
        if entry.holding is not None:
            holdings.close(entry, self.face)

    def hold(self, entry: Entry) -> Holding:
        """The entry's holding, opened if need be. NoSuchPage when the file has vanished."""
        if entry.holding is not None:
            return entry.holding
        if entry.parent is None:
            raise StalePage("the file was removed")
        try:
            return self.idle.hold(entry)
        except FileNotFoundError:
            raise self.vanished(entry) from None

    def begin_writing(self, entry: Entry, write_fd: int) -> None:
        """The first handle for writing of an entry that is held."""
        holding = entry.holding
        assert holding is not None
        holding.write_fd = write_fd
        holding.writers += 1
        holding.epoch += 1
        self.drafts.add(entry)
        self.writing.add(entry)
        self.evictor.kick()

    def add_writer(self, entry: Entry) -> None:
        """One more handle for writing of a draft."""
        holding = self.hold(entry)
        if holding.write_fd >= 0:
            holding.writers += 1
            holding.epoch += 1
        else:
            # Not by its name: that may mean another file by now.
            path, flags = f"/proc/self/fd/{holding.read_fd}", os.O_RDWR | os.O_CLOEXEC
            self.begin_writing(entry, self.idle.open(lambda: os.open(path, flags)))

    def remove_writer(self, entry: Entry, failure: str = "") -> None:
        """A handle for writing is gone; after the last one the draft is sealed, or dropped (``failure``)."""
        holding = entry.holding
        assert holding is not None
        holding.failure = holding.failure or failure
        holding.writers -= 1
        if holding.writers:
            return
        was_full, sized = self.face.take_marks(entry)
        holding.sized = holding.sized or sized
        if not holding.failure and (was_full or self.evictor.is_full()):
            holding.failure = "no-room"
        self.writing.discard(entry)
        os.close(holding.write_fd)
        holding.write_fd = -1
        if entry.parent is None:
            self.settle(entry)
            return
        self.face.publish(entry)
        self.sealer.schedule(entry)

    def sealed(self, entry: Entry, *, is_pinned: bool = False) -> None:
        """A draft became a page."""
        self.drafts.discard(entry)
        self.policy.add(entry)
        self.evictor.note_size(entry.size)
        if entry.holding is not None:
            self.face.publish(entry)
        if self.storage is not None:
            self.storage.demotions.add(entry)
        if is_pinned:
            self.lifetimes.keep_if_possible(entry)

    def settle(self, entry: Entry) -> None:
        """Somebody let go of an entry: keep it ready, or let go of it too."""
        holding = entry.holding
        if holding is None or holding.in_use or holding.sealing:
            return
        if entry.parent is None:
            if not self.face.opens(entry) and not self._is_kept(entry, holding):
                os.close(self._end(entry))
        elif entry.state == SEALED:
            self.idle.add(entry)
        else:
            self.drafts.discard(entry)
            holdings.close(entry, self.face)

    # Attributes

    def set_owner(self, entry: Entry, owner: Owner) -> None:
        """Changes the shown mode, user or group."""
        # A draft's is stored with its digest: without one it does not outlive us, nor does what has no name.
        if entry.parent is not None and (entry.stored is not None or entry.is_directory):
            self.history.set_owner(entry.path(), owner)
        is_named = entry.parent is not None or entry is self.index.root
        if entry.state not in (DRAFT, STORED) and is_named:
            target: bytes | int = entry.path() if entry.holding is None else entry.holding.read_fd
            self.tier.set_attribute(target, OWNER, owner.format().encode())
        entry.owner = self.index.intern(owner)
        if entry.is_directory:
            self.index.directories_changed += 1
        self.changed(entry)

    def changed(self, entry: Entry) -> None:
        """A program changed something of an entry other than its bytes: the channel tells of that too."""
        entry.changed_ns = time.time_ns()
        if isinstance(entry, Directory):
            self.directories.changed(entry)
        elif entry.holding is not None:
            self.face.publish(entry)
        else:
            self.idle.changed(entry)

    def set_times(self, entry: Entry, access_ns: int, modification_ns: int) -> None:
        if entry.parent is not None and entry.stored is not None:
            self.history.set_times(entry.path(), access_ns, modification_ns)
        if entry.state == STORED and entry.stored is not None:
            entry.stored = described.with_times(entry.stored, access_ns, modification_ns)
        elif entry.holding is not None:
            os.utime(entry.holding.read_fd, ns=(access_ns, modification_ns))
        else:
            self.tier.utime(entry.path(), (access_ns, modification_ns))
        self.changed(entry)

    @property
    def pages(self) -> int:
        return len(self.policy)

    @property
    def unsealed(self) -> int:
        """Drafts that nobody writes any more and that are not pages yet."""
        return self.sealer.waiting
