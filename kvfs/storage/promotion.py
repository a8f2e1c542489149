"""Pages come up: one that is only on the SSD is brought into DRAM, checked on the way, and then served there.

One fetch for a page, however many ask. Who asks may stop waiting; the fetch goes on for the others.
"""

from __future__ import annotations

import logging
import math
import os
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import trio

from kvfs.counters import LimitedLog
from kvfs.errors import DamagedPage, NoSuchPage, OutOfRoom, StalePage, TierFailed, means_no_room
from kvfs.index import SEALED, STORED, Entry
from kvfs.page import DIGEST, OWNER, SPARSE, Digest
from kvfs.sizes import format_size
from kvfs.steps import step
from kvfs.storage.described import RESIDENT
from kvfs.syscalls import fallocate
from kvfs.tiers.ssd_pages import OpenedPage

if TYPE_CHECKING:
    from kvfs.storage.storage import Copy, Storage

log = logging.getLogger("kvfs.storage.promotion")

READERS = 4
"""Pages that are read at once."""
ATTEMPTS = 8
"""How often room is made for a page that writers take before it is used."""


def _fill(read: Copy, source: int, target: int, size: int) -> Digest:
    """In a thread: the size first, so that the file gets hugepages."""
    try:
        os.ftruncate(target, size)
        fallocate(target, 0, 0, size)
    except OSError as error:
        if means_no_room(error):  # no fault of the disk: a writer was faster
            raise OutOfRoom(f"the pool has no room for a page of {format_size(size)}") from error
        raise
    step("promote.allocated")
    return read(source, target, size)


class _Fetch:
    """One page on its way; ``error`` is set before ``done`` where it failed."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.error: Exception | None = None


class Promotions:
    """Fetches under way. Belongs to the event loop."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._fetches: dict[Entry, _Fetch] = {}
        self._slots = trio.Semaphore(READERS)
        self._threads = trio.CapacityLimiter(math.inf)  # how many may be stuck is up to `Jobs`
        self._serial = 0
        self._log = LimitedLog(log)
        self.read = 0
        self.read_bytes = 0

    async def promote(self, entry: Entry) -> None:
        """Brings a page into DRAM. StalePage when it turns out not to be there, OutOfRoom, TimedOut."""
        while entry.state == STORED:
            if entry.parent is None:
                raise StalePage("the page was removed")
            fetch = self._fetches.get(entry)
            if fetch is None:
                fetch = self._fetches[entry] = _Fetch()
                self._storage.nursery.start_soon(self._run, entry, fetch)
            await fetch.done.wait()
            if fetch.error is not None:
                raise fetch.error

    async def _run(self, entry: Entry, fetch: _Fetch) -> None:
        try:
            await self._fetch(entry)
        except Exception as error:
            fetch.error = error
        finally:
            del self._fetches[entry]
            fetch.done.set()

    async def _fetch(self, entry: Entry) -> None:
        storage, pool = self._storage, self._storage.pool
        try:
            opened = await storage.ask(entry, lambda path: storage.tier.open_page(path, storage.open_flags))
        except NoSuchPage as error:
            pool.uses.count_miss(entry, "vanished")
            pool.remove_everywhere(entry)
            raise StalePage(str(error)) from None
        except DamagedPage as error:
            self._damaged(entry, error.reason, error.inode)
            raise StalePage(str(error)) from error
        try:
            step("promote.opened")
            await self._fill(entry, opened)
        finally:
            os.close(opened.fd)

    async def _fill(self, entry: Entry, opened: OpenedPage) -> None:
        pool = self._storage.pool
        size = opened.status.st_size
        temporary, target = self._create_temporary()
        try:
            digest = await self._copy_with_room(opened.fd, target, size)
            step("promote.copied")
            if entry.state != STORED or entry.parent is None:
                return
            if digest != opened.digest:
                self._damaged(entry, "bytes", opened.status.st_ino)
                raise StalePage("the page is damaged on the SSD")
            self._install(entry, opened, target, temporary)
        finally:
            os.close(target)
            with suppress(FileNotFoundError), pool.directories.unseen(pool.index.root):
                pool.tier.unlink(temporary)
        self.read += 1
        self.read_bytes += size

    def _create_temporary(self) -> tuple[bytes, int]:
        """A new file whose name no user has taken, and its descriptor."""
        pool = self._storage.pool
        while True:
            self._serial += 1
            temporary = b".kvfs-promotion-%d" % self._serial
            with suppress(FileExistsError), pool.directories.unseen(pool.index.root):
                return temporary, pool.tier.create(temporary)

    async def _copy_with_room(self, source: int, target: int, size: int) -> Digest:
        """Raises OutOfRoom where no room can be made, or writers take it again and again; else as `_copy`."""
        for _ in range(ATTEMPTS - 1):
            await self._storage.pool.evictor.require(size)
            with suppress(OutOfRoom):
                return await self._copy(source, target, size)
        await self._storage.pool.evictor.require(size)
        return await self._copy(source, target, size)

    async def _copy(self, source: int, target: int, size: int) -> Digest:
        """The bytes, and their digest. Raises OutOfRoom where DRAM is full, TimedOut, and OSError where the
        disk fails. The time counts from when the disk is asked; whoever waits for that hears at once that it
        has failed meanwhile."""
        health = self._storage.health
        failures = health.failures
        async with self._slots:
            if health.is_failed and health.failures != failures:
                raise TierFailed(f"the SSD tier: {health.statistics().reason}")
            return await self._copy_in_thread(source, target, size)

    async def _copy_in_thread(self, source: int, target: int, size: int) -> Digest:
        storage = self._storage
        job = storage.jobs.new(lambda one, other: _fill(storage.read, one, other, size), source, target)
        try:
            with trio.move_on_after(storage.io_timeout):
                digest = await trio.to_thread.run_sync(job.run, limiter=self._threads, abandon_on_cancel=True)
                storage.succeeded()
                return digest
        except OSError as error:
            storage.failed(error.strerror or str(error))
            raise
        finally:
            job.abandon()
        raise storage.failed(f"a page could not be read within {storage.io_timeout:g} s")

    def _install(self, entry: Entry, opened: OpenedPage, target: int, temporary: bytes) -> None:
        """The file in DRAM becomes the page: attributes, then its names, and the digest last. Without one,
        whatever it is called, it is nothing that the next daemon would serve."""
        pool = self._storage.pool
        tier = pool.tier
        for attribute, value in opened.attributes.items():
            tier.set_attribute(target, attribute, value)
        if opened.record.sparse:
            tier.set_attribute(target, SPARSE, b"1")
        tier.set_attribute(target, OWNER, entry.owner.format().encode())
        status = pool.status(entry)
        os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
        step("promote.described")
        paths = [parent.child_path(name) for parent, name in entry.names()]
        parents = (parent for parent, _ in entry.names())
        with pool.directories.unseen(pool.index.root, *parents), ExitStack() as undo:
            tier.rename(temporary, paths[0])
            undo.callback(tier.unlink, paths[0])
            step("promote.renamed")
            for path in paths[1:]:
                tier.link(paths[0], path)
                undo.callback(tier.unlink, path)
            tier.set_attribute(target, DIGEST, opened.digest.format().encode())
            undo.pop_all()
        pool.leave_order(entry)
        step("promote.installed")
        entry.state, entry.stored = SEALED, RESIDENT
        pool.policy.add(entry)
        pool.lifetimes.arrived(entry)
        pool.evictor.note_size(entry.size)

    def _damaged(self, entry: Entry, reason: str, inode: int | None) -> None:
        """A miss, and the file in quarantine, unless another one has its name by then."""
        pool, path = self._storage.pool, entry.path()
        pool.uses.count_miss(entry, "corrupt")
        self._storage.history.append(lambda: self._storage.tier.set_aside(path, reason, inode), moves=(path,))
        pool.remove_everywhere(entry)
