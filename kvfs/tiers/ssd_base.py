"""What every change of the SSD tier goes through: its accounts, and the bindings of files to their names."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from kvfs.errors import (
    AttributeMissing,
    DamagedPage,
    NoSuchPage,
    NotStorable,
    means_too_large,
)
from kvfs.tiers.attributes import Target
from kvfs.tiers.base import Room, Tier
from kvfs.tiers.directories import Directory
from kvfs.tiers.ssd_accounts import Accounts
from kvfs.tiers.ssd_attributes import RecordAttributes
from kvfs.tiers.ssd_directory import is_ours
from kvfs.tiers.ssd_label import is_labelled
from kvfs.tiers.ssd_names import FIRST_IDENTITY, ROOT_IDENTITY, binding, prefixes
from kvfs.tiers.ssd_record import TEXTS, Record

_ANY = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
_FULL_BELOW = 1 << 20
"""Bytes: a filesystem with more free than this has room for an attribute, if it can hold that one at all."""

AttributeTexts = Mapping[str, bytes]
Step = Callable[[str], None]
STEPS: Final = ("directory", "created", "allocated", "written", "synced", "described", "renamed")
"""What storing a page passes through, for tests that fail or end the process there; "directory" is passed for
each directory that is made on the way."""
MOVING_STEPS: Final = ("bound", "moved")
"""What giving a file or directory another name passes through."""


def occupied(status: os.stat_result) -> int:
    """The bytes of a disk that a file or directory takes."""
    return status.st_blocks * 512


class Move(NamedTuple):
    """A file or directory that got another path."""

    old: bytes
    new: bytes
    status: os.stat_result


class Walker(Protocol):
    """Who walks the tree must hear of what moves meanwhile: of two things where they were exchanged."""

    def moved(self, moves: Sequence[Move]) -> None: ...


class Renaming(NamedTuple):
    """A name in a directory that is to be another name in another."""

    directory: Directory
    name: bytes
    new_directory: Directory
    new_name: bytes


class SsdBase(Tier):
    """A tier whose changes wait for each other, under ``lock``; looking at it does not."""

    def __init__(
        self, root_fd: int, capacity_bytes: int, records: RecordAttributes, step: Step = lambda _: None
    ) -> None:
        super().__init__("ssd", root_fd)
        self._attributes = self.records = records
        self.lock = threading.RLock()
        self.accounts = Accounts(capacity_bytes, super().room())
        self.walker: Walker | None = None
        self._step = step
        self._serial = itertools.count()
        self.has_labels = False
        """Whether this filesystem can tell our files from copies of them."""
        self.wants_recount = False
        """Somebody found files missing that the accounts still count: ``ssd_scan`` can count anew."""

    @property
    def noatime(self) -> int:
        """The flag that keeps reading from setting the time of access, which ``ssd_uses`` sets; else 0."""
        return self._noatime

    def room(self) -> Room:
        """What the tier can hold, as it was known last: no system call. ``refresh_room`` asks anew."""
        return self.accounts.room()

    def refresh_room(self) -> Room:
        """Asks the filesystem, which a failing disk may delay, how much is left of it."""
        self.accounts.filesystem = super().room()
        return self.accounts.room()

    # What a change means for the accounts and bindings; all of it under the lock

    @contextlib.contextmanager
    def _growth(self, *directories: Directory) -> Iterator[None]:
        """Accounts for what directories grow or shrink by while names in them change."""
        before = {status.st_ino: status for status in (os.fstat(directory.fd) for directory in directories)}
        try:
            yield
        finally:
            for status in (os.fstat(directory.fd) for directory in directories):
                self._account(before.pop(status.st_ino, status), status)
            with contextlib.suppress(OSError):  # the names have changed, and whoever stores asks again
                self.accounts.filesystem = super().room()

    def _account(self, old: os.stat_result, new: os.stat_result) -> None:
        if old.st_blocks != new.st_blocks:
            self.accounts.changed(old.st_ino, occupied(old), occupied(new))

    def _status(self, directory: Directory, name: bytes) -> os.stat_result:
        """The status of something of ours. Raises FileNotFoundError."""
        status = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
        if not self.is_own(directory.fd, name, status):
            raise FileNotFoundError(NoSuchPage.errno, "what has this name is not ours", name)
        return status

    def is_own(self, dir_fd: int, name: bytes, status: os.stat_result, path: bytes | None = None) -> bool:
        """Whether the tier made what has a name in a directory. A copy that was made of a file is somebody
        else's, unless it is as good as the file was: the whole tier may come from a backup. With ``path`` the
        directories on the way must be so too."""
        if not is_ours(status):
            return False
        if stat.S_ISDIR(status.st_mode) or not self.has_labels:
            return True
        fd = os.open(name, _ANY | self._noatime, dir_fd=dir_fd)
        try:
            if is_labelled(fd):
                return True
            record = self.records.record(fd)
            if path is not None:
                return self.is_bound(path, record)
            return self._binding(dir_fd, name) in record.names
        except (AttributeMissing, DamagedPage):
            return False
        finally:
            os.close(fd)

    def is_copy(self, fd: int) -> bool:
        """Whether somebody made a damaged file by copying one of ours."""
        return self.has_labels and not is_labelled(fd)

    def _open_any(self, directory: Directory, name: bytes) -> int:
        """A descriptor of a file or directory, for its attributes."""
        return os.open(name, _ANY | self._noatime, dir_fd=directory.fd)

    @contextlib.contextmanager
    def _losing(self, directory: Directory, name: bytes) -> Iterator[os.stat_result]:
        """Around what takes a name away: it is the end of the file, or one of its bindings goes."""
        status = self._status(directory, name)
        if stat.S_ISDIR(status.st_mode) or status.st_nlink == 1:
            yield status
            self.accounts.changed(status.st_ino, occupied(status), 0)
            return
        fd = self._open_any(directory, name)
        try:
            yield status
            self._unbind(fd, self._binding(directory.fd, name))
        finally:
            os.close(fd)

    def _bind(self, fd: int, add: tuple[int, ...] = (), drop: tuple[int, ...] = ()) -> None:
        before = os.fstat(fd)
        drop = tuple(one for one in drop if one not in add)
        self._attach(
            lambda: self.records.bind(fd, add, drop), "a file on the SSD has too many names for another one"
        )
        self._account(before, os.fstat(fd))

    def _unbind(self, fd: int, gone: int, add: tuple[int, ...] = ()) -> None:
        """A file has lost a name, or did not get it. That is done and may not fail any more: who tried again
        would take the file for one that was never there. A binding too many binds to nothing."""
        with contextlib.suppress(OSError, NotStorable):
            self._bind(fd, add, drop=(gone,))

    def _binding(self, dir_fd: int, name: bytes) -> int:
        """What binds a file to its name in a directory, as that is now; 0 where the directory lost its
        identity, which binds nothing."""
        if dir_fd == self.root_fd:
            return binding(ROOT_IDENTITY, name)
        try:
            identity = self.records.record(b"/proc/self/fd/%d/." % dir_fd).identity
        except (AttributeMissing, DamagedPage):
            is_root = os.path.samestat(os.fstat(dir_fd), os.fstat(self.root_fd))
            identity = ROOT_IDENTITY if is_root else 0
        return binding(identity, name) if identity else 0

    @contextlib.contextmanager
    def _between_names(self, renamings: Sequence[Renaming]) -> Iterator[list[int]]:
        """Around what gives files other names, with descriptors of them: they are bound to both names
        meanwhile, so that a crash loses nothing."""
        with contextlib.ExitStack() as stack:
            descriptors, bindings = [], []
            for one in renamings:
                fd = self._open_any(one.directory, one.name)
                stack.callback(os.close, fd)
                old, new = (
                    self._binding(one.directory.fd, one.name),
                    self._binding(one.new_directory.fd, one.new_name),
                )
                self._bind(fd, add=(new,))
                self._step("bound")
                descriptors.append(fd)
                bindings.append((old, new))
            try:
                yield descriptors
            except (OSError, NotStorable):
                for fd, (_, new) in zip(descriptors, bindings, strict=True):
                    self._unbind(fd, new)
                raise
            self._step("moved")
            for fd, (old, new) in zip(descriptors, bindings, strict=True):
                self._unbind(fd, old, add=(new,))

    def _identity(self, path: bytes) -> int:
        """The identity of a directory that is there, made anew where it is lost or the directory
        misplaced."""
        identity = ROOT_IDENTITY
        for prefix in prefixes(path):
            directory = self._directories.get(prefix)
            target = directory.proc + b"."
            bound = binding(identity, prefix.rpartition(b"/")[2])
            try:
                record = self.records.record(target)
            except (AttributeMissing, DamagedPage):
                record = Record()
            if not record.identity or bound not in record.names:
                record.identity, record.names = new_identity(), (bound,)
                before = os.fstat(directory.fd)
                self.records.write(target, record)
                self._account(before, os.fstat(directory.fd))
            identity = record.identity
        return identity

    def is_bound(self, path: bytes, record: Record) -> bool:
        """Whether a record belongs to the file at ``path``, and all directories on the way are in place."""
        identity = ROOT_IDENTITY
        for prefix in prefixes(path):
            bound = binding(identity, prefix.rpartition(b"/")[2])
            if prefix == path:
                return bound in record.names
            try:
                directory = self.records.record(self._directories.get(prefix).proc + b".")
            except (AttributeMissing, DamagedPage, FileNotFoundError, NotADirectoryError):
                return False
            if bound not in directory.names or not directory.identity:
                return False
            identity = directory.identity
        return True

    @staticmethod
    def _is_same_file(status: os.stat_result, directory: Directory, name: bytes) -> bool:
        try:
            return os.path.samestat(status, os.stat(name, dir_fd=directory.fd, follow_symlinks=False))
        except FileNotFoundError:
            return False

    def _stands_in_place(self, directory: Directory, name: bytes) -> bool:
        """Whether something of ours has a name; NotStorable where something else has."""
        try:
            status = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if not self.is_own(directory.fd, name, status):
            raise NotStorable(f"{name!r} on the SSD is not ours: it stays, and the page is not stored")
        return True

    # Attributes

    def set_attribute(self, path_or_fd: bytes | int, name: str, value: bytes) -> None:
        with self.lock, self._rewriting(path_or_fd) as target:
            if name in TEXTS:
                self.records.set(target, name, value)
            else:
                self._set(target, name, value)

    def remove_attribute(self, path_or_fd: bytes | int, name: str) -> None:
        with self.lock, self._rewriting(path_or_fd) as target:
            self._attributes.remove(target, name)

    @contextlib.contextmanager
    def _rewriting(self, path_or_fd: bytes | int) -> Iterator[Target]:
        """Accounts for blocks that attributes take."""
        target, _held = self._target(path_or_fd)
        before = os.stat(target, follow_symlinks=isinstance(target, int))
        try:
            yield target
        finally:
            self._account(before, os.stat(target, follow_symlinks=isinstance(target, int)))

    def _set(self, target: Target, name: str, value: bytes) -> None:
        refusal = f"the attribute {name} does not fit beside the others of a file"
        self._attach(lambda: self.records.set(target, name, value), refusal)

    def _attach(self, write: Callable[[], None], refusal: str) -> None:
        """Writes an attribute. Raises NotStorable where the filesystem can never hold it, and OSError where
        it is full. It says the same of both: the second time it is not that room came just after the
        first."""
        for is_sure in (False, True):
            try:
                write()
                break
            except OSError as error:
                roomy = error.errno == errno.ENOSPC and super().room().free_bytes >= _FULL_BELOW
                if means_too_large(error) or (roomy and is_sure):
                    raise NotStorable(refusal) from error
                if not roomy:
                    raise

    def describe(self, target: Target, record: Record, attributes: AttributeTexts) -> None:
        """Writes all that is known of a new file or directory."""
        for name, value in attributes.items():
            if name in TEXTS:
                record.set_text(name, value)
        self.records.write(target, record)
        for name, value in attributes.items():
            if name not in TEXTS:
                self._set(target, name, value)


def new_identity() -> int:
    return max(FIRST_IDENTITY, secrets.randbits(64))
