"""Telling the kernel that a name means something else now.

The kernel makes the teller wait while the directory is busy, perhaps with a request that waits for the event
loop. So the loop only adds to a queue, and a thread of its own tells.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import trio

log = logging.getLogger("kvfs.invalidation")

QUEUE_LIMIT = 1 << 16
_EXPECTED = (errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENOTCONN)
"""The kernel does not know the name, or the mount is ending."""
LONGEST_WAIT = 1.0
"""Seconds for which a busy directory may keep who waits until the kernel was told."""


@dataclass(slots=True)
class _Waiting:
    """Somebody who waits until the kernel has been told of so many more names."""

    count: int
    told: trio.Event
    token: trio.lowlevel.TrioToken


class Invalidations:
    """A bounded queue without duplicates. What does not fit is dropped: the kernel then asks when it opens
    the name, and is answered ESTALE."""

    def __init__(self, tell: Callable[[int, bytes], None]) -> None:
        self._tell = tell
        self._names: dict[tuple[int, bytes], None] = {}
        self._changed = threading.Condition()
        self._is_telling = False
        self._waiting: list[_Waiting] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvfs-invalidation", daemon=True)
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._names)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def add(self, parent: int, name: bytes) -> None:
        with self._changed:
            if len(self._names) >= QUEUE_LIMIT and (parent, name) not in self._names:
                self.dropped += 1
                return
            self._names[parent, name] = None
            self._changed.notify()

    async def told(self) -> None:
        """Waits until the kernel knows of every name that was added so far; less if a directory is busy."""
        with self._changed:
            count = len(self._names) + self._is_telling
            if not count:
                return
            waiting = _Waiting(count, trio.Event(), trio.lowlevel.current_trio_token())
            self._waiting.append(waiting)
        with trio.move_on_after(LONGEST_WAIT):
            await waiting.told.wait()

    def _note_told(self) -> None:
        with self._changed:
            self._is_telling = False
            for waiting in self._waiting:
                waiting.count -= 1
                if not waiting.count:
                    with suppress(trio.RunFinishedError):
                        waiting.token.run_sync_soon(waiting.told.set)
            self._waiting = [waiting for waiting in self._waiting if waiting.count]

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._names and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    return
                parent, name = next(iter(self._names))
                del self._names[parent, name]
                self._is_telling = True
            try:
                self._tell(parent, name)
            except OSError as error:
                if error.errno not in _EXPECTED:
                    log.warning("the kernel could not be told of a changed name: %s", error.strerror)
            self._note_told()
