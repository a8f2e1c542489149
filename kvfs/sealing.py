"""How a draft becomes a page: nobody writes it any more, its digest is stored.

Nothing tells of the end of a writable mapping, so a lease on the file is tried until it is granted: the
kernel grants a read lease only on a file that nobody has open or mapped for writing.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
from typing import TYPE_CHECKING

import trio
import xxhash

from kvfs.counters import LimitedLog
from kvfs.index import DRAFT, SEALED, Entry
from kvfs.page import DIGEST, HUGEPAGE, OWNER, Digest

if TYPE_CHECKING:
    from kvfs.holding import Holding
    from kvfs.pool import Pool

log = logging.getLogger("kvfs.sealing")

SPARSE = "sparse"
"""The attribute of a page that was meant to have holes."""

FIRST_RETRY = 0.005
LAST_RETRY = 1.0
DIGEST_CHUNK = 1 << 20
INLINE_DIGEST = 256 << 10
"""A thread costs more than the digest of so few bytes, which takes some 30 µs."""

REASONS = {
    "killed": "its writer was ended by a signal",
    "no-room": "the pool was full while it was written",
    "holes": "parts of it were never written",
    "io-error": "its bytes could not be read",
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
    buffer = bytearray(DIGEST_CHUNK)
    view = memoryview(buffer)
    offset = 0
    while length := os.preadv(fd, [buffer], offset):
        state.update(view[:length])
        offset += length
    return Digest(state.hexdigest(), offset)


class Sealer:
    """Seals drafts in the background, each in a task of its own."""

    def __init__(self, pool: Pool, nursery: trio.Nursery) -> None:
        self._pool = pool
        self._nursery = nursery
        self._threads = trio.CapacityLimiter(2)
        self._log = LimitedLog(log)
        self.waiting = 0
        """Drafts without a writer that are not pages yet."""

    def schedule(self, entry: Entry) -> None:
        """The last writer of a draft has let go of it, as far as the daemon can see."""
        holding = entry.holding
        if holding is not None and not holding.sealing:
            holding.sealing = True
            self.waiting += 1
            self._nursery.start_soon(self._seal, entry, holding)

    async def _seal(self, entry: Entry, holding: Holding) -> None:
        try:
            try:
                await self._attempt_until_done(entry, holding)
            finally:
                holding.sealing = False
                self.waiting -= 1
            self._pool.settle(entry)
        except Exception:  # a bug, which costs this draft and not the mount
            log.exception("sealing failed: the draft stays one")

    async def _attempt_until_done(self, entry: Entry, holding: Holding) -> None:
        retry = FIRST_RETRY
        while True:
            try:
                if await self._attempt(entry, holding):
                    return
            except OSError as error:  # too many open files, no memory for an attribute: it may pass
                self._log.warning("error", f"a draft cannot be sealed now: {error}")
            await trio.sleep(retry)
            retry = min(retry * 2, LAST_RETRY)

    @staticmethod
    def _is_over(entry: Entry, holding: Holding) -> bool:
        """Whether there is nothing left to seal: unlinked, written again, or sealed."""
        return (
            entry.holding is not holding
            or holding.writers > 0
            or entry.parent is None
            or entry.state != DRAFT
        )

    async def _attempt(self, entry: Entry, holding: Holding) -> bool:
        """One attempt; true when there is nothing more to do."""
        if self._is_over(entry, holding):
            return True
        if trio.current_time() < holding.retry_until:
            return False
        if not lease_is_free(holding.read_fd, fcntl.F_RDLCK):
            return False
        size = os.fstat(holding.read_fd).st_size
        if size == 0:
            return True  # empty files stay drafts
        failure = holding.failure
        sparse = not failure and has_holes(holding.read_fd, size)
        if sparse and not holding.sized:
            failure = "holes"
        if failure:
            self._drop(entry, failure)
            return True
        fd, epoch = os.dup(holding.read_fd), holding.epoch
        try:
            if size <= INLINE_DIGEST:
                digest, huge = digest_file(fd), True
            else:
                digest, huge = await trio.to_thread.run_sync(self._examine, fd, size, limiter=self._threads)
        except OSError as error:
            self._drop(entry, "io-error", f": {error.strerror}")
            return True
        finally:
            os.close(fd)
        if self._is_over(entry, holding):
            return True
        if holding.epoch != epoch:  # a writer has come and gone meanwhile
            return False
        self._store(entry, holding, digest, sparse)
        if not huge and size >= HUGEPAGE and self._pool.tier.hugepages_active:
            self._pool.counters.small_page_files += 1
        return True

    def _examine(self, fd: int, size: int) -> tuple[Digest, bool]:
        """In a thread: moves the file to hugepages, then computes its digest."""
        huge = self._pool.tier.collapse(fd, size)
        return digest_file(fd), huge

    def _store(self, entry: Entry, holding: Holding, digest: Digest, sparse: bool) -> None:
        tier = self._pool.tier
        tier.set_attribute(holding.read_fd, OWNER, entry.owner.format().encode())
        if sparse:
            tier.set_attribute(holding.read_fd, SPARSE, b"1")
        tier.set_attribute(holding.read_fd, DIGEST, digest.format().encode())
        entry.state = SEALED
        entry.size = self._pool.index.intern_size(digest.size)
        self._pool.counters.sealed += 1
        self._pool.counters.sealed_bytes += digest.size
        self._pool.sealed(entry)

    def _drop(self, entry: Entry, reason: str, detail: str = "") -> None:
        name = entry.path().decode(errors="backslashreplace")
        self._pool.counters.failures[reason] += 1
        self._log.warning(reason, f"{name} is dropped: {REASONS[reason]}{detail}")
        self._pool.remove_everywhere(entry)
