"""The walk over an SSD tier: what can be served again, what is damaged, what is not ours, and the accounts.

Everything may change meanwhile: each piece is looked at under the tier's lock, and the tier tells of what
moves. 100,000 pages take about 2 s of one processor. Decisions: a file with our mark but without a readable
record, of another length than its digest says, or under another's name is a damaged page and goes to
quarantine; it was stored with all of that, so it is no leftover. A file without our mark is somebody else's:
it is reported and left alone; so is a copy that somebody made of one of ours (``ssd_label``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from kvfs import syscalls
from kvfs.page import RESERVED, shown
from kvfs.tiers._looking import look_at
from kvfs.tiers.ssd_attributes import RECORD
from kvfs.tiers.ssd_base import Move, occupied
from kvfs.tiers.ssd_directory import MARK, is_ours
from kvfs.tiers.ssd_names import OWNER_FILE, QUARANTINE, ROOT_IDENTITY, TEMPORARY, binding, is_reserved
from kvfs.tiers.ssd_pages import SsdPages
from kvfs.tiers.ssd_quarantine import damage
from kvfs.tiers.ssd_record import Record

if TYPE_CHECKING:
    from kvfs.tiers._looking import Look

log = logging.getLogger("kvfs.tiers.ssd")

BATCH: Final = 512
"""Files between two turns of the event loop."""
PAUSE: Final = 0.001
"""Seconds between batches in which others have the interpreter."""
_CHUNK = 64
"""Files that are looked at under the lock at once."""
_MOST_NAMED = 20


class Stored(NamedTuple):
    """A directory or page that the walk met, parents before their children. ``blocks`` of 512 bytes, times in
    nanoseconds since 1970, ``attributes`` those that are not in the record. Names of one page have the same
    ``inode``."""

    path: bytes
    is_directory: bool
    record: Record
    attributes: dict[str, bytes]
    size: int
    blocks: int
    links: int
    inode: int
    mtime_ns: int
    atime_ns: int


@dataclass(slots=True)
class Findings:
    """What a walk found so far; ``foreign_names`` are the first few. ``drift_bytes``, at the end: by how much
    the accounts were above the truth."""

    pages: int = 0
    directories: int = 0
    damaged: Counter[str] = field(default_factory=Counter)
    foreign: int = 0
    foreign_names: list[bytes] = field(default_factory=list)
    drift_bytes: int = 0
    is_complete: bool = False


class _Here:
    """The directory that is being read. ``identity`` is 0 where it lies under another's name or lost its own:
    what is in it is then misplaced too."""

    def __init__(self, path: bytes, identity: int, fd: int) -> None:
        self.path = path
        self.identity = identity
        self.fd = fd
        self.entries = os.scandir(b"/proc/self/fd/%d" % fd)

    def close(self) -> None:
        self.entries.close()
        os.close(self.fd)


class Scan:
    """One walk. Call ``next_batch`` in a thread, one call at a time, until it gives nothing; then
    ``close``."""

    def __init__(self, tier: SsdPages) -> None:
        if tier.walker is not None:
            raise RuntimeError("the SSD tier is being walked already")
        self.findings = Findings()
        self._tier = tier
        self._here: _Here | None = None
        self._pending: list[tuple[bytes, int]] = [(b"", ROOT_IDENTITY)]
        self._met: set[int] = set()
        """The inodes of directories that are pending or done."""
        self._set_aside: list[bytes] = []
        self._attribute = tier.records.prefix + RECORD
        self._flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW | tier.noatime
        root = os.fstat(tier.root_fd)
        self._device = root.st_dev
        with tier.lock:
            tier.walker = self
            tier.accounts.begin_count()
            tier.accounts.count(root.st_ino, occupied(root))

    def close(self) -> None:
        """Ends the walk, finished or not; an unfinished one changes no accounts."""
        with self._tier.lock:
            if self._tier.walker is self:
                self._tier.walker = None
                if not self.findings.is_complete:
                    self._tier.accounts.abandon_count()
        if self._here is not None:
            self._here.close()
            self._here = None

    def moved(self, moves: Sequence[Move]) -> None:
        """Called by the tier, under its lock: the walk finds what moved at its new place."""
        for index, (path, identity) in enumerate(self._pending):
            self._pending[index] = (_moved_path(path, moves), identity)
        if self._here is not None:
            self._here.path = _moved_path(self._here.path, moves)
        for move in moves:
            if stat.S_ISDIR(move.status.st_mode) and move.status.st_ino not in self._met:
                self._met.add(move.status.st_ino)
                record = self._tier.records.record(self._tier.enter(move.new).proc + b".")
                self._pending.append((move.new, record.identity))

    def next_batch(self, size: int = BATCH) -> list[Stored]:
        """About ``size`` further directories and pages; none when all is done. What is damaged is quarantined
        on the way."""
        batch: list[Stored] = []
        while len(batch) < size and self._advance(batch):
            pass
        return batch

    def take_set_aside(self) -> list[bytes]:
        """Where damaged pages lay that were quarantined since this was last asked."""
        taken, self._set_aside = self._set_aside, []
        return taken

    def run(self) -> Findings:
        """The whole walk at once: counts anew, and quarantines."""
        try:
            while self._advance([]):
                pass
        finally:
            self.close()
        return self.findings

    def _advance(self, batch: list[Stored]) -> bool:
        """Looks at a few more names; False at the end."""
        with self._tier.lock:
            if self._here is None and not self._enter_next():
                self._finish()
                return False
            here = self._here
            if here is None:
                return True
            chunk = list(islice(here.entries, _CHUNK))
            prefix = here.path + b"/" if here.path else b""
            names = tuple(entry.name for entry in chunk if self._may_be_ours(here, entry))
            for name, look in zip(names, look_at(here.fd, names, self._flags, self._attribute), strict=True):
                try:
                    self._examine(here, name, prefix + name, look, batch)
                except FileNotFoundError:
                    continue
            if not chunk:
                here.close()
                self._here = None
        return True

    def _enter_next(self) -> bool:
        """Opens the next directory, unless it is gone; False when there is none."""
        if not self._pending:
            return False
        path, identity = self._pending.pop()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            fd = syscalls.openat2(
                self._tier.root_fd, path or b".", os.O_RDONLY | os.O_DIRECTORY | self._tier.noatime
            )
            self._here = _Here(path, identity, fd)
        return True

    def _finish(self) -> None:
        findings = self.findings
        if findings.is_complete:
            return
        findings.is_complete = True
        findings.drift_bytes = self._tier.accounts.end_count()
        self._tier.wants_recount = False
        if findings.foreign:
            names = ", ".join(map(shown, findings.foreign_names))
            log.warning(
                "%s holds %d files or directories that are not ours, and stay: %s",
                self._tier.directory,
                findings.foreign,
                names,
            )

    def _may_be_ours(self, here: _Here, entry: os.DirEntry[bytes]) -> bool:
        """Whether to look at what has a name; else it is noted as what it is."""
        if not here.path and is_reserved(entry.name):
            self._examine_reserved(here, entry)
            return False
        if entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False):
            return True
        self._note_foreign(here.path + b"/" + entry.name if here.path else entry.name)
        return False

    def _examine(self, here: _Here, name: bytes, path: bytes, look: Look | None, batch: list[Stored]) -> None:
        """Decides on one name. There may be a million of them: what happens here for each is kept short."""
        attributes: dict[str, bytes] = {}
        if look is None:
            look, attributes = self._look_closely(here, name)
        mode, device, inode, links, size, blocks, mtime_ns, atime_ns, packed = look
        is_directory = stat.S_ISDIR(mode)
        if not mode & MARK or device != self._device or not (is_directory or stat.S_ISREG(mode)):
            self._note_foreign(path)
            return
        try:
            record = Record.unpack(packed)
            in_place = here.identity != 0 and binding(here.identity, name) in record.names
        except ValueError:
            record, in_place = None, False
        if not in_place and not is_directory and self._is_copy(here, name):
            self._note_foreign(path)
            return
        self._tier.accounts.count(inode, blocks * 512)
        if is_directory:
            self._note_directory(path, inode, record.identity if in_place and record is not None else 0)
            if record is None or not in_place:  # of no use to the mount, but for what there may be in it
                return
            self.findings.directories += 1
        else:
            reason = damage(record, attributes, size) or ("" if in_place else "name")
            if reason or record is None:
                self.findings.damaged[reason] += 1
                self._set_aside.append(path)
                self._tier.set_aside(path, reason, inode)
                return
            self.findings.pages += 1
        batch.append(
            Stored(path, is_directory, record, attributes, size, blocks, links, inode, mtime_ns, atime_ns)
        )

    def _look_closely(self, here: _Here, name: bytes) -> tuple[Look, dict[str, bytes]]:
        """Looks at what is not as nearly all files are: has more attributes, or fails. Raises OSError."""
        fd = os.open(name, self._flags, dir_fd=here.fd)
        try:
            status = os.fstat(fd)
            attributes = self._tier.records.unparsed(fd)
        finally:
            os.close(fd)
        look = (
            *(status.st_mode, status.st_dev, status.st_ino, status.st_nlink),
            *(status.st_size, status.st_blocks, status.st_mtime_ns, status.st_atime_ns),
            attributes.pop(RECORD, b""),
        )
        return look, attributes

    def _is_copy(self, here: _Here, name: bytes) -> bool:
        fd = os.open(name, self._flags, dir_fd=here.fd)
        try:
            return self._tier.is_copy(fd)
        finally:
            os.close(fd)

    def _note_directory(self, path: bytes, inode: int, identity: int) -> None:
        if inode not in self._met:
            self._met.add(inode)
            self._pending.append((path, identity))

    def _examine_reserved(self, here: _Here, entry: os.DirEntry[bytes]) -> None:
        """What lies beside the tree is counted, but for temporaries: room is reserved for those."""
        name = entry.name
        if name == TEMPORARY or not name.startswith(RESERVED):
            return
        status = os.stat(name, dir_fd=here.fd, follow_symlinks=False)
        if name == QUARANTINE:
            self._tier.accounts.count(status.st_ino, occupied(status))
            with os.scandir(self._tier.beside(QUARANTINE).proc) as entries:
                for one in entries:
                    status = one.stat(follow_symlinks=False)
                    if is_ours(status):
                        self._tier.accounts.count(status.st_ino, occupied(status))
        elif name == OWNER_FILE:
            self._tier.accounts.count(status.st_ino, occupied(status))
        else:
            self._note_foreign(name)

    def _note_foreign(self, path: bytes) -> None:
        self.findings.foreign += 1
        if len(self.findings.foreign_names) < _MOST_NAMED:
            self.findings.foreign_names.append(path)


def _moved_path(path: bytes, moves: Sequence[Move]) -> bytes:
    for move in moves:
        if path == move.old or path.startswith(move.old + b"/"):
            return move.new + path[len(move.old) :]
    return path


async def scan_in_background(
    tier: SsdPages,
    adopt: Callable[[list[Stored]], None],
    set_aside: Callable[[list[bytes]], None] = lambda _: None,
    limiter: trio.CapacityLimiter | None = None,
) -> Findings:
    """Walks the tier in a thread, giving each batch to ``adopt`` on the event loop, which serves meanwhile,
    and to ``set_aside`` where damaged pages lay that are in quarantine now.
    """
    scan = Scan(tier)
    try:
        while not scan.findings.is_complete:
            batch = await trio.to_thread.run_sync(scan.next_batch, limiter=limiter)
            adopt(batch)
            set_aside(scan.take_set_aside())
            await trio.sleep(PAUSE)
    finally:
        scan.close()
    return scan.findings
