"""Calls through our own mount, made by processes of their own.

The kernel lets nobody die who waits for the answer of a filesystem. A daemon that was killed while a thread
of its own waited for it would stay, half dead, and its mount would hang instead of failing.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import trio

_BIND: Final = """
import socket, sys
try:
    socket.socket(fileno=int(sys.argv[1])).bind(sys.argv[2])
except OSError as error:
    sys.exit(error.errno)
"""


async def ask(mountpoint: Path) -> None:
    """Returns once the mount answers. Raises OSError where it does not."""
    status, told = await _run(["stat", "--file-system", "--format=", "--", str(mountpoint)])
    if status:
        raise OSError(f"the mount does not answer: {told}")


async def bind(listener: socket.socket, directory_fd: int, name: str) -> None:
    """Gives a socket a name in a directory of the mount. Raises OSError."""
    # Not by the directory's path, which may be longer than the 107 bytes of a socket's name.
    arguments = [str(listener.fileno()), f"/proc/self/fd/{directory_fd}/{name}"]
    command = [sys.executable, "-I", "-S", "-c", _BIND, *arguments]
    status, told = await _run(command, listener.fileno(), directory_fd)
    if told:
        raise OSError(f"a socket cannot be bound: {told.splitlines()[-1]}")
    if status:
        raise OSError(status, os.strerror(status))


async def _run(command: Sequence[str], *descriptors: int) -> tuple[int, str]:
    """The exit code of a command, and what it says of an error."""
    done = await trio.run_process(
        command,
        check=False,
        stdin=subprocess.DEVNULL,
        capture_stdout=True,
        capture_stderr=True,
        pass_fds=descriptors,
        env={"LC_ALL": "C", "PATH": os.environ.get("PATH", os.defpath)},
    )
    return done.returncode, done.stderr.decode(errors="replace").strip()
