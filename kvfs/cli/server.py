"""The process that serves a mount, held so that its number cannot come to mean another process."""

from __future__ import annotations

import os
import re
import select
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGKILL

from kvfs.state import StateDirectory

_PF_EXITING = 0x4


class Server:
    """A live daemon. Made by ``server_of``."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._descriptor = descriptor

    def wait(self, seconds: float) -> bool:
        """Whether the process, all its threads, has ended within ``seconds``."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def is_dying(self) -> bool:
        """Whether it was killed or exits, and only keeps its lock for some more milliseconds."""
        process = Path("/proc", str(self.pid))
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            pending = re.findall(r"^S(?:ig|hd)Pnd:\s*(\w+)$", (process / "status").read_text(), re.MULTILINE)
        except (FileNotFoundError, ProcessLookupError):
            return True
        killed = any(int(mask, 16) & (1 << (SIGKILL - 1)) for mask in pending)
        return killed or fields[0] in "ZX" or bool(int(fields[6]) & _PF_EXITING)


@contextmanager
def server_of(state: StateDirectory) -> Iterator[Server | None]:
    """The process that holds the state directory's lock, or None."""
    pid = state.daemon_pid()
    if pid is None:
        yield None
        return
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        # Between reading the number and opening it, it may have come to mean another process.
        yield Server(pid, descriptor) if state.daemon_pid() == pid else None
    finally:
        os.close(descriptor)
