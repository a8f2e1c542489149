"""io_uring, by the package ``liburing``: one thread has several chunks on their way.

The package calls the kernel without letting go of the interpreter. So it is never asked to wait: a ring has a
descriptor, and poll on that lets the others run. It must be the release of 2024: later ones are compiled for
the processor of whoever released them, and end a process on many another.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import select
from collections.abc import Iterator
from types import ModuleType
from typing import Final

from kvfs.copies.copier import DEPTH, Copier, Lane, io_priority
from kvfs.errors import Unavailable, means_forbidden, means_unsupported

URING: Final = "uring"
RELEASE: Final = "2024."


def import_liburing() -> ModuleType:
    """The package. Raises Unavailable where there is none, or another release."""
    try:
        release = importlib.metadata.version("liburing")
    except importlib.metadata.PackageNotFoundError:
        raise Unavailable("liburing is not installed: pip install kvfs[uring]") from None
    if not release.startswith(RELEASE):
        raise Unavailable(f"liburing {release} is not the one to use: pip install kvfs[uring]")
    return importlib.import_module("liburing")


class _Ring:
    """A ring, used by one copy at a time."""

    def __init__(self, liburing: ModuleType) -> None:
        self._liburing = liburing
        self._ring = liburing.io_uring()
        try:
            liburing.io_uring_queue_init(DEPTH, self._ring)
        except OSError as error:
            if not (means_unsupported(error) or means_forbidden(error)):
                raise
            raise Unavailable(f"the kernel gives no io_uring: {error.strerror}") from error
        self._completion = liburing.io_uring_cqe()
        self._completed = select.poll()
        self._completed.register(self._ring.ring_fd, select.POLLIN)
        self._results: dict[int, int] = {}
        self._last = 0

    def submit(self, fd: int, memory: memoryview, offset: int, *, writing: bool) -> int:
        """Begins to move bytes; returns the number of the request."""
        liburing = self._liburing
        self._last += 1
        entry = liburing.io_uring_get_sqe(self._ring)
        prepare = liburing.io_uring_prep_write if writing else liburing.io_uring_prep_read
        prepare(entry, fd, memory, len(memory), offset)
        entry.user_data = self._last
        liburing.io_uring_submit(self._ring)
        return self._last

    def wait(self, request: int) -> int:
        """How many bytes a request moved."""
        liburing, completion = self._liburing, self._completion
        while request not in self._results:
            self._completed.poll()
            while liburing.io_uring_peek_cqe(self._ring, completion) == 0:
                self._results[completion.user_data] = completion.res
                liburing.io_uring_cqe_seen(self._ring, completion)
        result = self._results.pop(request)
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return result

    def close(self) -> None:
        self._liburing.io_uring_queue_exit(self._ring)


class _Request:
    """A chunk that the kernel moves."""

    def __init__(self, ring: _Ring, number: int) -> None:
        self._ring = ring
        self._number = number

    def wait(self) -> int:
        return self._ring.wait(self._number)


class _UringLane:
    """A file that is read or written through a ring."""

    def __init__(self, ring: _Ring, fd: int, *, writing: bool, idle: bool) -> None:
        self._ring = ring
        self._fd = fd
        self._writing = writing
        self._idle = idle

    def start(self, memory: memoryview, offset: int) -> _Request:
        with io_priority(idle=self._idle):  # the kernel notes it with the request
            number = self._ring.submit(self._fd, memory, offset, writing=self._writing)
        return _Request(self._ring, number)


class UringCopier(Copier):
    """Moves several chunks at once, through a ring for each copy under way."""

    name = URING

    def __init__(self) -> None:
        """Raises Unavailable where the package or the kernel does not have it."""
        super().__init__()
        self._liburing = import_liburing()
        self._idle_rings = [_Ring(self._liburing)]

    @contextlib.contextmanager
    def open_lane(self, fd: int, size: int, *, writing: bool, idle: bool) -> Iterator[Lane]:
        try:
            ring = self._idle_rings.pop()
        except IndexError:
            ring = _Ring(self._liburing)
        try:
            yield _UringLane(ring, fd, writing=writing, idle=idle)
        except BaseException:
            ring.close()  # it may hold what was never submitted
            raise
        self._idle_rings.append(ring)

    def close(self) -> None:
        while self._idle_rings:
            self._idle_rings.pop().close()
