"""A process that ends what hangs: the test process cannot, while it waits in the kernel for a daemon.

It kills the daemons of this run with SIGKILL, upon which every call that waits for them fails with ENOTCONN.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal

from tests.mounted.running import processes_of_this_run


class Watchdog:
    """Forked once; told by a pipe when a test begins and when it has ended."""

    def __init__(self) -> None:
        reading, self._writing = os.pipe()
        self._verdict, verdict = os.pipe()
        os.set_blocking(self._verdict, False)
        self._process = os.fork()
        if self._process == 0:
            os.close(self._writing)
            with contextlib.suppress(KeyboardInterrupt):
                _watch(reading, verdict)
            os._exit(0)
        os.close(reading)
        os.close(verdict)

    def begin(self, seconds: float) -> None:
        """From now on a test has so long."""
        os.write(self._writing, f"{seconds}\n".encode())

    def end(self) -> bool:
        """The test has ended; whether it had to be ended."""
        os.write(self._writing, b"0\n")
        try:
            return bool(os.read(self._verdict, 64))
        except BlockingIOError:
            return False

    def close(self) -> None:
        os.close(self._writing)
        os.waitpid(self._process, 0)
        os.close(self._verdict)


def _watch(reading: int, verdict: int) -> None:
    timeout: float | None = None
    while True:
        if not select.select([reading], [], [], timeout)[0]:
            os.write(verdict, b"x")
            for process in processes_of_this_run():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            timeout = None
            continue
        lines = os.read(reading, 4096).split()
        if not lines:
            return
        timeout = float(lines[-1]) or None
