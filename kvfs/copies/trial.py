"""Whether a way to move pages works here: a file written and read again, by a process of its own.

Native libraries do worse than fail: one made for another processor ends its process, and one that finds half
a driver waits for ever. A mount must survive both.

    python -m kvfs.copies.trial uring 5 direct     # exit code 0, or one line on stdout
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

from kvfs.copies.copier import ALIGNMENT, Copier
from kvfs.copies.cufile import CUFILE, CufileCopier
from kvfs.copies.uring import URING, UringCopier
from kvfs.errors import Unavailable
from kvfs.interleaved import finish
from kvfs.page import digest_of

SECONDS: Final = 30
"""How long a trial may take."""

_SIZE: Final = 3 * ALIGNMENT + 1
_DIRECT: Final = "direct"


def make(path: str) -> Copier:
    """A way that may not be there, by its name. Raises Unavailable where it is not, OSError where it cannot
    be had now."""
    return {CUFILE: CufileCopier, URING: UringCopier}[path]()


def try_in_child(path: str, directory: int, *, direct: bool) -> None:
    """Tries a way in a directory that is given by a descriptor, past the page cache if ``direct``. Raises
    Unavailable, with one line that says why, where it does not work."""
    command = [sys.executable, "-P", "-m", __name__, path, str(directory), _DIRECT if direct else ""]
    try:
        child = subprocess.run(
            command,
            pass_fds=[directory],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"a trial did not end within {SECONDS} s") from None
    except OSError as error:
        raise Unavailable(f"it cannot be tried: {error.strerror}") from error
    if child.returncode < 0:
        raise Unavailable(f"a trial was ended by {signal.Signals(-child.returncode).name}")
    if child.returncode:
        lines = (child.stdout or child.stderr).strip().splitlines() or [f"exit code {child.returncode}"]
        raise Unavailable(lines[-1])


def try_here(copier: Copier, directory: int, *, direct: bool) -> None:
    """Raises Unavailable where what comes back is not what was written, and whatever the way raises."""
    content = os.urandom(_SIZE)
    with _in_memory(content) as source, _in_memory(bytes(_SIZE)) as target:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        fd = os.open(".", flags | os.O_TMPFILE, 0o600, dir_fd=directory)
        try:
            written = finish(copier.write(source, fd, _SIZE))
            read = copier.read(fd, target, _SIZE)
        finally:
            os.close(fd)
        if not written == read == digest_of(content) or os.pread(target, _SIZE, 0) != content:
            raise Unavailable("what was read is not what was written")


@contextlib.contextmanager
def _in_memory(content: bytes) -> Iterator[int]:
    fd = os.memfd_create("kvfs-trial")
    try:
        os.write(fd, content)
        yield fd
    finally:
        os.close(fd)


def main() -> int:
    path, directory, direct = sys.argv[1:]
    try:
        copier = make(path)
        try_here(copier, int(directory), direct=direct == _DIRECT)
        copier.close()
    except Exception as error:
        print(" ".join(str(error).split()))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
