"""Bounds a directory on somebody else's tmpfs, which has no limit of its own for us."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvfs.tiers.base import Room

_SHARE_OF_TIME = 0.02


class Cap:
    """At most ``limit_bytes`` in the tree below ``root_fd``.

    The sum of what the files occupy is counted by a walk, at most once a second and so seldom that walking
    takes no more than 2 % of the time; between walks ``account`` tells what changed. Files that are unlinked
    but still open are not in the sum: what the filesystem itself has left bounds the room too.
    """

    def __init__(self, root_fd: int, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._root_fd = root_fd
        self._lock = threading.Lock()
        self._used_bytes = 0
        self._next_count = 0.0
        self._walks = 0

    @contextmanager
    def growing(self, size: int) -> Iterator[None]:
        """Around an allocation of ``size`` bytes. A walk meanwhile has seen it, or not, or a part of it: then
        another one follows."""
        walks = self._walks
        yield
        with self._lock:
            if walks == self._walks:
                self._used_bytes += size
            else:
                self._next_count = 0.0

    def account(self, delta_bytes: int) -> None:
        """Files grew by so many bytes of DRAM, or shrank where negative."""
        with self._lock:
            self._used_bytes += delta_bytes

    def used_bytes(self) -> int:
        """What the files occupy, in bytes."""
        with self._lock:
            start = time.monotonic()
            if start >= self._next_count:
                self._used_bytes = self._count()
                end = time.monotonic()
                self._next_count = end + max(1.0, (end - start) / _SHARE_OF_TIME)
            return max(0, self._used_bytes)

    def _count(self) -> int:
        self._walks += 1
        seen: set[int] = set()
        total = 0
        for _path, _directories, files, dir_fd in os.fwalk(".", dir_fd=self._root_fd):
            for name in files:
                try:
                    status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(status.st_mode) and status.st_ino not in seen:
                    if status.st_nlink > 1:
                        seen.add(status.st_ino)
                    total += status.st_blocks * 512
        return total

    def room(self, filesystem: Room) -> Room:
        """The room of the directory, given that of the filesystem it lies on."""
        used = self.used_bytes()
        return Room(
            total_bytes=min(self.limit_bytes, filesystem.total_bytes),
            free_bytes=max(0, min(self.limit_bytes - used, filesystem.free_bytes)),
            total_inodes=filesystem.total_inodes,
            free_inodes=filesystem.free_inodes,
            block_size=filesystem.block_size,
        )
