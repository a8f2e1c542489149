"""The SSD of a pool: the parts put together, its order of eviction, and what it tells of itself."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from kvfs import mounts
from kvfs.copies.choosing import CopiesStatistics
from kvfs.copies.jobs import Jobs
from kvfs.counters import LimitedLog
from kvfs.errors import KvfsError, StalePage, TimedOut
from kvfs.index import DRAFT, SEALED, STORED, UNCHECKED, Directory, Entry
from kvfs.interleaved import Work
from kvfs.page import OWNER, PIN, TTL, USER, Digest
from kvfs.policy import LeastRecentlyUsed
from kvfs.policy.admission import Admission, WritePolicy
from kvfs.sizes import format_count
from kvfs.storage.demotion import Demotions
from kvfs.storage.described import RESIDENT
from kvfs.storage.directory_times import DirectoryTimes
from kvfs.storage.history import History
from kvfs.storage.place import Place
from kvfs.storage.precautions import Precautions
from kvfs.storage.promotion import Promotions
from kvfs.storage.space import Space
from kvfs.storage.unstored import Unstored
from kvfs.storage.upkeep import Upkeep
from kvfs.storage.walk import Walk
from kvfs.storage.wear import Wear
from kvfs.tiers import ssd_uses
from kvfs.tiers.base import Room
from kvfs.tiers.ssd_health import Health
from kvfs.tiers.ssd_pages import OpenedPage
from kvfs.tiers.ssd_uses import Use, Uses

if TYPE_CHECKING:
    from kvfs.pool import Pool
    from kvfs.tiers.ssd import SsdTier

log = logging.getLogger("kvfs.storage")

ABANDONED = 16
"""Copies that may be stuck in the kernel, each with a thread and descriptors of its own."""
KEPT = (PIN, TTL)
"""Attributes that a page keeps when it is written again, besides users' own."""
QUESTIONS = 4
"""Threads that ask for attributes: a disk that hangs takes no more than these."""

Answer = TypeVar("Answer")
Copy = Callable[[int, int, int], Digest]
"""``copy(source_fd, target_fd, size)``: so many bytes from offset 0, and the digest of what was read."""
Write = Callable[[int, int, int], Work[Digest]]
"""The same, down."""


class Storage:
    """What a pool has below DRAM. Belongs to the event loop."""

    def __init__(
        self,
        pool: Pool,
        tier: SsdTier,
        *,
        write: Write,
        read: Copy,
        write_at_once: Write | None = None,
        read_path: Callable[[], CopiesStatistics] = lambda: CopiesStatistics("direct", "", False, ""),
        settle_seconds: float = 1.0,
        write_delay_seconds: float = 0.0,
        write_policy: WritePolicy = "all",
        io_timeout: float = 30.0,
    ) -> None:
        """``write`` is for what nobody waits for, ``write_at_once`` for a page in whose place others wait to
        write; the same, where only one is given. For the delays see `Unstored`."""
        self.pool = pool
        self.tier = tier
        self.write = write
        self._write_at_once = write_at_once
        self.read = read
        self.read_path = read_path
        self._started = time.monotonic()
        self.io_timeout = io_timeout
        self.jobs = Jobs(ABANDONED)
        self._questions = trio.CapacityLimiter(QUESTIONS)
        self.health = Health("SSD tier")
        self.space = Space(self)
        self.history = History(tier, self._lose, lambda: self.io_timeout, self.space.make_at_once)
        self.precautions = Precautions(self)
        self.place = Place(self)
        self.demotions = Demotions(
            self, Unstored(settle_seconds, write_delay_seconds), Admission(write_policy)
        )
        self.promotions = Promotions(self)
        self.upkeep = Upkeep(self)
        self.wear = Wear(self)
        self.order: LeastRecentlyUsed[Entry] = LeastRecentlyUsed()
        """Pages that are on the SSD only."""
        self.walk = Walk(self)
        self.walked = trio.Event()
        """Set once the index knows everything that the SSD has."""
        self.rewritten: set[Entry] = set()
        """Whose copies were given up during the walk, which may have seen them."""
        self.nursery: trio.Nursery
        self.uses: Uses[Entry] = Uses()
        self._log = LimitedLog(log)
        self.on_walked: Callable[[], None] = lambda: None
        """Called once the walk is over."""
        self.directory_times = DirectoryTimes(self)
        pool.storage = self
        pool.history = self.history

    def start(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        nursery.start_soon(self.history.run)
        nursery.start_soon(self.demotions.run, nursery)
        self.walk.begin(nursery)
        nursery.start_soon(self._note_uses)
        nursery.start_soon(self.place.run)
        nursery.start_soon(self.space.run)
        nursery.start_soon(self.directory_times.run)
        nursery.start_soon(self.wear.run)

    async def _note_uses(self) -> None:
        """Tells the SSD now and then how often and when its pages were used, for the next daemon."""
        while True:
            await trio.sleep(ssd_uses.INTERVAL)
            self._record(self.uses.take(trio.current_time()))

    def note_all_uses(self) -> None:
        """At a clean end."""
        self._record(self.uses.take_all())
        self.directory_times.record_all()

    def _record(self, used: list[tuple[Entry, int]]) -> None:
        uses = [
            Use(entry.path(), entry.hits, used_ns)
            for entry, used_ns in used
            if entry.parent is not None and entry.stored is not None
        ]
        if uses:
            self.history.append(lambda: self.tier.record_uses(uses))

    @property
    def open_flags(self) -> int:
        """With which flags a page is opened for reading."""
        return os.O_DIRECT if self.tier.direct else os.O_RDONLY

    @property
    def write_at_once(self) -> Write:
        return self._write_at_once or self.write

    @property
    def is_following(self) -> bool:
        """Whether the SSD does what happens to names, and all that is on it is known."""
        is_well = not (self.history.is_lost or self.history.failure or self.place.problem)
        return is_well and self.walked.is_set()

    @property
    def is_working(self) -> bool:
        """Whether pages may be written to the SSD now."""
        return self.is_following and not self.demotions.health.is_failed

    def parents(self, directory: Directory) -> list[dict[str, bytes]]:
        """The attributes of the directories on the way to what lies in ``directory``, from the top."""
        attributes = []
        while directory.parent is not None:
            own = self.pool.lifetimes.directory_attributes(directory)
            attributes.append({OWNER: directory.owner.format().encode(), **own})
            directory = directory.parent
        attributes.reverse()
        return attributes

    # Between DRAM and the SSD

    def wants(self, entry: Entry) -> bool:
        """Whether a page is to be copied before it leaves DRAM."""
        if entry.stored == RESIDENT or entry.state not in (SEALED, UNCHECKED):
            return False
        return self.is_working and self.demotions.wants(entry)

    def demoted(self, entry: Entry, described: bytes) -> None:
        """A page that has a copy left DRAM; ``described`` is what stat told of it there."""
        entry.state, entry.stored = STORED, described
        self.order.add(entry)

    async def begin_anew(self, entry: Entry) -> None:
        """A page that is only on the SSD is opened to be written from nothing: an empty draft in DRAM, with
        its attributes. Nothing happens where it is something else by then."""
        pool = self.pool
        attributes: dict[str, bytes] = {}
        with suppress(OSError, KvfsError):  # nobody is kept from writing by a disk that does not answer
            attributes = await self.ask(entry, self._kept_attributes)
        await self.precautions.before_writing_anew(entry)
        if entry.state != STORED or entry.parent is None:
            return
        (parent, name), *links = entry.names()
        path = parent.child_path(name)
        with pool.directories.unseen(*(directory for directory, _ in entry.names())):
            fd = pool.tier.create(path)
            try:
                for attribute, value in attributes.items():
                    pool.tier.set_attribute(fd, attribute, value)
            finally:
                os.close(fd)
            for further_parent, further_name in links:
                pool.tier.link(path, further_parent.child_path(further_name))
        pool.lifetimes.forget(entry)
        pool.leave_order(entry)
        self.forget_copy(entry)
        entry.state, entry.size = DRAFT, 0
        pool.drafts.add(entry)

    def _kept_attributes(self, path: bytes) -> dict[str, bytes]:
        """In a thread: what a page keeps when it is written again."""
        names = [name for name in self.tier.list_attributes(path) if name in KEPT or name.startswith(USER)]
        return {name: self.tier.get_attribute(path, name) for name in names}

    def forget_copy(self, entry: Entry) -> None:
        """A page will change: its copy on the SSD goes."""
        self.demotions.forget(entry)
        if not self.walked.is_set():
            self.rewritten.add(entry)
        if entry.stored is None:
            return
        self.forget_names(entry)
        entry.stored = None

    def forget_names(self, entry: Entry) -> None:
        """All that the SSD has under the names of a page goes."""
        for parent, name in entry.names():
            self.history.unlink(parent.child_path(name))

    async def read_attribute(self, entry: Entry, name: str) -> bytes:
        """An attribute of a page that is only here. Raises AttributeMissing, TimedOut."""
        return await self.ask(entry, lambda path: self.tier.get_attribute(path, name))

    async def list_attributes(self, entry: Entry) -> list[str]:
        """The names of the attributes of a page that is only here. Raises TimedOut."""
        return await self.ask(entry, self.tier.list_attributes)

    async def ask(self, entry: Entry, question: Callable[[bytes], Answer]) -> Answer:
        """Asks the disk about an entry, by its path: once that means the same there, and again if a rename
        came between, since it may have meant another file. Raises StalePage, TimedOut, and TierFailed."""
        while True:
            if entry.parent is None:
                raise StalePage("the page was removed")
            path = entry.path()
            await self.history.followed(path)
            if entry.parent is None or entry.path() != path:
                continue
            renames = self.history.renames
            try:
                answer = await self.in_thread(question, path)
            except (OSError, KvfsError):
                if renames == self.history.renames:
                    raise
            else:
                if renames == self.history.renames:
                    return answer
                if isinstance(answer, OpenedPage):
                    os.close(answer.fd)

    async def in_thread(self, question: Callable[[bytes], Answer], path: bytes) -> Answer:
        """One call that may wait for the disk. Raises TimedOut, and what the call raises."""
        self.health.require(trio.current_time())
        left_behind = threading.Event()

        def call() -> Answer:
            answer = question(path)
            if left_behind.is_set() and isinstance(answer, OpenedPage):
                os.close(answer.fd)
            return answer

        try:
            with trio.move_on_after(self.io_timeout):
                # Not a success of a disk that failed: names and attributes may come from the kernel's memory.
                return await trio.to_thread.run_sync(call, limiter=self._questions, abandon_on_cancel=True)
        except (FileNotFoundError, NotADirectoryError):
            raise  # the disk works: it says that there is no such file
        except OSError as error:
            self.failed(error.strerror or str(error))
            raise
        finally:
            left_behind.set()
        raise self.failed(f"it did not answer within {self.io_timeout:g} s")

    def succeeded(self) -> None:
        """The disk did what it was asked."""
        if self.health.succeeded():
            log.info("the SSD tier works again")

    def failed(self, reason: str) -> TimedOut:
        """The disk failed, or did not answer: it is asked less from now on, until it works. An error to raise
        where nothing else says so."""
        if self.health.failed(reason, trio.current_time()):
            self._log.warning("failed", f"the SSD tier fails: {reason}")
        return TimedOut(f"the SSD tier: {reason}")

    def room(self, dram: Room) -> Room:
        """The room of both tiers; what is in DRAM alone counts as if it were on the SSD. Where the SSD is the
        smaller one, not all that is in DRAM can be there too: they hold as much as both together."""
        ssd, block = self.tier.room(), dram.block_size
        total = ssd.total_bytes if ssd.total_bytes >= dram.total_bytes else ssd.total_bytes + dram.total_bytes
        drafts = sum(
            os.fstat(entry.holding.read_fd).st_blocks * 512
            for entry in self.pool.drafts
            if entry.holding is not None
        )
        used = min(total, ssd.used_bytes + self.demotions.unstored.total_bytes + drafts)
        return Room(
            total_bytes=total // block * block,
            free_bytes=(total - used) // block * block,
            total_inodes=dram.total_inodes,
            free_inodes=dram.free_inodes,
            block_size=block,
        )

    def statistics(self) -> dict[str, Any]:
        """For status: sizes in bytes, counts since the mount."""
        tier, unstored = self.tier.statistics(), self.demotions.unstored
        return {
            "capacity_bytes": tier.capacity_bytes,
            "used_bytes": tier.used_bytes,
            "working": self.is_working,
            "pages": len(self.order),
            "unstored": len(unstored),
            "unstored_bytes": unstored.waiting_bytes,
            "unstored_seconds": round(unstored.oldest(trio.current_time()), 1) if len(unstored) else 0.0,
            "left_out": unstored.left_out(),
            "waiting_changes": len(self.history),
            "written": self.demotions.written,
            "written_bytes": self.demotions.written_bytes,
            **self.wear.statistics(),
            "read": self.promotions.read,
            "read_bytes": self.promotions.read_bytes,
            "read_path": _shown(self.read_path()),
            "read_path_reason": self.read_path().reason,
            "evictions": self.space.evictions,
            "evicted_bytes": self.space.evicted_bytes,
            "not_written": dict(self.demotions.failures),
            "damaged": tier.damaged,
            "quarantined": tier.quarantined,
            "quarantine_bytes": tier.quarantine_bytes,
            "directory": str(self.tier.directory),
            "direct": tier.direct,
            "uptime_seconds": round(time.monotonic() - self._started, 3),
        }

    def degraded(self) -> list[str]:
        """What is off, each with its reason."""
        lines = []
        if self.health.is_failed:
            lines.append(f"the SSD tier fails: {self.health.statistics().reason}")
        if self.demotions.health.is_failed:
            lines.append(f"the SSD tier takes no pages: {self.demotions.health.statistics().reason}")
        if self.history.is_lost:
            lines.append(f"the SSD tier is given up until the next mount: {self.history.failure}")
        elif self.place.problem:
            lines.append(f"the SSD tier takes no pages: {self.place.problem}")
        elif self.history.failure:
            lines.append(f"the SSD tier does not follow: {self.history.failure}")
        if reason := self.read_path().reason:
            lines.append(f"SSD pages move by {_shown(self.read_path())}: {reason}")
        if self.tier.filesystem in mounts.IN_MEMORY:
            lines.append(f"the SSD tier is in memory ({self.tier.filesystem}): it does not outlive the host")
        if not self.tier.direct:
            lines.append(f"SSD pages go through the page cache: {self.tier.direct_reason}")
        return lines

    def give_up(self, reason: str) -> None:
        """The SSD can never catch up: what is only there is lost, and it is not used until the next mount."""
        self.history.give_up(reason)

    def missing(self) -> str:
        """At the end of the mount: one line on what did not reach the SSD; "" where all did."""
        changes, pages = self.history.count(), len(self.demotions.unstored)
        if not changes and not pages:
            return ""
        reason = self.history.failure or self.demotions.health.statistics().reason or self.place.problem
        return (
            f"{format_count(changes, 'change')} and {format_count(pages, 'new page')} did not reach the SSD "
            f"({reason or 'there was no time or no room'}): the next mount finds there what it had before"
        )

    def _lose(self, reason: str) -> None:
        self._log.warning("given-up", f"the SSD tier is given up until the next mount: {reason}")
        for entry in list(self.pool.index.entries()):
            if entry.state == STORED:
                self.pool.remove_everywhere(entry)
            else:
                entry.stored = None


def _shown(path: CopiesStatistics) -> str:
    return f"{path.path} ({path.mode})" if path.mode else path.path
