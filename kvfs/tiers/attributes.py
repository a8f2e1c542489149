"""What is known of a file, kept with the file where the filesystem can, else in memory."""

from __future__ import annotations

import os
from sys import intern
from typing import Protocol

from kvfs.errors import AttributeMissing

Target = bytes | int
"""A path that is not followed when it is a symlink, or a descriptor."""


class Attributes(Protocol):
    """Reads and writes the attributes of one tier's files; names come without the tier's prefix."""

    prefix: str

    def get(self, target: Target, name: str) -> bytes: ...
    def set(self, target: Target, name: str, value: bytes) -> None: ...
    def remove(self, target: Target, name: str) -> None: ...
    def names(self, target: Target) -> list[str]: ...
    def all(self, fd: int) -> dict[str, bytes]: ...
    def forget(self, inode: int) -> None: ...


def _missing(target: Target, name: str) -> AttributeMissing:
    return AttributeMissing(f"{target!r} has no attribute {name}")


class KernelAttributes:
    """Extended attributes of the filesystem: they live, move and die with the file."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def get(self, target: Target, name: str) -> bytes:
        try:
            return os.getxattr(target, self.prefix + name, follow_symlinks=isinstance(target, int))
        except OSError as error:
            if error.errno != AttributeMissing.errno:
                raise
        raise _missing(target, name)

    def set(self, target: Target, name: str, value: bytes) -> None:
        os.setxattr(target, self.prefix + name, value, follow_symlinks=isinstance(target, int))

    def remove(self, target: Target, name: str) -> None:
        try:
            os.removexattr(target, self.prefix + name, follow_symlinks=isinstance(target, int))
        except OSError as error:
            if error.errno != AttributeMissing.errno:
                raise
            raise _missing(target, name) from None

    def names(self, target: Target) -> list[str]:
        names = os.listxattr(target, follow_symlinks=isinstance(target, int))
        return [name.removeprefix(self.prefix) for name in names if name.startswith(self.prefix)]

    def all(self, fd: int) -> dict[str, bytes]:
        start = len(self.prefix)
        return {
            intern(name[start:]): os.getxattr(fd, name)
            for name in os.listxattr(fd)
            if name.startswith(self.prefix)
        }

    def forget(self, inode: int) -> None:
        """Nothing to do: the kernel forgets them with the file."""


class MemoryAttributes:
    """Attributes for a filesystem that has none: known to this process only, gone when it ends."""

    prefix = ""

    def __init__(self) -> None:
        self._known: dict[int, dict[str, bytes]] = {}

    @staticmethod
    def _status(target: Target) -> os.stat_result:
        return os.fstat(target) if isinstance(target, int) else os.lstat(target)

    def get(self, target: Target, name: str) -> bytes:
        try:
            return self._known[self._status(target).st_ino][name]
        except KeyError:
            raise _missing(target, name) from None

    def set(self, target: Target, name: str, value: bytes) -> None:
        status = self._status(target)
        if status.st_nlink:  # what has no name left is never forgotten again, and nobody can look for it
            self._known.setdefault(status.st_ino, {})[intern(name)] = bytes(value)

    def remove(self, target: Target, name: str) -> None:
        try:
            del self._known[self._status(target).st_ino][name]
        except KeyError:
            raise _missing(target, name) from None

    def names(self, target: Target) -> list[str]:
        return list(self._known.get(self._status(target).st_ino, ()))

    def all(self, fd: int) -> dict[str, bytes]:
        return dict(self._known.get(os.fstat(fd).st_ino, ()))

    def forget(self, inode: int) -> None:
        """Called when the last name of a file is gone, before its inode number is used again."""
        self._known.pop(inode, None)


def choose_attributes(root_fd: int) -> Attributes:
    """The best that this filesystem allows us: "trusted." (which only root can read), "user.", or memory."""
    for prefix in ("trusted.kvfs.", "user.kvfs."):
        try:
            os.setxattr(root_fd, prefix + "probe", b"")
            os.removexattr(root_fd, prefix + "probe")
        except OSError:
            continue
        return KernelAttributes(prefix)
    return MemoryAttributes()
