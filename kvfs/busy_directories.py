"""Directories whose attributes are told without the daemon: those in which names come and go."""

from __future__ import annotations

import os
from collections import OrderedDict
from contextlib import suppress

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

    def __len__(self) -> int:
        return len(self._descriptors)

    def use(self, directory: Directory) -> None:
        """A name came or goes in it."""
        if directory in self._descriptors:
            self._descriptors.move_to_end(directory)
            return
        with suppress(OSError):  # no descriptor left, say: then the daemon is asked
            fd = self._tier.open(directory.path(), os.O_RDONLY | os.O_DIRECTORY)
            self._descriptors[directory] = fd
            self.face.publish_directory(directory, fd)
            if len(self._descriptors) > LIMIT:
                self.forget(next(iter(self._descriptors)))

    def changed(self, directory: Directory) -> None:
        """Its owner or mode is another one."""
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
