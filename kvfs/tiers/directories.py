"""Descriptors of a tier's directories, so that a file costs one system call however deep it lies."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict

from kvfs import syscalls


class Directory:
    """An open directory. Its descriptor is closed when the last one who uses this object lets go of it, so
    a thread that is inside a call never finds its descriptor closed, or worse, meaning another directory."""

    __slots__ = ("fd", "proc")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.proc = b"/proc/self/fd/%d/" % fd
        """What the few calls that take no directory descriptor prepend to a name."""

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close


class Directories:
    """The most recently used directories below ``root``, at most ``limit`` of them open. Any thread may ask.

    Knows nothing of changes to the tree: who renames, removes or makes a directory calls ``forget``.
    """

    def __init__(self, root: Directory, limit: int = 512) -> None:
        self._root = root
        self._limit = limit
        self._open: OrderedDict[bytes, Directory] = OrderedDict()
        self._lock = threading.Lock()
        self._changes = 0

    def get(self, path: bytes) -> Directory:
        """The directory at ``path``, b"" being the root. Raises ENOENT, ENOTDIR, and ELOOP at a symlink."""
        if not path:
            return self._root
        with self._lock:
            directory = self._open.get(path)
            if directory is not None:
                self._open.move_to_end(path)
                return directory
            changes = self._changes
        directory = Directory(syscalls.openat2(self._root.fd, path, os.O_PATH | os.O_DIRECTORY))
        with self._lock:
            # What was opened before a rename and is stored after it would be the wrong directory for ever.
            if changes == self._changes:
                self._open[path] = directory
                if len(self._open) > self._limit:
                    self._open.popitem(last=False)
        return directory

    def forget(self, path: bytes) -> None:
        """Drops ``path`` and everything below it."""
        below = path + b"/"
        with self._lock:
            self._changes += 1
            for known in [known for known in self._open if known == path or known.startswith(below)]:
                del self._open[known]

    def clear(self) -> None:
        """Drops all of them, but not the root."""
        with self._lock:
            self._changes += 1
            self._open.clear()
