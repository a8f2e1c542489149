"""Comparing pages with their digests, in DRAM and on the SSD, and taking away what is damaged.

Looking is no use of a page: it changes no order, no count and no time, and brings nothing into DRAM.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from kvfs.counters import LimitedLog
from kvfs.errors import AttributeMissing, DamagedPage, NoSuchPage
from kvfs.index import SEALED, STORED, UNCHECKED, Entry
from kvfs.page import DIGEST, Digest, shown
from kvfs.sealing import INLINE_BYTES, digest_file
from kvfs.storage import described
from kvfs.storage.described import RESIDENT
from kvfs.tiers import ssd_quarantine

if TYPE_CHECKING:
    from kvfs.pool import Pool
    from kvfs.storage.storage import Storage

log = logging.getLogger("kvfs.verification")

OK: Final = "ok"
GONE: Final = "gone"
UNREADABLE: Final = "unreadable"
REASONS: Final = {
    **ssd_quarantine.REASONS,
    GONE: "its file is gone",
    UNREADABLE: "it cannot be read",
}
"""What may be wrong with a copy of a page."""

THREADS = 2
"""Pages that are looked at in one tier at once: enough to keep a disk busy, and few enough for others."""


class Look(NamedTuple):
    """What was seen of one copy of a page: ``reason`` is OK or one of REASONS. ``status`` of the file on the
    SSD, where that is whole."""

    reason: str
    status: os.stat_result | None = None

    @property
    def is_damaged(self) -> bool:
        return self.reason != OK


@dataclass(frozen=True, slots=True)
class _File:
    """The file of a page in DRAM. While ``fd`` is open nobody changes the page in place. -1 where the file is
    gone; ``expected`` is None where the digest cannot be read."""

    fd: int
    inode: int
    expected: Digest | None


def _is_in_dram(entry: Entry) -> bool:
    return entry.state in (SEALED, UNCHECKED) and entry.parent is not None


def _is_on_ssd(entry: Entry) -> bool:
    return entry.parent is not None and (entry.state == STORED or entry.stored == RESIDENT)


def _paths(entry: Entry) -> list[bytes]:
    return [parent.child_path(name) for parent, name in entry.names()]


class Verifier:
    """Belongs to the event loop; the bytes are read in threads."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._dram_threads = trio.CapacityLimiter(THREADS)
        self._ssd_threads = trio.CapacityLimiter(THREADS)
        self._log = LimitedLog(log)

    async def verify(self, entry: Entry) -> dict[str, str]:
        """OK or a reason for each tier that has the page, by its name; nothing for a draft.

        Raises OSError where the disk fails, TimedOut where it hangs, and TierFailed where it did before.
        """
        await self._walked()
        with self._dram_file(entry) as file:
            dram = None if file is None else await self._look_in_dram(entry, file)
            ssd = await self._look_on_ssd(entry, _expected(file, dram), repair=False)
        return {tier: look.reason for tier, look in (("dram", dram), ("ssd", ssd)) if look is not None}

    async def repair(self, entry: Entry) -> None:
        """Verifies a page, and takes away each copy that is damaged.

        A copy that is whole takes the place of one that is not: the one on the SSD is served from then on, or
        the one in DRAM is copied again. Where none is, the names go. Raises as ``verify``.
        """
        await self._walked()
        with self._dram_file(entry) as file:
            dram = None if file is None else await self._look_in_dram(entry, file)
            ssd: Look | None = None
            try:
                ssd = await self._look_on_ssd(entry, _expected(file, dram), repair=True)
            finally:
                if file is not None and dram is not None and dram.is_damaged and self._is_still(entry, file):
                    self._leave_dram(entry, dram.reason, ssd)
        storage = self._pool.storage
        if storage is not None and _is_in_dram(entry) and entry.stored is None:
            storage.demotions.lacks_copy(entry)

    async def _walked(self) -> None:
        """Until the SSD has been walked, nobody knows which pages have a copy there."""
        if self._pool.storage is not None:
            await self._pool.storage.walked.wait()

    # DRAM

    @contextmanager
    def _dram_file(self, entry: Entry) -> Iterator[_File | None]:
        """The file of a page in DRAM; None where it has none there."""
        if not _is_in_dram(entry):
            yield None
            return
        tier, path = self._pool.tier, entry.path()
        try:
            fd = self._pool.idle.open(lambda: tier.open(path, os.O_RDONLY | os.O_NOATIME))
        except FileNotFoundError:
            yield _File(-1, 0, None)
            return
        try:
            try:
                expected = Digest.parse(tier.get_attribute(fd, DIGEST))
            except (AttributeMissing, ValueError):
                expected = None
            yield _File(fd, os.fstat(fd).st_ino, expected)
        finally:
            os.close(fd)

    async def _look_in_dram(self, entry: Entry, file: _File) -> Look | None:
        """None where the page has changed meanwhile."""
        look = await self._examine_dram(file)
        return look if not look.is_damaged or self._is_still(entry, file) else None

    async def _examine_dram(self, file: _File) -> Look:
        if file.fd < 0:
            return Look(GONE)
        if file.expected is None:
            return Look("attributes")
        try:
            if os.fstat(file.fd).st_size <= INLINE_BYTES:
                found = digest_file(file.fd)
            else:
                found = await trio.to_thread.run_sync(digest_file, file.fd, limiter=self._dram_threads)
        except OSError:  # memory that is broken
            return Look(UNREADABLE)
        if found.size != file.expected.size:
            return Look("size")
        return Look(OK if found == file.expected else "bytes")

    def _is_still(self, entry: Entry, file: _File) -> bool:
        """Whether the names of a page still mean this file."""
        if not _is_in_dram(entry):
            return False
        try:
            return self._pool.tier.stat(entry.path()).st_ino == file.inode
        except FileNotFoundError:
            return file.fd < 0

    def _leave_dram(self, entry: Entry, reason: str, ssd: Look | None) -> None:
        """A page that is damaged in DRAM: its names mean what the SSD has from now on, or go."""
        name = shown(entry.path())
        status = None if ssd is None else ssd.status
        if status is not None and _is_on_ssd(entry):
            self._log.warning("fallen-back", f"{name} leaves DRAM, the SSD has it whole: {REASONS[reason]}")
            self._fall_back(entry, status)
        else:
            self._log.warning("dropped", f"{name} is damaged and dropped: {REASONS[reason]}")
            self._drop(entry)

    def _fall_back(self, entry: Entry, status: os.stat_result) -> None:
        """Another entry takes the names, because who has the page open keeps what they opened."""
        pool = self._pool
        assert pool.storage is not None
        names, said = entry.names(), pool.lifetimes.said_of(entry)
        pool.idle.secure(entry)
        for parent, name in names:
            with suppress(FileNotFoundError), pool.directories.unseen(parent):
                pool.tier.unlink(parent.child_path(name))
        entry.stored = None  # the copy on the SSD is the other entry's
        pool.abandon(entry, names)
        (parent, name), *links = names
        page = pool.index.add(parent, name, entry.owner, STORED)
        for further_parent, further_name in links:
            pool.index.add_link(page, further_parent, further_name)
        page.size = pool.index.intern_size(status.st_size)
        page.hits = entry.hits
        page.stored = described.pack_status(status)
        pool.storage.order.add(page)
        pool.lifetimes.say(page, said)
        for any_parent, any_name in names:
            pool.face.invalidate(any_parent.number, any_name)

    def _drop(self, entry: Entry) -> None:
        self._pool.uses.count_miss(entry, "corrupt")
        self._pool.remove_everywhere(entry)

    # The SSD

    async def _look_on_ssd(self, entry: Entry, expected: Digest | None, *, repair: bool) -> Look | None:
        """None where there is no copy. What looks damaged is looked at again."""
        storage = self._pool.storage
        if storage is None or not _is_on_ssd(entry):
            return None
        storage.health.require(trio.current_time())
        examine = partial(_examine_ssd, storage, _paths(entry), expected)
        with trio.move_on_after(storage.io_timeout):
            look = await trio.to_thread.run_sync(examine, limiter=self._ssd_threads, abandon_on_cancel=True)
            if look.is_damaged:
                return await self._look_again(entry, expected, repair=repair)
            storage.succeeded()
            return look
        raise storage.failed(f"a page was not verified within {storage.io_timeout:g} s")

    async def _look_again(self, entry: Entry, expected: Digest | None, *, repair: bool) -> Look | None:
        """Looks at a copy in between two changes of the history, when it lies where the mount has it; takes
        it away there, if that is wanted, before anything else happens to it."""
        storage = self._pool.storage
        if storage is None or not _is_on_ssd(entry):
            return None
        paths = _paths(entry)
        looks: list[Look] = []
        errors: list[Exception] = []
        finished = trio.Event()

        def look() -> None:
            try:
                looks.append(_examine_ssd(storage, paths, expected))
            except Exception as error:  # the history would try again for as long as the disk fails
                errors.append(error)
                return
            if repair and looks[-1].is_damaged:
                storage.tier.set_aside(paths[0], looks[-1].reason)

        def done(error: Exception | None) -> None:
            try:
                if error is not None:
                    raise error
                if repair and looks and looks[-1].is_damaged:
                    self._without_copy(storage, entry, looks[-1].reason)
            except Exception as failure:  # it is for who waits, and must not end the history
                errors.append(failure)
            finished.set()

        storage.history.append(look, done)
        await storage.history.wait_for(finished.is_set)
        if errors:
            raise errors[0]
        return looks[-1]

    def _without_copy(self, storage: Storage, entry: Entry, reason: str) -> None:
        """The copy of a page was set aside. What was written again or removed meanwhile has none any more."""
        if not _is_on_ssd(entry):
            return
        if reason == GONE:
            name = shown(entry.path())
            self._log.warning("gone", f"{name} is gone from the SSD behind our back")
        if entry.state == STORED:
            self._drop(entry)
        else:
            storage.forget_copy(entry)


def _expected(file: _File | None, dram: Look | None) -> Digest | None:
    """What the copy on the SSD must be, where DRAM has the page whole."""
    return file.expected if file is not None and dram is not None and not dram.is_damaged else None


def _examine_ssd(storage: Storage, paths: Sequence[bytes], expected: Digest | None) -> Look:
    """In a thread: looks at a copy under all its names, and reads it in the way in which pages come up, into
    nothing. Raises OSError and TierFailed where the disk fails."""
    tier = storage.tier
    try:
        opened = tier.open_page(paths[0], storage.open_flags)
    except NoSuchPage:
        return Look(GONE)
    except DamagedPage as error:
        return Look(error.reason)
    try:
        with open(os.devnull, "wb") as nothing:
            found = storage.read(opened.fd, nothing.fileno(), opened.status.st_size)
    finally:
        os.close(opened.fd)
    if found != opened.digest or expected not in (None, found):
        return Look("bytes")
    for path in paths[1:]:
        try:
            is_same = os.path.samestat(tier.stat(path), opened.status)
        except (FileNotFoundError, NotADirectoryError):
            return Look(GONE)
        if not is_same or not tier.is_bound(path, opened.record):
            return Look("name")
    return Look(OK, opened.status)
