"""Threads that call preadv and pwritev: a way that is always there."""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import outcome
import trio

from kvfs.copies.buffers import CHUNK
from kvfs.copies.copier import Copier, Lane, io_priority

DIRECT: Final = "direct"


@dataclass(frozen=True, slots=True)
class _Moved:
    """What was moved by the time that it was asked for."""

    length: int

    def wait(self) -> int:
        return self.length


class _Moving:
    """What another thread moves."""

    def __init__(self, move: Callable[[], int]) -> None:
        self._result: queue.SimpleQueue[outcome.Outcome[int]] = queue.SimpleQueue()
        # Threads that are kept for a while and used again, and that do not keep a process from ending.
        trio.lowlevel.start_thread_soon(move, self._result.put, "kvfs copies")

    def wait(self) -> int:
        return self._result.get().unwrap()


class _DirectLane:
    """A file of which each chunk is moved by a thread of its own; the only one by whoever reads it."""

    def __init__(self, fd: int, *, writing: bool, idle: bool, alone: bool) -> None:
        self._fd = fd
        self._call = os.pwritev if writing else os.preadv
        self._idle = idle
        self._alone = alone

    def start(self, memory: memoryview, offset: int) -> _Moved | _Moving:
        move = partial(self._move, memory, offset)
        return _Moved(move()) if self._alone else _Moving(move)

    def _move(self, memory: memoryview, offset: int) -> int:
        with io_priority(idle=self._idle):
            return self._call(self._fd, [memory], offset)


class DirectCopier(Copier):
    """Moves several chunks at once, each in a thread."""

    name = DIRECT

    @contextlib.contextmanager
    def open_lane(self, fd: int, size: int, *, writing: bool, idle: bool) -> Iterator[Lane]:
        yield _DirectLane(fd, writing=writing, idle=idle, alone=size <= CHUNK and not writing)
