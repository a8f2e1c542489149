"""Descriptors through which nobody can change a file, not even by opening it anew: for other processes."""

from __future__ import annotations

import os

from kvfs import syscalls
from kvfs.tiers.base import Tier

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class ReadOnlyView:
    """The files of a tier through a mount of their own that is read-only and on no path.

    A descriptor can be opened once more, for writing, through /proc/self/fd, by whoever owns the file and by
    root, and its attributes can be set. Here all that is EROFS. ``missing`` says why there is no such mount;
    then descriptors are the tier's own.
    """

    def __init__(self, tier: Tier) -> None:
        self.missing = ""
        try:
            self._root = syscalls.clone_mount(tier.root_fd, read_only=True)
        except OSError as error:
            self.missing = error.strerror or str(error)
            self._root = os.dup(tier.root_fd)

    def open(self, path: bytes) -> int:
        """A descriptor for reading the file at a relative path, whose directories are no symlinks: they never
        are on a tier that only we write to. Raises ValueError for a path that would leave the tier."""
        if path.startswith(b"/"):
            raise ValueError(f"not a path below a tier: {path!r}")
        return os.open(path, _FLAGS, dir_fd=self._root)

    def close(self) -> None:
        """What was opened stays."""
        os.close(self._root)
