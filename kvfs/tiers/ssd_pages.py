"""Pages on the SSD tier: stored whole or not at all, opened when they are as they were stored, set aside
else."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvfs.counters import LimitedLog
from kvfs.errors import (
    AttributeMissing,
    DamagedPage,
    KvfsError,
    NoSuchPage,
    NotStorable,
    TierFull,
    means_in_the_way,
    means_no_room,
    means_too_large,
    means_unsupported,
)
from kvfs.interleaved import Work
from kvfs.page import Digest, shown
from kvfs.sizes import format_size
from kvfs.tiers import ssd_directory
from kvfs.tiers.directories import Directory
from kvfs.tiers.ssd_accounts import Reservation
from kvfs.tiers.ssd_attributes import RecordAttributes
from kvfs.tiers.ssd_base import AttributeTexts, Step, occupied
from kvfs.tiers.ssd_directory import ALIGNMENT, MARK, is_ours
from kvfs.tiers.ssd_label import label
from kvfs.tiers.ssd_names import QUARANTINE, TEMPORARY, is_reserved
from kvfs.tiers.ssd_quarantine import REASONS, Quarantine, damage
from kvfs.tiers.ssd_record import Record
from kvfs.tiers.ssd_tree import SsdTree
from kvfs.tiers.ssd_uses import Use

log = logging.getLogger("kvfs.tiers.ssd")

Write = Callable[[int, int, int], Work[Digest]]
"""``write(source_fd, target_fd, size)`` copies so many bytes into a new file, from offset 0, and returns the
digest of what it read. Where the target has O_DIRECT it pads to ``ssd_directory.ALIGNMENT``."""

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class NewPage:
    """What is to be stored. ``attributes`` are in the text forms of ``kvfs.page``, without the digest; times
    in nanoseconds since 1970."""

    digest: Digest
    attributes: AttributeTexts
    atime_ns: int
    mtime_ns: int


@dataclass(slots=True)
class WrittenPage:
    """A page whose bytes are on the SSD, in a temporary, and which has no name yet: to be published or
    abandoned. It keeps the room that it takes reserved until then."""

    page: NewPage
    fd: int
    temporary: bytes
    reservation: Reservation
    is_named: bool = False


Name = tuple[bytes, Sequence[AttributeTexts]]
"""A path that a page is to have, and the attributes of the directories on the way to it, from the top, for
those that are missing."""


@dataclass(frozen=True, slots=True)
class OpenedPage:
    """A page that is as it was stored, as far as one can tell without reading it. The caller closes ``fd``.
    ``attributes`` are those that are not in the record."""

    fd: int
    digest: Digest
    record: Record
    attributes: dict[str, bytes]
    status: os.stat_result


class SsdPages(SsdTree):
    """``direct``, ``direct_reason``: whether pages bypass the page cache, found by trying, and why not.
    ``filesystem`` is its type, "ext4" say. ``damaged`` counts pages that were quarantined, by reason.
    ``temporaries`` are the names of those that are being written: what else lies among them is left over."""

    def __init__(
        self,
        directory: Path,
        root_fd: int,
        capacity_bytes: int,
        records: RecordAttributes,
        quarantine_bytes: int,
        step: Step,
    ) -> None:
        super().__init__(root_fd, capacity_bytes, records, step)
        self.directory = directory
        self.direct = False
        self.direct_reason = "not tried yet"
        self.damaged: Counter[str] = Counter()
        self.temporaries: set[bytes] = set()
        self.quarantine = Quarantine(records, quarantine_bytes, self.unlink)
        self.filesystem = ssd_directory.filesystem_of(root_fd)
        self._is_ordered = ssd_directory.is_ordered(self.filesystem)
        self._limited = LimitedLog(log)
        self._stored = 0
        self._stored_bytes = 0

    # Storing

    def reserve(self, size: int) -> Reservation:
        """Claims room for a page of ``size`` bytes; asks nothing of the disk.

        Raises TierFull (evict so much, then try once more), TierUncounted (wait), and NotStorable where the
        whole tier is too small.
        """
        block = self.accounts.filesystem.block_size
        wanted = -(-size // block) * block + block  # one more for attributes, or for a list of extents
        if wanted > self.accounts.capacity_bytes:
            raise NotStorable(f"a page of {format_size(size)} is larger than the SSD tier")
        return self.accounts.reserve(wanted)

    def write_page(
        self, page: NewPage, source_fd: int, write: Write, reservation: Reservation | None = None
    ) -> Work[WrittenPage]:
        """Writes a page to a temporary, and yields when ``write`` does. Whatever it raises, nothing is left,
        and the reservation has ended.

        Raises TierFull, TierUncounted and NotStorable, DamagedPage where the bytes are not those of the
        digest, and OSError where the disk fails.

        There is no fsync for each page: it would halve the speed. Past the cache, on ext4 and XFS, a name
        implies its bytes after a loss of power all the same (``ssd_directory.is_ordered``); elsewhere the
        bytes are synced here, before there is a name.
        """
        if reservation is None:
            reservation = self.reserve(page.digest.size)
        temporary = b"%d" % next(self._serial)
        self.temporaries.add(temporary)
        try:
            with self._typed_errors(page.digest.size):
                fd = yield from self._write_temporary(temporary, page, source_fd, write)
        except BaseException:
            self.temporaries.discard(temporary)
            reservation.release()
            raise
        return WrittenPage(page, fd, temporary, reservation)

    def publish_page(self, written: WrittenPage, names: Sequence[Name]) -> int:
        """Gives a written page its names, over what has them, and returns the bytes that it occupies.

        Raises TierFull, NotStorable (a name or the attributes cannot be on the SSD), and NoSuchPage where it
        was abandoned or deleted by hand: it is abandoned then, but for names that it has already. After an
        OSError the disk failed, and it can be tried again.
        """
        if written.fd < 0:
            raise NoSuchPage("the page was abandoned")
        try:
            with self._typed_errors(written.page.digest.size):
                size = self._publish(written, names)
        except KvfsError:
            self.abandon_page(written)
            raise
        self._let_go(written)
        return size

    def abandon_page(self, written: WrittenPage) -> None:
        """Deletes a written page that got no name, and lets go of it; nothing happens the second time."""
        if written.fd < 0:
            return
        if not written.is_named:
            self._unlink_temporary(written.temporary)
        self._let_go(written)
        written.reservation.release()

    def _let_go(self, written: WrittenPage) -> None:
        os.close(written.fd)
        written.fd = -1
        self.temporaries.discard(written.temporary)

    @contextlib.contextmanager
    def _typed_errors(self, size: int) -> Iterator[None]:
        """Tells what only this page has trouble with from a disk that fails."""
        try:
            yield
        except FileNotFoundError as error:
            raise NoSuchPage("somebody removed a page from the SSD while it was stored") from error
        except OSError as error:
            if means_no_room(error):
                raise self._full(size) from error
            if means_in_the_way(error) or means_too_large(error):
                raise NotStorable(f"a page cannot be stored on the SSD: {error.strerror}") from error
            raise

    def _full(self, size: int) -> TierFull:
        room = self.refresh_room()
        if room.total_inodes and not room.free_inodes:
            return TierFull("the filesystem of the SSD tier has no inodes left", missing_inodes=1)
        return TierFull(
            f"the filesystem of the SSD tier is full: {format_size(size)} wanted",
            missing_bytes=max(size - room.free_bytes, room.block_size),
        )

    def _write_temporary(self, temporary: bytes, page: NewPage, source_fd: int, write: Write) -> Work[int]:
        try:
            return (yield from self._fill(temporary, page, source_fd, write, self.direct))
        except OSError as error:
            if not (self.direct and means_unsupported(error)):
                raise
            self.lose_direct(f"it was refused: {error.strerror}")
        return (yield from self._fill(temporary, page, source_fd, write, False))

    def lose_direct(self, reason: str) -> None:
        """From now on pages go through the page cache."""
        self.direct, self.direct_reason = False, reason
        log.warning("%s: pages go through the page cache: %s", self.directory, reason)

    def _fill(self, temporary: bytes, page: NewPage, source_fd: int, write: Write, direct: bool) -> Work[int]:
        """A descriptor of a new temporary with the page's bytes, length and times."""
        size = page.digest.size
        directory = self.beside(TEMPORARY)
        fd = os.open(temporary, _NEW | (os.O_DIRECT if direct else 0), 0o600 | MARK, dir_fd=directory.fd)
        try:
            self._step("created")
            if self.has_labels:
                label(fd)
            if size:
                ssd_directory.allocate(fd, -(-size // ALIGNMENT) * ALIGNMENT)
            self._step("allocated")
            digest = yield from write(source_fd, fd, size)
            self._step("written")
            if digest != page.digest:
                raise DamagedPage(f"a page to be stored is {digest}, not {page.digest}", "bytes")
            os.ftruncate(fd, size)
            if not (direct and self._is_ordered):
                os.fdatasync(fd)
            self._step("synced")
            os.utime(fd, ns=(page.atime_ns, page.mtime_ns))
        except BaseException:
            os.close(fd)
            self._unlink_temporary(temporary)
            raise
        return fd

    def _unlink_temporary(self, temporary: bytes) -> None:
        """What a failing disk does not let us delete now is deleted at the next start."""
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=self.beside(TEMPORARY).fd)

    def _publish(self, written: WrittenPage, names: Sequence[Name]) -> int:
        page, fd = written.page, written.fd
        with self.lock:
            targets = [self._prepare_target(path, parents) for path, parents in names]
            if not written.is_named:
                bindings = tuple(self._binding(directory.fd, name) for directory, name in targets)
                self.describe(fd, Record(digest=page.digest, names=bindings), page.attributes)
                self._step("described")
                self.accounts.enlarge(written.reservation, occupied(os.fstat(fd)))
                self._take_place(written.temporary, *targets[0])
                written.is_named = True
                written.reservation.release()
                status = os.fstat(fd)
                self.accounts.changed(status.st_ino, 0, occupied(status))
                self._stored += 1
                self._stored_bytes += page.digest.size
                self._step("renamed")
            for target in targets[1:]:
                self._link_over(fd, *targets[0], *target)
        return occupied(os.fstat(fd))

    def _link_over(
        self, fd: int, old_directory: Directory, old_name: bytes, directory: Directory, name: bytes
    ) -> None:
        """Gives an open file another name, in one step even where another file has it."""
        if self._is_same_file(os.fstat(fd), directory, name):
            return
        temporary = b"%d" % next(self._serial)
        place = self.beside(TEMPORARY)
        os.link(old_name, temporary, src_dir_fd=old_directory.fd, dst_dir_fd=place.fd, follow_symlinks=False)
        try:
            self._take_place(temporary, directory, name)
        except BaseException:
            self._unlink_temporary(temporary)
            raise

    def _prepare_target(self, path: bytes, parents: Sequence[AttributeTexts]) -> tuple[Directory, bytes]:
        """Where a page is to lie; an empty directory there gives way."""
        if is_reserved(path):
            raise NotStorable(f"{path!r} is a name of the SSD tier's own")
        parent, _, name = path.rpartition(b"/")
        directory = self.enter(parent, parents)
        if self._stands_in_place(directory, name) and stat.S_ISDIR(
            os.stat(name, dir_fd=directory.fd, follow_symlinks=False).st_mode
        ):
            self.rmdir(path)
        return directory, name

    def _take_place(self, temporary: bytes, directory: Directory, name: bytes) -> None:
        """The moment at which a page appears."""
        source = self.beside(TEMPORARY)
        with self._growth(directory), contextlib.ExitStack() as ends:
            if self._stands_in_place(directory, name):
                ends.enter_context(self._losing(directory, name))
            os.rename(temporary, name, src_dir_fd=source.fd, dst_dir_fd=directory.fd)

    # Reading

    def open_page(self, path: bytes, flags: int = os.O_RDONLY) -> OpenedPage:
        """Opens a page for reading, without setting its time of access; past the cache with O_DIRECT in
        ``flags``.

        Raises NoSuchPage, and DamagedPage where its length, name or attributes are not as they were stored:
        quarantine it then. Whether its bytes are can only be told by reading them.
        """
        if is_reserved(path):
            raise NoSuchPage(f"{path!r} is a name of the SSD tier's own")
        try:
            return self._open_page(path, flags)
        except DamagedPage:
            with self.lock:  # names may have moved while they were compared: now they do not
                return self._open_page(path, flags)

    def _open_page(self, path: bytes, flags: int) -> OpenedPage:
        try:
            fd = self.open(path, flags | os.O_NONBLOCK | self.noatime)
        except OSError as error:
            if isinstance(error, FileNotFoundError) or means_in_the_way(error):
                raise NoSuchPage(f"{path!r} is not on the SSD") from None
            raise
        try:
            status = os.fstat(fd)
            if not is_ours(status) or not stat.S_ISREG(status.st_mode):
                raise NoSuchPage(f"{path!r} on the SSD is not a page")
            record, attributes = self.records.examine(fd)
            is_bound = record is not None and self.is_bound(path, record)
            reason = damage(record, attributes, status.st_size) or ("" if is_bound else "name")
            if reason and not is_bound and self.is_copy(fd):
                raise NoSuchPage(f"{path!r} on the SSD is a copy that somebody made")
            if record is None or record.digest is None or reason:
                raise DamagedPage(f"{path!r}: {REASONS[reason]}", reason, status.st_ino)
            return OpenedPage(fd, record.digest, record, attributes, status)
        except BaseException:
            os.close(fd)
            raise

    def record_uses(self, uses: Iterable[Use]) -> None:
        """Notes hits and times of use with the pages, so that the next process knows them; see ``ssd_uses``.
        A page that is gone or damaged, or that a full disk has no room to note it with, is passed over."""
        for use in uses:
            try:
                fd = self.open(use.path, os.O_RDONLY | os.O_NONBLOCK | self.noatime)
            except OSError as error:
                if isinstance(error, FileNotFoundError) or means_in_the_way(error):
                    continue
                raise
            try:
                self.records.update_hits(fd, use.hits)
                os.utime(fd, ns=(use.used_ns, os.fstat(fd).st_mtime_ns))
            except (AttributeMissing, DamagedPage):
                continue
            except OSError as error:
                if not means_no_room(error):  # nothing is evicted for a note
                    raise
            finally:
                os.close(fd)

    # Damage

    def set_aside(self, path: bytes, reason: str, inode: int | None = None) -> bool:
        """Moves a damaged page to quarantine; ``reason`` is one of ``ssd_quarantine.REASONS``. Its name is
        free from then on. Says whether there was one. With ``inode``, that of the file that was found
        damaged, what has taken the name meanwhile is left alone."""
        with self.lock:
            try:
                directory, name = self._locate(path)
                status = self._status(directory, name)
            except (FileNotFoundError, NotADirectoryError):
                return False
            if not stat.S_ISREG(status.st_mode) or inode not in (None, status.st_ino):
                return False
            place = self.beside(QUARANTINE)
            fd = self._open_any(directory, name)
            try:
                self.quarantine.label(fd, path, reason)
                self._account(status, os.fstat(fd))
                new_name = self.quarantine.new_name(time.time_ns())
                with self._growth(directory, place):
                    os.rename(name, new_name, src_dir_fd=directory.fd, dst_dir_fd=place.fd)
                self.damaged[reason] += 1
                self.quarantine.came(new_name, occupied(os.fstat(fd)))
            finally:
                os.close(fd)
        self._limited.warning(reason, f"{shown(path)} is quarantined: {REASONS[reason]}")
        return True
