"""What every tier can do: files and directories below one root, named by relative paths.

Paths are bytes without a leading slash; b"" is the root. A path never leaves the root: directories are opened
with openat2, which refuses symlinks and "..", and the last component is never followed. The names of a tier
change only through its object, which one process owns; its methods may be called from several threads.
Operations raise OSError as the kernel gives it, but for the attributes' AttributeMissing.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

from kvfs import syscalls
from kvfs.tiers.attributes import Attributes, Target, choose_attributes
from kvfs.tiers.directories import Directories, Directory

_PLAIN = os.O_CLOEXEC | os.O_NOFOLLOW
_NOT_A_NAME = frozenset((b"", b".", b".."))

Names = list[bytes]
AttributeNames = list[str]


@dataclass(frozen=True, slots=True)
class Room:
    """What a tier can hold, as its filesystem counts it: files that are unlinked but in use included."""

    total_bytes: int
    free_bytes: int
    total_inodes: int
    free_inodes: int
    block_size: int

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.free_bytes


class Found(NamedTuple):
    """What a walk met. ``size`` in bytes, ``blocks`` of 512 bytes, times in nanoseconds since 1970."""

    path: bytes
    is_directory: bool
    size: int
    blocks: int
    links: int
    inode: int
    mtime_ns: int
    atime_ns: int
    attributes: dict[str, bytes]


def _is_directory(directory: Directory, name: bytes) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=directory.fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:  # another thread was quicker, and has told the directories so
        return False


class Tier:
    """One directory tree of ordinary files. Owns ``root_fd``, and closes it in ``close``."""

    def __init__(self, name: str, root_fd: int) -> None:
        self.name = name
        self._root = Directory(root_fd)
        self._directories = Directories(self._root)
        self._attributes: Attributes = choose_attributes(root_fd)
        self._noatime = self._probe_noatime()
        # The kernel forgets its own attributes; whoever keeps accounts of files must hear of their end.
        self._notices_ends = not self._attributes.prefix

    @property
    def root_fd(self) -> int:
        """The descriptor of the root, -1 once the tier is closed."""
        return self._root.fd

    @property
    def attribute_prefix(self) -> str:
        """ "trusted.kvfs.", "user.kvfs.", or "" where attributes are in memory and end with this process."""
        return self._attributes.prefix

    def _probe_noatime(self) -> int:
        try:
            os.close(os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOATIME | _PLAIN, dir_fd=self.root_fd))
        except PermissionError:
            return 0
        return os.O_NOATIME

    def _locate(self, path: bytes) -> tuple[Directory, bytes]:
        """Where a path lies, and its name there. The directory must be kept while its descriptor is used."""
        if not path:
            return self._root, b"."
        parent, _, name = path.rpartition(b"/")
        if name in _NOT_A_NAME:
            raise ValueError(f"not a path below a tier: {path!r}")
        return self._directories.get(parent), name

    # Files

    def open(self, path: bytes, flags: int) -> int:
        """A new descriptor. Raises ELOOP for a symlink. Reading through it is a use: it sets the atime."""
        directory, name = self._locate(path)
        return os.open(name, flags | _PLAIN, dir_fd=directory.fd)

    def create(self, path: bytes) -> int:
        """A descriptor, for reading and writing, of a new file that only we may open. Raises EEXIST."""
        directory, name = self._locate(path)
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _PLAIN, 0o600, dir_fd=directory.fd)

    def stat(self, path: bytes) -> os.stat_result:
        directory, name = self._locate(path)
        return os.stat(name, dir_fd=directory.fd, follow_symlinks=False)

    def unlink(self, path: bytes) -> None:
        """Takes the name away; who has the file open or mapped keeps it whole until they let go."""
        directory, name = self._locate(path)
        ended = self._status_of_end(directory, name)
        os.unlink(name, dir_fd=directory.fd)
        if ended is not None:
            self._ended(ended)

    def link(self, old: bytes, new: bytes) -> None:
        old_directory, old_name = self._locate(old)
        new_directory, new_name = self._locate(new)
        os.link(
            old_name,
            new_name,
            src_dir_fd=old_directory.fd,
            dst_dir_fd=new_directory.fd,
            follow_symlinks=False,
        )

    def rename(self, old: bytes, new: bytes, flags: int = 0) -> None:
        """Renames a file or directory; ``flags`` are RENAME_NOREPLACE or RENAME_EXCHANGE of ``syscalls``."""
        old_directory, old_name = self._locate(old)
        new_directory, new_name = self._locate(new)
        if flags:
            syscalls.renameat2(old_directory.fd, old_name, new_directory.fd, new_name, flags)
        else:
            ended = self._status_of_end(new_directory, new_name, replaced_by=(old_directory, old_name))
            os.rename(old_name, new_name, src_dir_fd=old_directory.fd, dst_dir_fd=new_directory.fd)
            if ended is not None:
                self._ended(ended)
        exchanged = flags & syscalls.RENAME_EXCHANGE
        if _is_directory(new_directory, new_name) or (exchanged and _is_directory(old_directory, old_name)):
            self._directories.forget(old)
            self._directories.forget(new)

    def utime(self, path: bytes, ns: tuple[int, int]) -> None:
        """Sets the times of access and of change, in nanoseconds since 1970."""
        directory, name = self._locate(path)
        os.utime(name, ns=ns, dir_fd=directory.fd, follow_symlinks=False)

    # Directories

    def mkdir(self, path: bytes) -> None:
        directory, name = self._locate(path)
        os.mkdir(name, 0o700, dir_fd=directory.fd)
        self._directories.forget(path)  # somebody else may have removed the one that we knew

    def rmdir(self, path: bytes) -> None:
        directory, name = self._locate(path)
        ended = self._status_of_end(directory, name)
        os.rmdir(name, dir_fd=directory.fd)
        self._directories.forget(path)
        if ended is not None:
            self._ended(ended)

    def list(self, path: bytes) -> Names:
        """The names in a directory, in no order, without "." and ".."."""
        return os.listdir(self._directories.get(path).proc)

    @contextmanager
    def keeping_times(self, paths: Iterable[bytes]) -> Iterator[None]:
        """Around changes of names that are not to show in the times of the directories at ``paths``, as far
        as those exist before and afterwards."""
        times = {}
        for path in paths:
            with suppress(FileNotFoundError):
                status = self.stat(path)
                times[path] = (status.st_atime_ns, status.st_mtime_ns)
        try:
            yield
        finally:
            for path, ns in times.items():
                with suppress(FileNotFoundError):
                    self.utime(path, ns)

    # Attributes

    def _target(self, path_or_fd: bytes | int) -> tuple[Target, Directory | None]:
        if isinstance(path_or_fd, int):
            return path_or_fd, None
        directory, name = self._locate(path_or_fd)
        return directory.proc + name, directory

    def get_attribute(self, path_or_fd: bytes | int, name: str) -> bytes:
        """Raises AttributeMissing. With a descriptor three times as fast as with a path."""
        target, _held = self._target(path_or_fd)
        return self._attributes.get(target, name)

    def set_attribute(self, path_or_fd: bytes | int, name: str, value: bytes) -> None:
        target, _held = self._target(path_or_fd)
        self._attributes.set(target, name, value)

    def remove_attribute(self, path_or_fd: bytes | int, name: str) -> None:
        """Raises AttributeMissing."""
        target, _held = self._target(path_or_fd)
        self._attributes.remove(target, name)

    def list_attributes(self, path_or_fd: bytes | int) -> AttributeNames:
        """The names of our attributes, without the tier's prefix."""
        target, _held = self._target(path_or_fd)
        return self._attributes.names(target)

    # The whole

    def walk(self, start: bytes = b"") -> Iterator[Found]:
        """Everything below ``start``, parents before their children, with all our attributes.

        About 10 µs a file. The tree may change meanwhile: what vanishes is left out, and what was given may
        be unlinked at once; what appears may be given or not.
        """
        pending = [start]
        while pending:
            path = pending.pop()
            try:
                fd = syscalls.openat2(
                    self.root_fd, path or b".", os.O_RDONLY | os.O_DIRECTORY | self._noatime
                )
            except (FileNotFoundError, NotADirectoryError):
                continue
            prefix = path + b"/" if path else b""
            try:
                with os.scandir(b"/proc/self/fd/%d" % fd) as entries:
                    for entry in entries:
                        try:
                            found = self._examine(fd, entry, prefix)
                        except FileNotFoundError:
                            continue
                        if found.is_directory:
                            pending.append(found.path)
                        yield found
            finally:
                os.close(fd)

    def _examine(self, dir_fd: int, entry: os.DirEntry[bytes], prefix: bytes) -> Found:
        name = entry.name
        is_directory = entry.is_dir(follow_symlinks=False)
        if is_directory or entry.is_file(follow_symlinks=False):
            fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _PLAIN | self._noatime, dir_fd=dir_fd)
            try:
                status = os.fstat(fd)
                attributes = self._attributes.all(fd)
            finally:
                os.close(fd)
        else:  # a tier of ours holds no such thing; it is shown so that it can be dropped
            status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
            attributes = {}
        return Found(
            prefix + name,
            is_directory,
            status.st_size,
            status.st_blocks,
            status.st_nlink,
            status.st_ino,
            status.st_mtime_ns,
            status.st_atime_ns,
            attributes,
        )

    def room(self) -> Room:
        """What statvfs says now; one system call."""
        status = os.fstatvfs(self.root_fd)
        return Room(
            total_bytes=status.f_blocks * status.f_frsize,
            free_bytes=status.f_bavail * status.f_frsize,
            total_inodes=status.f_files,
            free_inodes=status.f_ffree,
            block_size=status.f_frsize,
        )

    def close(self, keep: bool = True) -> None:
        """Lets go of all descriptors. ``keep=False`` also deletes everything in the tier first."""
        if not keep:
            self.empty()
        self._directories.clear()
        self._root.close()

    def empty(self) -> None:
        """Deletes everything below the root."""
        directories = [b""]
        for path in directories:  # grows while it is walked
            directory = self._directories.get(path)
            prefix = path + b"/" if path else b""
            with os.scandir(directory.proc) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        directories.append(prefix + entry.name)
                    else:
                        os.unlink(entry.name, dir_fd=directory.fd)
        for path in reversed(directories[1:]):
            self.rmdir(path)

    # The ends of files, for those who keep accounts of them

    def _status_of_end(
        self, directory: Directory, name: bytes, replaced_by: tuple[Directory, bytes] | None = None
    ) -> os.stat_result | None:
        """The status of what is about to lose its last name; None when nothing is, or nobody cares."""
        if not self._notices_ends:
            return None
        try:
            status = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
            if replaced_by is not None:
                successor = os.stat(replaced_by[1], dir_fd=replaced_by[0].fd, follow_symlinks=False)
                if successor.st_ino == status.st_ino:
                    return None
        except FileNotFoundError:
            return None
        return status if status.st_nlink == 1 or stat.S_ISDIR(status.st_mode) else None

    def _ended(self, status: os.stat_result) -> None:
        """The last name of a file or directory is gone."""
        self._attributes.forget(status.st_ino)
