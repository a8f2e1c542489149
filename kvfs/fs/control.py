"""The hidden directory .kvfs, in which the daemon tells of itself: listings leave it out."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable

import pyfuse3

NAME = b".kvfs"
NUMBER = 2
FIRST_FILE_NUMBER = 3


class ControlFiles:
    """Files whose text is made when they are opened."""

    def __init__(self, texts: dict[bytes, Callable[[], bytes]], owner: tuple[int, int]) -> None:
        self._texts = texts
        self._numbers = {name: FIRST_FILE_NUMBER + place for place, name in enumerate(texts)}
        self._names = {number: name for name, number in self._numbers.items()}
        self._owner = owner
        self._since = time.time_ns()

    def number(self, name: bytes) -> int | None:
        return self._numbers.get(name)

    def is_control(self, number: int) -> bool:
        return number == NUMBER or number in self._names

    def names(self) -> list[tuple[bytes, int]]:
        return list(self._numbers.items())

    def text(self, number: int) -> bytes:
        return self._texts[self._names[number]]()

    def attributes(self, number: int) -> pyfuse3.EntryAttributes:
        attributes = pyfuse3.EntryAttributes()
        attributes.st_ino = pyfuse3.InodeT(number)
        attributes.st_uid, attributes.st_gid = self._owner
        attributes.entry_timeout = 3600
        attributes.attr_timeout = 0
        if number == NUMBER:
            attributes.st_mode = pyfuse3.ModeT(stat.S_IFDIR | 0o555)
            attributes.st_nlink = 2
            now = self._since
        else:
            attributes.st_mode = pyfuse3.ModeT(stat.S_IFREG | 0o444)
            attributes.st_nlink = 1
            attributes.st_size = len(self.text(number))
            now = time.time_ns()
        attributes.st_atime_ns = attributes.st_mtime_ns = attributes.st_ctime_ns = now
        return attributes
