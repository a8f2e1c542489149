"""How a draft becomes a page: nobody writes it any more, its digest is stored.

Nothing tells of the end of a writable mapping, so a lease on the file is tried until it is granted: the
kernel grants a read lease only on a file that nobody has open or mapped for writing.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import logging
import math
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import trio
import xxhash

from kvfs.counters import LimitedLog
from kvfs.index import DRAFT, SEALED, Entry
from kvfs.page import DIGEST, HUGEPAGE, OWNER, SPARSE, Digest, shown
from kvfs.steps import step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvfs.holding import Holding
    from kvfs.pool import Pool
    from kvfs.tiers.dram import DramTier

log = logging.getLogger("kvfs.sealing")

FIRST_RETRY = 0.005
LAST_RETRY = 1.0
DIGEST_CHUNK = 1 << 20
INLINE_BYTES = 256 << 10
"""A thread costs more than the digests of so few bytes, which take some 30 µs."""
BATCH_BYTES = 64 << 20
"""Drafts beyond this go to another thread."""
THREADS = 2

REASONS = {
    "killed": "its writer was ended by a signal",
    "no-room": "the pool was full while it was written",
    "holes": "parts of it were never written",
    "io-error": "its bytes could not be read",
    "abandoned": "the program that was to overwrite it never came back",
}


def ignore_lease_breaks() -> None:
    """A lease that an open breaks sends SIGIO, whose default action would end the process."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)


def lease_is_free(fd: int, kind: int) -> bool:
    """Whether the kernel grants a lease on the file now; it is given back at once.

    F_RDLCK (``fd`` read-only): nobody has the file open or mapped for writing. F_WRLCK: nobody but ``fd``
    has it open or mapped at all.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, kind)
    except BlockingIOError:
        return False
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


def has_holes(fd: int, size: int) -> bool:
    """Whether parts of the file were never written, allocated or not."""
    return os.lseek(fd, 0, os.SEEK_HOLE) < size


def digest_file(fd: int) -> Digest:
    """The digest of a whole file; for a thread. Reads rather than maps, so that a file that somebody shortens
    meanwhile gives another digest and not a SIGBUS."""
    state = xxhash.xxh3_128()
    buffer = bytearray(min(DIGEST_CHUNK, os.fstat(fd).st_size + 1))
    view = memoryview(buffer)
    offset = 0
    while length := os.preadv(fd, [buffer], offset):
        state.update(view[:length])
        offset += length
    return Digest(state.hexdigest(), offset)


@dataclass(slots=True, eq=False)
class _Waiting:
    """A draft that nobody writes any more, as far as the daemon can see."""

    entry: Entry
    holding: Holding
    pause: float
    """Seconds until the next attempt."""


_Due: TypeAlias = tuple[float, int, _Waiting]


class Examined(NamedTuple):
    """What was found out of the bytes of a draft; ``is_huge``: all of it that can lies on hugepages."""

    digest: Digest
    is_huge: bool


def examine_file(tier: DramTier, fd: int, size: int) -> Examined:
    """In a thread: moves a file of ``size`` bytes to hugepages, then computes its digest."""
    is_huge = tier.collapse(fd, size) if size >= HUGEPAGE else True
    return Examined(digest_file(fd), is_huge)


@dataclass(slots=True)
class _Examination:
    """A draft whose digest is being computed, through a descriptor of its own."""

    waiting: _Waiting
    fd: int
    size: int
    epoch: int
    sparse: bool
    examined: Examined | None = None
    error: Exception | None = None

    def run(self, tier: DramTier) -> None:
        """In a thread."""
        try:
            step("seal.begun")
            self.examined = examine_file(tier, self.fd, self.size)
            step("seal.digested")
        except Exception as error:  # one draft's trouble, and not that of the others in the thread
            self.error = error


class Sealer:
    """Seals drafts in the background. Drafts that are due together share a turn of the loop and a thread: for
    a page of common size both cost more than its digest."""

    def __init__(self, pool: Pool, nursery: trio.Nursery) -> None:
        self._pool = pool
        self._nursery = nursery
        self._threads = trio.CapacityLimiter(THREADS)
        self._log = LimitedLog(log)
        self._due: list[_Due] = []
        """A heap by time (trio's clock); the number keeps equal times in order."""
        self._serial = itertools.count()
        self._changed = trio.Event()
        self._promising: set[_Waiting] = set()
        """Drafts that are pages in a moment, as far as is known."""
        self._ended = 0
        """How many drafts became pages, were dropped, or were written again."""
        self._progress = trio.lowlevel.ParkingLot()
        self.waiting = 0
        """Drafts without a writer that are not pages yet."""
        nursery.start_soon(self._run)

    def schedule(self, entry: Entry) -> None:
        """The last writer of a draft has let go of it, as far as the daemon can see."""
        holding = entry.holding
        if holding is not None and not holding.sealing:
            holding.sealing = True
            self.waiting += 1
            waiting = _Waiting(entry, holding, FIRST_RETRY)
            self._promising.add(waiting)
            self._push(waiting)
            size = os.fstat(holding.read_fd).st_size
            # What met a full pool wanted to be larger, by nobody knows how much.
            self._pool.evictor.note_size(2 * size if holding.failure == "no-room" else size)

    @property
    def under_way(self) -> bool:
        """Whether drafts are about to become pages: none of those whose mappings live on."""
        return bool(self._promising)

    async def progress(self, deadline: float) -> bool:
        """Somebody wants room: seals what can be sealed now, and waits, until ``deadline`` (trio's clock),
        for the first draft that becomes a page or is dropped. False when none does."""
        before = self._ended
        self._begin_early()
        with trio.move_on_at(deadline):
            while self._promising and self._ended == before:
                await self._progress.park()
        return self._ended != before

    def _begin_early(self) -> None:
        """Begins with every draft that can be sealed, before its time; the others keep theirs."""
        ready: list[_Due] = []
        later: list[_Due] = []
        for due in self._due:
            (ready if self._can_begin(due[2]) else later).append(due)
        if ready:
            heapq.heapify(later)
            self._due = later
            self._begin_all([waiting for _, _, waiting in sorted(ready)])

    def _no_longer(self, waiting: _Waiting) -> None:
        """Whoever waits for progress looks again."""
        self._promising.discard(waiting)
        self._progress.unpark_all()

    def _push(self, waiting: _Waiting) -> None:
        # In whole steps of the clock: drafts that end at about the same time are due together.
        when = math.ceil((trio.current_time() + waiting.pause) / FIRST_RETRY) * FIRST_RETRY
        waiting.pause = min(waiting.pause * 2, LAST_RETRY)
        if not self._due or when < self._due[0][0]:
            self._changed.set()
        heapq.heappush(self._due, (when, next(self._serial), waiting))

    async def _run(self) -> None:
        while True:
            while not self._due:
                self._changed = trio.Event()
                await self._changed.wait()
            self._changed = trio.Event()
            with trio.move_on_at(self._due[0][0]):
                await self._changed.wait()
            due = []
            while self._due and self._due[0][0] <= trio.current_time():
                due.append(heapq.heappop(self._due)[2])
            self._begin_all(due)

    def _begin_all(self, due: list[_Waiting]) -> None:
        batch: list[_Examination] = []
        size = 0
        for waiting in due:
            examination = self._begin(waiting)
            if examination is not None:
                self._promising.add(waiting)
                batch.append(examination)
                size += examination.size
            if size > BATCH_BYTES:
                self._nursery.start_soon(self._finish, batch)
                batch, size = [], 0
        if batch:
            self._nursery.start_soon(self._finish, batch)

    @staticmethod
    def _is_over(waiting: _Waiting) -> bool:
        """Whether there is nothing left to seal: unlinked, written again, or sealed."""
        entry, holding = waiting.entry, waiting.holding
        return (
            entry.holding is not holding
            or holding.writers > 0
            or entry.parent is None
            or entry.state != DRAFT
        )

    def _begin(self, waiting: _Waiting) -> _Examination | None:
        """One attempt, of which no failure may end the mount; what is left to do needs a thread."""
        try:
            return self._attempt(waiting)
        except OSError as error:  # too many open files, say: it may pass
            self._log.warning("error", f"a draft cannot be sealed now: {error}")
            self._try_later(waiting)
        except Exception:
            log.exception("sealing failed: the draft stays one")
            self._end(waiting)
        return None

    def _can_begin(self, waiting: _Waiting) -> bool:
        """Whether nobody writes the draft, through a mapping either, nor is about to."""
        holding = waiting.holding
        return self._is_over(waiting) or (
            trio.current_time() >= holding.retry_until and lease_is_free(holding.read_fd, fcntl.F_RDLCK)
        )

    def _try_later(self, waiting: _Waiting) -> None:
        self._push(waiting)
        self._no_longer(waiting)

    def _attempt(self, waiting: _Waiting) -> _Examination | None:
        if self._is_over(waiting):
            self._end(waiting)
            return None
        entry, holding = waiting.entry, waiting.holding
        if not self._can_begin(waiting):
            self._try_later(waiting)
            return None
        size = os.fstat(holding.read_fd).st_size
        failure = holding.failure
        if size == 0 and holding.awaited and not holding.epoch:
            failure = "abandoned"
        if size == 0 and (holding.kept_if_empty or not failure):  # empty files stay drafts
            self._end(waiting)
            return None
        sparse = not failure and has_holes(holding.read_fd, size)
        if sparse and not holding.sized:
            failure = "holes"
        if failure:
            self._drop(entry, failure)
            self._end(waiting)
            return None
        return _Examination(waiting, os.dup(holding.read_fd), size, holding.epoch, sparse)

    async def _finish(self, batch: list[_Examination]) -> None:
        tier = self._pool.tier

        def run() -> None:
            for examination in batch:
                examination.run(tier)

        try:
            if sum(one.size for one in batch) <= INLINE_BYTES:
                run()
            else:
                await trio.to_thread.run_sync(run, limiter=self._threads)
        finally:
            for examination in batch:
                os.close(examination.fd)
        for examination in batch:
            try:
                self._conclude(examination)
            except OSError as error:  # no memory for an attribute, say: it may pass
                self._log.warning("error", f"a draft cannot be sealed now: {error}")
                self._try_later(examination.waiting)
            except Exception:
                log.exception("sealing failed: the draft stays one")
                self._end(examination.waiting)

    def _conclude(self, examination: _Examination) -> None:
        waiting = examination.waiting
        if not self._is_over(waiting):
            if waiting.holding.epoch != examination.epoch:  # a writer has come and gone meanwhile
                self._push(waiting)
                return
            if isinstance(examination.error, OSError):
                self._drop(waiting.entry, "io-error", f": {examination.error.strerror}")
            elif examination.error is not None:
                raise examination.error
            else:
                assert examination.examined is not None
                self.store(waiting.entry, waiting.holding, examination.examined, examination.sparse)
        self._end(waiting)

    def _end(self, waiting: _Waiting) -> None:
        """Nothing is left to do for a draft: it is a page, gone, or written again."""
        waiting.holding.sealing = False
        self.waiting -= 1
        self._ended += 1
        self._pool.settle(waiting.entry)
        self._no_longer(waiting)

    async def examine(self, files: Sequence[tuple[int, int]]) -> list[Examined]:
        """Of drafts that nobody can write any more, as descriptors and sizes in bytes. Raises OSError where
        one cannot be read."""
        tier = self._pool.tier

        def run() -> list[Examined]:
            return [examine_file(tier, fd, size) for fd, size in files]

        if sum(size for _, size in files) <= INLINE_BYTES:
            return run()
        return await trio.to_thread.run_sync(run, limiter=self._threads)

    def store(self, entry: Entry, holding: Holding, examined: Examined, sparse: bool) -> None:
        """Makes a draft of which that was found out a page."""
        digest = examined.digest
        tier = self._pool.tier
        tier.set_attribute(holding.read_fd, OWNER, entry.owner.format().encode())
        step("seal.owned")
        if sparse:
            tier.set_attribute(holding.read_fd, SPARSE, b"1")
        is_pinned = self._pool.lifetimes.stamp(entry, holding.read_fd)
        tier.set_attribute(holding.read_fd, DIGEST, digest.format().encode())
        step("seal.stored")
        entry.state = SEALED
        entry.size = self._pool.index.intern_size(digest.size)
        self._pool.counters.sealed += 1
        self._pool.counters.sealed_bytes += digest.size
        if not examined.is_huge and tier.hugepages_active:
            self._pool.counters.small_page_files += 1
        self._pool.sealed(entry, is_pinned=is_pinned)

    def _drop(self, entry: Entry, reason: str, detail: str = "") -> None:
        name = shown(entry.path())
        self._pool.counters.failures[reason] += 1
        self._log.warning(reason, f"{name} is dropped: {REASONS[reason]}{detail}")
        self._pool.remove_everywhere(entry)
