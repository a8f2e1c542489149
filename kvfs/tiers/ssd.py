"""The SSD tier: a directory on ext4, XFS or any other filesystem with extended attributes.

It mirrors the mount's tree: a page is a file of raw bytes under its path, there whole or not at all. Beside
the tree lie ``.kvfs-owner`` (who has the directory), ``.kvfs-temporary`` (what is being written) and
``.kvfs-quarantine`` (damaged pages). Every method but ``room``, ``reserve`` and ``statistics`` may wait for
the disk, and so belongs into a thread; all may be called from several threads.

    tier = SsdTier.attach(place)                     # one owner, or an error that changes nothing
    findings = await scan_in_background(tier, …)     # ssd_scan: pages to adopt, accounts, damage
    reservation = tier.reserve(size)                 # TierFull says how much to evict
    written = finish(tier.write_page(page, source_fd, write, reservation))
    tier.publish_page(written, names)
    opened = tier.open_page(path)                    # checks all but the bytes; set_aside when those differ
    ssd_following.rename(tier, old, new)             # names follow those of the mount
    tier.close_cleanly()
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import stat
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from kvfs import syscalls
from kvfs.errors import TierUnusable, means_in_the_way
from kvfs.tiers import ssd_directory
from kvfs.tiers.ssd_attributes import RecordAttributes
from kvfs.tiers.ssd_base import Step
from kvfs.tiers.ssd_label import can_label
from kvfs.tiers.ssd_names import OWNER_FILE, QUARANTINE, TEMPORARY, is_reserved
from kvfs.tiers.ssd_owner import LAYOUT, OwnerRecord, Ownership, describe_owner
from kvfs.tiers.ssd_pages import SsdPages
from kvfs.tiers.ssd_quarantine import Quarantined
from kvfs.tiers.ssd_scan import Scan

log = logging.getLogger("kvfs.tiers.ssd")

LARGEST_QUARANTINE: Final = 1 << 30
QUARANTINE_PART: Final = 20
"""Quarantine takes at most this part of the capacity."""


@dataclass(frozen=True, slots=True)
class SsdPlace:
    """Where a tier is to be, and where it must not be: ``states`` holds what all mounts of the caller keep.
    Paths are absolute; sizes in bytes; ``quarantine_bytes`` None for the default.
    ``step`` hears of each of ``ssd_base.STEPS`` and ``MOVING_STEPS``."""

    directory: Path
    capacity_bytes: int
    mountpoint: Path
    dram: Path
    states: Path
    discard_incompatible: bool = False
    quarantine_bytes: int | None = None
    step: Step = lambda _: None

    @property
    def quarantine_limit(self) -> int:
        if self.quarantine_bytes is not None:
            return self.quarantine_bytes
        return min(LARGEST_QUARANTINE, self.capacity_bytes // QUARANTINE_PART)


@dataclass(frozen=True, slots=True)
class SsdStatistics:
    """The tier at one moment; sizes in bytes."""

    capacity_bytes: int
    used_bytes: int
    reserved_bytes: int
    is_counted: bool
    suspect: bool
    direct: bool
    direct_reason: str
    stored: int
    stored_bytes: int
    leftovers: int
    damaged: dict[str, int]
    quarantined: int
    quarantine_bytes: int


class SsdTier(SsdPages):
    """Pages on a disk. Made by ``attach``.

    ``identity`` tells the directory from all others, wherever it is mounted.
    ``suspect``: whether a page must be checked before its first use, because the last stop was not clean. Who
    has checked all of them sets it to False; until then no stop counts as clean.
    ``leftovers``: how many temporaries of an earlier process were deleted at the start.
    ``last_turn``, ``last_mount``: the ``turn`` of whoever had the directory before, and their mount; "" where
    nobody had.
    """

    def __init__(
        self, place: SsdPlace, root_fd: int, records: RecordAttributes, ownership: Ownership
    ) -> None:
        super().__init__(
            place.directory, root_fd, place.capacity_bytes, records, place.quarantine_limit, place.step
        )
        self.suspect = True
        self.leftovers = 0
        self.last_turn = ""
        self.last_mount = ""
        self._ownership = ownership

    # Taking the directory, and letting it go

    @classmethod
    def attach(cls, place: SsdPlace) -> SsdTier:
        """Takes a directory, made where it is missing.

        Raises UsageError (the path or the capacity is wrong), TierInUse, TierUnusable (files of others,
        another layout, a filesystem that cannot), NotPermitted; nothing was changed then.
        """
        directory = Path(os.path.realpath(place.directory))
        dram, states = Path(os.path.realpath(place.dram)), Path(os.path.realpath(place.states))
        ssd_directory.refuse_overlap(directory, place.mountpoint, dram, states)
        ssd_directory.refuse_filesystem(directory, place.capacity_bytes)
        root_fd, made = ssd_directory.open_directory(directory)
        try:
            return cls._take(dataclasses.replace(place, directory=directory), root_fd)
        except BaseException as error:
            if made:
                directory.rmdir()
            if isinstance(error, OSError):
                raise TierUnusable(f"{directory} cannot be an SSD tier: {error.strerror}") from error
            raise
        finally:
            os.close(root_fd)

    @classmethod
    def _take(cls, place: SsdPlace, root_fd: int) -> SsdTier:
        directory = place.directory
        with contextlib.ExitStack() as undo:
            ownership = Ownership.find(directory, root_fd)
            if ownership is not None:
                undo.callback(ownership.release)
            previous = None if ownership is None else ownership.record
            if ownership is None:
                ssd_directory.refuse_part(directory, root_fd)
                ssd_directory.refuse_foreign(directory, root_fd)
            elif previous is None and not place.discard_incompatible:
                raise TierUnusable(
                    f"{directory} has layout {ownership.layout}, this kvfs has {LAYOUT}: use the release "
                    "that filled it, or --discard-incompatible, which deletes its pages"
                )
            records = ssd_directory.attributes_with(
                directory, root_fd, "" if previous is None else previous.prefix
            )
            mount, host, process = describe_owner(place.mountpoint)
            record = OwnerRecord(
                layout=LAYOUT,
                tier=uuid.uuid4().hex if previous is None else previous.tier,
                prefix=records.prefix,
                mount=mount,
                host=host,
                process=process,
                turn=uuid.uuid4().hex,
            )
            incompatible = ownership is not None and previous is None
            if ownership is None:
                ownership = Ownership.create(directory, root_fd, record)
                undo.callback(ownership.release)
            else:
                ownership.write(record)
            tier = cls(place, os.dup(root_fd), records, ownership)
            undo.callback(tier.close)
            if incompatible:
                tier.empty()
            tier._settle(previous, is_empty=incompatible)
            undo.pop_all()
        return tier

    def _settle(self, previous: OwnerRecord | None, is_empty: bool) -> None:
        """Clears up after the owner before us, and finds out what the disk can."""
        os.fchmod(self.root_fd, 0o700)
        if previous is not None:
            self.last_turn, self.last_mount = previous.turn, previous.mount
        is_empty |= previous is None and all(map(is_reserved, self.list(b"")))
        for name in self.list(b""):
            if name.startswith(OWNER_FILE + b"."):  # of a process that was killed while it made the file
                os.unlink(name, dir_fd=self.root_fd)
        temporary = self.beside(TEMPORARY)
        for name in os.listdir(temporary.proc):
            is_directory = stat.S_ISDIR(os.stat(name, dir_fd=temporary.fd, follow_symlinks=False).st_mode)
            (os.rmdir if is_directory else os.unlink)(name, dir_fd=temporary.fd)
            self.leftovers += 1
        self.quarantine.load(self.beside(QUARANTINE).fd)
        self.has_labels = can_label(temporary.fd, b"label")
        reason = ssd_directory.probe_direct(temporary.fd, b"probe")
        if reason:
            self.lose_direct(reason)
        else:
            self.direct, self.direct_reason = True, ""
        self.suspect = not (is_empty or (previous is not None and previous.clean))
        if is_empty:
            Scan(self).run()
        elif previous is not None and previous.clean:
            self.accounts.trust(previous.used_bytes)

    @property
    def identity(self) -> str:
        return self._record.tier

    @property
    def turn(self) -> str:
        """Tells this taking of the directory from all others."""
        return self._record.turn

    @property
    def _record(self) -> OwnerRecord:
        assert self._ownership.record is not None
        return self._ownership.record

    def close(self, keep: bool = True) -> None:
        """Lets go of the directory as a crash would: the next owner checks every page before its first use.

        ``keep=False`` deletes first what is ours.
        """
        if self.root_fd < 0:
            return
        if not keep:
            self.empty()
        self._ownership.release()
        super().close()

    def close_cleanly(self) -> None:
        """Lets go of the directory; what was stored is on the disk when this returns. Nothing may be under
        way any more. Where the disk fails, the directory is let go as ``close`` does it."""
        try:
            self._leave_in_order()
        except OSError as error:
            log.warning("%s could not be left in order: %s", self.directory, error.strerror)
        self.close()

    def _leave_in_order(self) -> None:
        syscalls.syncfs(self.root_fd)
        self._ownership.write(
            msgspec.structs.replace(
                self._record,
                process=0,
                clean=self.accounts.is_counted and not self.suspect,
                used_bytes=self.accounts.used_bytes,
            )
        )

    def empty(self) -> None:
        """Deletes everything that is ours in the tree and in quarantine; what is not stays."""
        self.quarantine.shrink(0)
        for path, directories, files, dir_fd in os.fwalk(b".", topdown=False, dir_fd=self.root_fd):
            names: list[tuple[bytes, Callable[..., None]]] = [(name, os.unlink) for name in files]
            names += [(name, os.rmdir) for name in directories]
            for name, delete in names:
                if path == b"." and is_reserved(name):
                    continue
                if self.is_own(dir_fd, name, os.stat(name, dir_fd=dir_fd, follow_symlinks=False)):
                    _delete(name, dir_fd, delete)
        self._directories.clear()

    def is_in_place(self) -> bool | None:
        """Whether the directory is where it was; None where it was removed."""
        own = os.fstat(self.root_fd)
        if not own.st_nlink:
            return None
        try:
            return os.path.samestat(os.stat(self.directory), own)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # the disk fails, which is another matter
            return True

    def probe(self) -> None:
        """Writes a block and reads it again. Raises OSError where the disk does not work."""
        ssd_directory.probe_direct(self.beside(TEMPORARY).fd, b"probe.%d" % next(self._serial))

    # What is in quarantine, for who looks after the tier

    def list_quarantined(self) -> list[Quarantined]:
        """The oldest first."""
        with self.lock:
            return self.quarantine.list(self.beside(QUARANTINE).fd)

    def delete_quarantined(self, name: bytes) -> None:
        """Raises KeyError for a name that is not there."""
        with self.lock:
            self.quarantine.delete(name)

    def shrink_quarantine(self, limit_bytes: int) -> int:
        """Deletes the oldest until the others take so much at most; returns the bytes freed. Worth doing
        before pages are evicted."""
        with self.lock:
            return self.quarantine.shrink(limit_bytes)

    def statistics(self) -> SsdStatistics:
        return SsdStatistics(
            capacity_bytes=self.accounts.capacity_bytes,
            used_bytes=self.accounts.used_bytes,
            reserved_bytes=self.accounts.reserved_bytes,
            is_counted=self.accounts.is_counted,
            suspect=self.suspect,
            direct=self.direct,
            direct_reason=self.direct_reason,
            stored=self._stored,
            stored_bytes=self._stored_bytes,
            leftovers=self.leftovers,
            damaged=dict(self.damaged),
            quarantined=len(self.quarantine),
            quarantine_bytes=self.quarantine.used_bytes,
        )


def _delete(name: bytes, dir_fd: int, delete: Callable[..., None]) -> None:
    try:
        delete(name, dir_fd=dir_fd)
    except OSError as error:
        if not means_in_the_way(error):  # a directory with something in it that is not ours
            raise
