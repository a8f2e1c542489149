"""Work on files in other threads, which whoever waits for it can leave behind.

A thread that waits for a disk cannot be interrupted. So it gets descriptors of its own, closes them when it
comes back, if ever, and what it returns then goes nowhere. With trio:

    job = jobs.new(partial(copy, size=size), source_fd, target_fd)
    try:
        with trio.fail_after(seconds):
            return await trio.to_thread.run_sync(job.run, limiter=limiter, abandon_on_cancel=True)
    finally:
        job.abandon()
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from enum import Enum, auto
from typing import Generic, TypeVar

from kvfs.errors import TimedOut

Result = TypeVar("Result")


class _State(Enum):
    NEW = auto()
    RUNNING = auto()
    ABANDONED = auto()
    OVER = auto()


class Job(Generic[Result]):
    """One piece of work; ``run`` belongs into a worker thread, ``abandon`` to whoever waits."""

    def __init__(self, jobs: Jobs, call: Callable[..., Result], fds: tuple[int, ...]) -> None:
        self._jobs = jobs
        self._call = call
        self._fds = fds
        self._state = _State.NEW

    def run(self) -> Result:
        """What the call returns for the descriptors, or raises. TimedOut when it was abandoned before."""
        with self._jobs.lock:
            if self._state is not _State.NEW:
                raise TimedOut("nobody waits for this any more")
            self._state = _State.RUNNING
        try:
            return self._call(*self._fds)
        finally:
            self._close()
            with self._jobs.lock:
                if self._state is _State.ABANDONED:
                    self._jobs.abandoned -= 1
                self._state = _State.OVER

    def abandon(self) -> bool:
        """Nobody waits any more. Says whether it had not begun, and so never will. Nothing happens where it
        is over, or the second time."""
        with self._jobs.lock:
            state = self._state
            if state is _State.RUNNING:
                self._state = _State.ABANDONED
                self._jobs.abandoned += 1
            elif state is _State.NEW:
                self._state = _State.OVER
        if state is _State.NEW:
            self._close()
        return state is _State.NEW

    def _close(self) -> None:
        for fd in self._fds:
            os.close(fd)


class Jobs:
    """``abandoned``: how many run though nobody waits for them. Belongs to the event loop, but for ``lock``,
    which protects the states of all jobs."""

    def __init__(self, most_abandoned: int) -> None:
        self.lock = threading.Lock()
        self.abandoned = 0
        self._most_abandoned = most_abandoned

    def new(self, call: Callable[..., Result], *fds: int) -> Job[Result]:
        """Work that will be done with descriptors of its own of the same files.

        Raises TimedOut where as many as may be are abandoned already, and OSError (EMFILE).
        """
        if self.abandoned >= self._most_abandoned:
            raise TimedOut(f"{self.abandoned} calls to the disk have not come back: no further one is made")
        with contextlib.ExitStack() as failed:
            own = []
            for fd in fds:
                own.append(os.dup(fd))
                failed.callback(os.close, own[-1])
            failed.pop_all()
        return Job(self, call, tuple(own))
