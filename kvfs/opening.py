"""Opening files: pages for reading, drafts for writing, and the change from a page back to a draft."""

from __future__ import annotations

import fcntl
import logging
import os
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import trio

from kvfs.counters import LimitedLog
from kvfs.errors import (
    AttributeMissing,
    CorruptPage,
    FileTooLarge,
    NoSuchPage,
    StalePage,
)
from kvfs.holding import Holding
from kvfs.index import DRAFT, SEALED, STORED, UNCHECKED, Entry
from kvfs.page import DIGEST, SPARSE, Digest, shown
from kvfs.replacing import Replacements
from kvfs.sealing import digest_file, lease_is_free
from kvfs.sizes import format_size
from kvfs.syscalls import fallocate

if TYPE_CHECKING:
    from kvfs.pool import Pool

log = logging.getLogger("kvfs.opening")

RETRY_SECONDS = 1.0
"""How long a draft that took a page's name waits for the program that was answered ESTALE."""
INLINE_ALLOCATION = 32 << 20
"""Allocating more than this is left to a thread."""


class Openings:
    """What an open or a change of size means for an entry. What awaits looks again afterwards."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._threads = trio.CapacityLimiter(4)
        self._checking: dict[Entry, trio.Event] = {}
        self._replacing: dict[Entry, trio.Event] = {}
        self._replacements = Replacements(pool, self._threads, self._note_successor)
        self._log = LimitedLog(log)
        self._successors: dict[Entry, tuple[Entry, float]] = {}
        """Pages of which another file took the names not long ago: which, and when (trio's clock)."""

    # Reading

    async def open_reading(self, entry: Entry) -> Holding:
        """One more reader. StalePage when the page turns out not to be there."""
        pool = self._pool
        was_in_dram = entry.state != STORED
        await self.make_readable(entry)
        if entry.parent is None and entry.holding is None:
            raise StalePage("the page was evicted or removed")
        try:
            holding = pool.hold(entry)
        except NoSuchPage as error:
            raise StalePage(str(error)) from None
        holding.readers += 1
        if entry.state == SEALED:
            pool.idle.discard(entry)
            pool.uses.note(entry, was_in_dram=was_in_dram)
        pool.face.publish(entry)
        return holding

    async def make_readable(self, entry: Entry) -> None:
        """Has a page in DRAM, and its bytes compared with the digest, if that is still to be done. Raises
        StalePage when it turns out not to be there, and what bringing it raises."""
        if entry.state == STORED and self._pool.storage is not None:
            await self._pool.storage.promotions.promote(entry)
        await self._check(entry)

    def close_reading(self, entry: Entry) -> None:
        holding = entry.holding
        assert holding is not None
        holding.readers -= 1
        self._pool.settle(entry)

    async def _check(self, entry: Entry) -> None:
        """Compares the bytes of a page that an earlier daemon left with its digest, once."""
        while entry.state == UNCHECKED:
            if (running := self._checking.get(entry)) is not None:
                await running.wait()
                continue
            done = self._checking[entry] = trio.Event()
            try:
                await self._check_now(entry)
            finally:
                del self._checking[entry]
                done.set()

    async def _check_now(self, entry: Entry) -> None:
        pool = self._pool
        try:
            fd = pool.tier.open(entry.path(), os.O_RDONLY)
        except FileNotFoundError:
            raise StalePage(str(pool.vanished(entry))) from None
        try:
            expected = Digest.parse(pool.tier.get_attribute(fd, DIGEST))
            found = await trio.to_thread.run_sync(digest_file, fd, limiter=self._threads)
            reason = "" if found == expected else f"its bytes are {found}, not {expected}"
        except (AttributeMissing, ValueError) as error:
            reason = f"its digest cannot be read: {error}"
        except OSError as error:
            reason = f"it cannot be read: {error.strerror}"
        finally:
            os.close(fd)
        if entry.parent is None or entry.state != UNCHECKED:
            return
        if reason:
            name = shown(entry.path())
            pool.uses.count_miss(entry, "corrupt")
            self._log.warning("corrupt", f"{name} is damaged and dropped: {reason}")
            pool.remove_everywhere(entry)
            raise StalePage(f"{name} is damaged") from CorruptPage(reason)
        entry.state = SEALED

    # Writing

    async def open_writing(self, entry: Entry, truncate: bool, task: int = 0) -> Holding:
        """One more writer of a draft. StalePage when the name means another file from now on. The kernel then
        looks it up again, but once only: what it finds is a draft until the task comes."""
        await self._make_draft_for(task, entry, truncate)
        pool = self._pool
        holding = self._add_writer(entry, task)
        if truncate:
            holding.kept_if_empty = holding.kept_if_empty and not os.fstat(holding.write_fd).st_size
            os.ftruncate(holding.write_fd, 0)
            holding.sized = False
            holding.failure = ""
        pool.face.publish(entry)
        await pool.evictor.expect_growth()
        return holding

    def open_nameless(self, entry: Entry) -> Holding:
        """One who overwrites a file that lost its name before they came, and whom the kernel will not send
        back once more. As on any filesystem nobody will find what they write. Those who have the old bytes
        mapped keep them, because this is another file. StalePage while somebody has it open."""
        pool, holding = self._pool, entry.holding
        if entry.parent is not None or (holding is not None and holding.in_use) or pool.face.withdraw(entry):
            raise StalePage("the name means another file")
        temporary, write_fd = self._replacements.create_temporary()
        self._replacements.remove_if_there(temporary)
        with ExitStack() as undo:
            undo.callback(os.close, write_fd)
            read_fd = pool.idle.open(lambda: os.open(f"/proc/self/fd/{write_fd}", os.O_RDONLY | os.O_CLOEXEC))
            undo.pop_all()
        pool.close_holding(entry)
        entry.holding = Holding(read_fd)
        entry.state, entry.size = DRAFT, 0
        pool.begin_writing(entry, write_fd)
        pool.face.publish(entry)
        return entry.holding

    def _add_writer(self, entry: Entry, task: int) -> Holding:
        pool = self._pool
        holding = pool.hold(entry)
        holding.awaited.pop(task, None)
        try:
            pool.add_writer(entry)
        except OSError:  # the page that it was must not stay a draft
            pool.sealer.schedule(entry)
            raise
        return holding

    async def _make_draft_for(self, task: int, entry: Entry, truncate: bool) -> None:
        try:
            await self._make_draft(entry, truncate)
            if entry.parent is None and entry.holding is None:
                raise StalePage("the file was removed")
        except StalePage:
            await self._await(task, entry)
            raise

    async def _await(self, task: int, entry: Entry) -> None:
        """A task is about to be answered ESTALE. What replaced the entry meanwhile stays a draft until it
        comes, or becomes one, however often it was written and read since."""
        latest = self._latest(entry)
        if latest is entry or latest.parent is None:
            return
        with suppress(StalePage):
            await self._make_draft(latest, truncate=False)
        latest = self._latest(latest)
        if latest.state == DRAFT and latest.holding is not None and latest.parent is not None:
            latest.holding.awaited[task] = trio.current_time() + RETRY_SECONDS
            if not latest.holding.writers:
                self._pool.sealer.schedule(latest)

    def is_replaced(self, entry: Entry) -> bool:
        """Whether a writer was given another file under the names of a page not long ago. The kernel may not
        know that yet: whoever opens the old page now may come after that writer."""
        return entry in self._successors

    def _latest(self, entry: Entry) -> Entry:
        """What took its names, and the names of that, and so on."""
        while (successor := self._successors.get(entry)) is not None:
            entry = successor[0]
        return entry

    async def _make_draft(self, entry: Entry, truncate: bool) -> None:
        while entry.state == STORED and self._pool.storage is not None:
            if truncate and entry.parent is not None:
                await self._pool.storage.begin_anew(entry)
            else:
                await self._pool.storage.promotions.promote(entry)
        if entry.state == UNCHECKED and not truncate:
            await self._check(entry)
        while (running := self._replacing.get(entry)) is not None:
            await running.wait()
        if entry.state == DRAFT:
            return
        pool = self._pool
        if entry.parent is None:
            # Whoever opens it looked the name up before it was removed or replaced. What a writer stored here
            # nobody would find, and those who have the page open would find it changed.
            raise StalePage("the file was removed: its bytes belong to those who have it open")
        holding = pool.hold(entry)
        if pool.face.withdraw(entry) or holding.readers or not self._is_unheld(entry):
            done = self._replacing[entry] = trio.Event()
            try:
                await self._replacements.replace(entry, truncate)
            finally:
                del self._replacing[entry]
                done.set()
                self._leave_page(entry)
            raise StalePage("readers keep the old page; the name has a new draft")
        self.unseal(entry)

    def _leave_page(self, entry: Entry) -> None:
        """A page stays, for its readers or, where the new draft could not be made, for all: opens of it are
        answered without us again."""
        if entry.parent is not None and entry.holding is not None:
            self._pool.face.publish(entry)
        self._pool.settle(entry)

    def _is_unheld(self, entry: Entry) -> bool:
        """Whether nobody but us has the file open or mapped. Our own id and descriptor would count."""
        pool = self._pool
        pool.idle.discard(entry)
        pool.close_holding(entry)
        holding = pool.hold(entry)
        return lease_is_free(holding.read_fd, fcntl.F_WRLCK)

    def unseal(self, entry: Entry) -> None:
        """A page becomes a draft in place: same file, same links."""
        pool = self._pool
        holding = pool.hold(entry)
        for name in (DIGEST, SPARSE):
            try:
                pool.tier.remove_attribute(holding.read_fd, name)
            except AttributeMissing:
                continue
        entry.state = DRAFT
        pool.lifetimes.forget(entry)
        pool.leave_order(entry)
        if pool.storage is not None:
            pool.storage.forget_copy(entry)
        pool.idle.discard(entry)
        pool.drafts.add(entry)
        entry.size = 0
        pool.face.publish(entry)

    def _note_successor(self, entry: Entry, draft: Entry) -> None:
        now = trio.current_time()
        while self._successors and now - next(iter(self._successors.values()))[1] > RETRY_SECONDS:
            del self._successors[next(iter(self._successors))]
        self._successors[entry] = (draft, now)

    # Sizes

    async def resize(self, entry: Entry, size: int, task: int = 0) -> None:
        """truncate(2): growth is allocated, so that no mapping of it can fail later.

        FileTooLarge above half of the pool, OutOfRoom when the pool has no room.
        """
        pool = self._pool
        if size > self.file_limit:
            raise FileTooLarge(f"a file may have at most half of the pool, {format_size(self.file_limit)}")
        await self._make_draft_for(task, entry, truncate=False)
        # Counted even where somebody writes already: they may close the file while this waits.
        self._add_writer(entry, task)
        pool.face.publish(entry)
        try:
            await self._set_size(entry, size)
        finally:
            pool.remove_writer(entry)

    @property
    def file_limit(self) -> int:
        return self._pool.tier.target_bytes // 2

    async def _set_size(self, entry: Entry, size: int) -> None:
        holding = entry.holding
        assert holding is not None
        holding.epoch += 1
        holding.sized = True
        growth = size - os.fstat(holding.write_fd).st_size
        if growth > 0:
            await self._pool.evictor.require(growth)
        old = os.fstat(holding.write_fd).st_size  # others may have changed it meanwhile
        if size <= old:
            os.ftruncate(holding.write_fd, size)
            return
        # The size first: a file that has its size gets hugepages from the allocation.
        os.ftruncate(holding.write_fd, size)
        try:
            with self._pool.tier.growing(size - old):
                if size - old > INLINE_ALLOCATION:
                    await trio.to_thread.run_sync(
                        fallocate, holding.write_fd, 0, old, size - old, limiter=self._threads
                    )
                else:
                    fallocate(holding.write_fd, 0, old, size - old)
        except OSError:
            os.ftruncate(holding.write_fd, old)
            raise
