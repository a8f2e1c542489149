"""Open files: handles, and what an open, a change of size or a release means for the pool.

Reads and writes never come here: the kernel moves the bytes, or the native half of the channel does. Only the
text of a control file is read through Python.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pyfuse3
import trio
from pyfuse3 import FUSEError

from kvfs.counters import LimitedLog
from kvfs.errors import StalePage
from kvfs.fs.channel import KILLED_HANDLE, NATIVE_HANDLE, UNFLUSHED_HANDLE
from kvfs.index import Entry
from kvfs.leaving import let_go
from kvfs.opening import RETRY_SECONDS, Openings
from kvfs.pool import Pool

log = logging.getLogger("kvfs.fs.files")


@dataclass(slots=True)
class Handle:
    """One open of an entry that the daemon answered."""

    entry: Entry
    writes: bool


class Files:
    """The handles that the daemon gave."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.openings = Openings(pool)
        self._handles: dict[int, Handle] = {}
        self._texts: dict[int, bytes] = {}
        self._next = 1
        self._sent_back: dict[int, float] = {}
        """When each task was answered ESTALE, if not long ago (trio's clock)."""
        self._log = LimitedLog(log)

    @property
    def file_limit(self) -> int:
        """The largest size that a file may be given, in bytes."""
        return self.openings.file_limit

    def __len__(self) -> int:
        return len(self._handles)

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _give(self, entry: Entry, writes: bool) -> pyfuse3.FileInfo:
        handle = self._number()
        self._handles[handle] = Handle(entry, writes)
        # Where the kernel keeps a copy of the bytes, it is right: they change through this kernel only.
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(handle), keep_cache=True)

    async def open(self, entry: Entry, flags: int, task: int) -> pyfuse3.FileInfo:
        """open(2). ESTALE, which makes the kernel look the name up again, when it means another file."""
        if not entry.is_file:
            raise FUSEError(errno.EINVAL)
        if flags & os.O_ACCMODE == os.O_RDONLY and not flags & os.O_TRUNC:
            if self.openings.is_replaced(entry) and not self._was_sent_back(task):
                raise StalePage("the name means another file")
            await self.openings.open_reading(entry)
            self._sent_back.pop(task, None)
            return self._give(entry, writes=False)
        try:
            await self.openings.open_writing(entry, bool(flags & os.O_TRUNC), task)
        except StalePage:
            if not self._was_sent_back(task) or not flags & os.O_TRUNC:
                raise
            self.openings.open_nameless(entry)
        self._sent_back.pop(task, None)
        return self._give(entry, writes=True)

    def _was_sent_back(self, task: int) -> bool:
        """Whether a task that is to get ESTALE got it just now: the kernel looks a name up again only once.
        Where many write one name, and slowly, it means another file again by then."""
        now = trio.current_time()
        before = self._sent_back.pop(task, -RETRY_SECONDS)
        self._sent_back = {one: when for one, when in self._sent_back.items() if now - when < RETRY_SECONDS}
        if now - before < RETRY_SECONDS:
            return True
        self._sent_back[task] = now
        return False

    def created(self, entry: Entry) -> pyfuse3.FileInfo:
        """The handle of a file that `Pool.create` just made."""
        self._pool.face.publish(entry)
        return self._give(entry, writes=True)

    async def resize(self, entry: Entry, size: int, task: int) -> None:
        if not entry.is_file:
            raise FUSEError(errno.EINVAL)
        await self.openings.resize(entry, size, task)

    async def run(self, news_fd: int) -> None:
        """Hears of what ended also while nobody asks for anything."""
        while True:
            await trio.lowlevel.wait_readable(news_fd)
            with suppress(BlockingIOError):  # put off again meanwhile
                os.read(news_fd, 8)
            self.catch_up()

    def catch_up(self) -> None:
        """Hears of what ended without a request of its own: before every request, since that came later."""
        handles, forgotten = self._pool.face.take_ended()
        for handle in handles:
            with self._surviving():
                self.release(handle)
        for number, lookups in forgotten:
            with self._surviving():
                if (fd := self._pool.forget(number, lookups)) >= 0:
                    trio.lowlevel.spawn_system_task(let_go, fd)

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """One end's trouble is not that of the others, or of whoever asks for something now."""
        try:
            yield
        except Exception as error:
            self._log.warning("bug", "the end of an open file was not heard of", error)

    def release(self, handle_number: int) -> None:
        if handle_number & NATIVE_HANDLE:
            self._release_native(handle_number & ~NATIVE_HANDLE)
            return
        killed, unflushed = handle_number & KILLED_HANDLE, handle_number & UNFLUSHED_HANDLE
        handle_number &= ~(KILLED_HANDLE | UNFLUSHED_HANDLE)
        if self._texts.pop(handle_number, None) is not None:
            return
        handle = self._handles.pop(handle_number)
        if handle.writes:
            # Programs that never own a descriptor (io_uring's direct ones) do not flush either: with bytes in
            # the file they get the benefit of the doubt.
            ended = killed or (unflushed and self._pool.status(handle.entry).st_size == 0)
            self._pool.remove_writer(handle.entry, "killed" if ended else "")
        else:
            self.openings.close_reading(handle.entry)

    def _release_native(self, number: int) -> None:
        """A handle that the channel gave, of an entry withdrawn since: the channel has counted it."""
        entry = self._pool.index.by_number(number)
        if entry is not None:
            self._pool.settle(entry)

    # Control files

    def open_text(self, text: bytes, flags: int) -> pyfuse3.FileInfo:
        if flags & (os.O_ACCMODE | os.O_TRUNC) != os.O_RDONLY:
            raise FUSEError(errno.EACCES)
        handle = self._number()
        self._texts[handle] = text
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(handle), direct_io=True)

    def read_text(self, handle_number: int, offset: int, size: int) -> bytes:
        text = self._texts.get(handle_number)
        if text is None:
            raise FUSEError(errno.EIO)
        return text[offset : offset + size]
