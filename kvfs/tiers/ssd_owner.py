"""Who owns the directory of an SSD tier: the file ``.kvfs-owner``, one line of JSON in 512 bytes.

The owner holds a lock (flock) on the file and on the directory for its life, so a second one is refused even
after somebody has deleted the file. The file is rewritten in place: its bytes lie within one sector, which a
disk writes whole or not at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import Final

import msgspec

from kvfs import syscalls
from kvfs.errors import TierInUse, TierUnusable
from kvfs.tiers.ssd_names import OWNER_FILE

LAYOUT: Final = 1
"""The layout of this release: what the names, attributes and files in the directory mean."""
OLDEST_LAYOUT: Final = 1
"""The oldest layout that this release reads as it is; taking the directory makes it one of ``LAYOUT``."""

_SIZE = 512
_LONGEST_TEXT = 200
_ATTEMPTS = 50


class OwnerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What ``.kvfs-owner`` says.

    ``tier`` identifies the directory, wherever it is mounted. ``mount``, ``host`` and ``process`` say who has
    or had it; ``process`` is 0 while nobody does. ``clean``: the last stop was an orderly one, and every page
    is known to be as it was stored. ``used_bytes``: what the tier held then. ``prefix`` is that of its
    attributes. ``turn`` is another one each time that the directory is taken.
    """

    layout: int
    tier: str
    prefix: str
    mount: str
    host: str
    process: int = 0
    clean: bool = False
    used_bytes: int = 0
    turn: str = ""


class _AnyRecord(msgspec.Struct):
    """What every layout has."""

    layout: int
    prefix: str = ""


def _encode(record: OwnerRecord) -> bytes:
    while len(encoded := msgspec.json.encode(record)) >= _SIZE:
        longest = max(len(record.mount), len(record.host))
        record = msgspec.structs.replace(
            record, mount=record.mount[: longest * 3 // 4], host=record.host[: longest * 3 // 4]
        )
    return encoded.ljust(_SIZE - 1) + b"\n"


class Ownership:
    """A locked ``.kvfs-owner``. ``record`` is what it said when it was locked, None in a layout that this
    release does not read; ``layout`` is its number."""

    def __init__(self, directory: Path, root_fd: int) -> None:
        self._directory = directory
        self._root_fd = root_fd
        self._fd = -1
        self.layout = 0
        self.record: OwnerRecord | None = None
        self.prefix = ""

    @classmethod
    def find(cls, directory: Path, root_fd: int) -> Ownership | None:
        """Locks what is there and reads it, without changing anything; None where the file is missing.

        Raises TierInUse, and TierUnusable where the file cannot be read.
        """
        ownership = cls(directory, root_fd)
        try:
            fd = syscalls.openat2(root_fd, OWNER_FILE, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            ownership._lock(fd)
            ownership._read(fd)
        except BaseException:
            os.close(fd)
            raise
        ownership._keep(fd)
        return ownership

    @classmethod
    def create(cls, directory: Path, root_fd: int, record: OwnerRecord) -> Ownership:
        """Makes the file, locked and whole from the first moment that it has its name. Raises TierInUse."""
        ownership = cls(directory, root_fd)
        ownership.layout, ownership.record, ownership.prefix = record.layout, record, record.prefix
        temporary = OWNER_FILE + b".%d" % os.getpid()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=root_fd)
        writing = syscalls.openat2(root_fd, temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(writing, "wb") as file:
                file.write(_encode(record))
                file.flush()
                os.fsync(writing)
            fd = syscalls.openat2(root_fd, temporary, os.O_RDONLY)
            try:
                ownership._lock(fd)
                os.link(temporary, OWNER_FILE, src_dir_fd=root_fd, dst_dir_fd=root_fd)
                os.fsync(root_fd)
            except FileExistsError:
                os.close(fd)
                raise ownership._in_use() from None
            except BaseException:
                os.close(fd)
                raise
        finally:
            os.unlink(temporary, dir_fd=root_fd)
        ownership._keep(fd)
        return ownership

    def _keep(self, fd: int) -> None:
        self._fd = fd
        self._root_fd = os.dup(self._root_fd)  # of the same open directory, and so with the same lock

    def _lock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(self._root_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._in_use() from None

    def _in_use(self) -> TierInUse:
        """Who has it. It may have locked the file a moment ago and not have written its name yet."""
        record = None
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(OSError, TierUnusable):
                fd = syscalls.openat2(self._root_fd, OWNER_FILE, os.O_RDONLY | os.O_NOFOLLOW)
                try:
                    self._read(fd)
                finally:
                    os.close(fd)
                record = self.record
            if record is None or record.process:
                break
            time.sleep(0.002)
        if record is None or not record.process:
            return TierInUse(f"{self._directory} is in use by another kvfs: an SSD directory has one owner")
        return TierInUse(
            f"{self._directory} is in use by the mount {record.mount} (process {record.process} on "
            f"{record.host}): an SSD directory has one owner"
        )

    def _read(self, fd: int) -> None:
        text = os.pread(fd, 8 * _SIZE, 0)
        try:
            known = msgspec.json.decode(text, type=_AnyRecord)
            self.layout, self.prefix = known.layout, known.prefix
            if OLDEST_LAYOUT <= known.layout <= LAYOUT:
                self.record = msgspec.json.decode(text, type=OwnerRecord)
        except msgspec.DecodeError:
            raise TierUnusable(
                f"{self._directory}/{OWNER_FILE.decode()} cannot be read; remove it, and the next mount "
                "takes over what is there, and checks it"
            ) from None

    def write(self, record: OwnerRecord) -> None:
        """Says something new, on the disk when this returns."""
        # Opened for this alone, so that the filesystem can be remounted read-only meanwhile.
        fd = os.open(f"/proc/self/fd/{self._fd}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(fd, _encode(record), 0)
            os.ftruncate(fd, _SIZE)
            os.fsync(fd)
        finally:
            os.close(fd)
        self.layout, self.record, self.prefix = record.layout, record, record.prefix

    def release(self) -> None:
        """Lets another process have the directory; nothing happens the second time."""
        if self._fd >= 0:
            fcntl.flock(self._root_fd, fcntl.LOCK_UN)
            os.close(self._root_fd)
            os.close(self._fd)
            self._fd = -1


def describe_owner(mount: Path) -> tuple[str, str, int]:
    """How this process is named in the record: mount, host, process."""
    return str(mount)[:_LONGEST_TEXT], os.uname().nodename[:_LONGEST_TEXT], os.getpid()
