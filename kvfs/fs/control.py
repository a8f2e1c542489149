"""The hidden directory .kvfs, in which the daemon tells of itself: listings leave it out.

Beside its files there is the batch socket, once the daemon has bound one there, or a symlink to it.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Awaitable, Callable, Mapping

import pyfuse3

NAME = b".kvfs"
SOCKET = b"socket"
NUMBER = 2
FIRST_FILE_NUMBER = 3


class ControlFiles:
    """Files whose text is made when they are opened. ``slow_texts`` are those that wait for a disk: they show
    a size of 0, as files in /proc do."""

    def __init__(
        self,
        texts: Mapping[bytes, Callable[[], bytes]],
        owner: tuple[int, int],
        slow_texts: Mapping[bytes, Callable[[], Awaitable[bytes]]] | None = None,
    ) -> None:
        self._texts = texts
        self._slow_texts = slow_texts or {}
        names = (*self._texts, *self._slow_texts)
        self._numbers = {name: FIRST_FILE_NUMBER + place for place, name in enumerate(names)}
        self._names = {number: name for name, number in self._numbers.items()}
        self._socket_number = FIRST_FILE_NUMBER + len(names)
        self._socket_mode = 0
        self._link = b""
        self._owner = owner
        self._since = time.time_ns()

    def number(self, name: bytes) -> int | None:
        return self._numbers.get(name)

    def is_control(self, number: int) -> bool:
        return number in (NUMBER, self._socket_number) or number in self._names

    def make_socket(self, name: bytes, mode: int, uid: int) -> pyfuse3.EntryAttributes:
        """bind(2) on behalf of the daemon makes the socket, once; nobody else makes anything here."""
        if name != SOCKET or not stat.S_ISSOCK(mode) or uid != os.geteuid():
            raise pyfuse3.FUSEError(errno.EPERM)
        if name in self._numbers:
            raise pyfuse3.FUSEError(errno.EEXIST)
        self._show_socket(stat.S_IFSOCK | 0o666)
        return self.attributes(self._socket_number)

    def link_socket(self, target: bytes) -> None:
        """The socket is at this path, and a symlink leads to it."""
        self._link = target
        self._show_socket(stat.S_IFLNK | 0o777)

    def _show_socket(self, mode: int) -> None:
        self._socket_mode = mode
        self._numbers[SOCKET] = self._socket_number

    def link(self, number: int) -> bytes:
        """Where a symlink leads."""
        if number != self._socket_number or not self._link:
            raise pyfuse3.FUSEError(errno.EINVAL)
        return self._link

    def names(self) -> list[tuple[bytes, int]]:
        return list(self._numbers.items())

    async def text(self, number: int) -> bytes:
        name = self._names[number]
        if name in self._slow_texts:
            return await self._slow_texts[name]()
        return self._texts[name]()

    def _size(self, number: int) -> int:
        make = self._texts.get(self._names[number])
        return 0 if make is None else len(make())

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
        elif number == self._socket_number:
            attributes.st_mode = pyfuse3.ModeT(self._socket_mode)
            attributes.st_nlink = 1
            attributes.st_size = len(self._link)
            now = self._since
        else:
            attributes.st_mode = pyfuse3.ModeT(stat.S_IFREG | 0o444)
            attributes.st_nlink = 1
            attributes.st_size = self._size(number)
            now = time.time_ns()
        attributes.st_atime_ns = attributes.st_mtime_ns = attributes.st_ctime_ns = now
        return attributes
