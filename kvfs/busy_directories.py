"""What is told of directories: without the daemon of those in which names come and go, and of none what the
pool does in DRAM for its own ends.

The mount tells the time of modification that the directory has in the tier. A name that a program makes,
removes or moves sets it. What the pool does by itself leaves it as it was: a page leaves DRAM or comes back,
a draft takes the place of a page.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from kvfs.holding import Face, NoFace
from kvfs.index import Directory
from kvfs.tiers.base import Tier

LIMIT = 256
"""Directories that keep a descriptor of ours."""


class BusyDirectories:
    """Each new name makes the kernel forget what it knows of the directory, and ask before the next one.

    The channel answers that from a descriptor. The directories used longest ago lose theirs first.
    """

    def __init__(self, tier: Tier) -> None:
        self.face: Face = NoFace()
        self._tier = tier
        self._descriptors: OrderedDict[Directory, int] = OrderedDict()
        self.on_changed: Callable[[Directory], None] = lambda directory: None
        """Told of each directory whose time is another one."""

    def __len__(self) -> int:
        return len(self._descriptors)

    def use(self, directory: Directory) -> None:
        """A program makes a name in it, or takes one away, and more are likely to follow."""
        self.on_changed(directory)
        if directory in self._descriptors:
            self._descriptors.move_to_end(directory)
            return
        with suppress(OSError):  # no descriptor left, say: then the daemon is asked
            fd = self._tier.open(directory.path(), os.O_RDONLY | os.O_DIRECTORY)
            self._descriptors[directory] = fd
            self.face.publish_directory(directory, fd)
            if len(self._descriptors) > LIMIT:
                self.forget(next(iter(self._descriptors)))

    def touch(self, directory: Directory) -> None:
        """A program made a name in it or took one away, of which DRAM has nothing."""
        self.on_changed(directory)
        path = directory.path()
        self._tier.utime(path, (self._tier.stat(path).st_atime_ns, time.time_ns()))

    @contextmanager
    def unseen(self, *directories: Directory) -> Iterator[None]:
        """Around what the pool does in DRAM by itself: nothing of it is told of these directories. Without an
        await inside: meanwhile the daemon alone is asked for them, and it is here."""
        busy = [directory for directory in set(directories) if directory in self._descriptors]
        for directory in busy:
            self.face.release(directory, 0)
        try:
            with self._tier.keeping_times({directory.path() for directory in directories}):
                yield
        finally:
            for directory in busy:
                self.face.publish_directory(directory, self._descriptors[directory])

    def changed(self, directory: Directory) -> None:
        """Its owner, mode, times or attributes are other ones."""
        self.on_changed(directory)
        if (fd := self._descriptors.get(directory)) is not None:
            self.face.publish_directory(directory, fd)

    def forget(self, directory: Directory) -> None:
        """It is gone, or cold."""
        if (fd := self._descriptors.pop(directory, None)) is not None:
            self.face.release(directory, 0)
            os.close(fd)

    def close(self) -> None:
        for directory in list(self._descriptors):
            self.forget(directory)
