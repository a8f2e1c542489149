"""One copy of one page: chunk by chunk, several on their way at once, and the digest computed meanwhile.

The bytes pass through private memory. So the digest is that of exactly the bytes that were moved, whatever
somebody does to either file meanwhile, and a file that is cut short gives another digest and not a SIGBUS.

All functions block and belong into worker threads. They raise OSError as the kernel gives it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import ClassVar, Final, Protocol, Self

import xxhash

from kvfs import syscalls
from kvfs.copies.buffers import CHUNK, Buffers
from kvfs.errors import TierFailed
from kvfs.interleaved import Work
from kvfs.page import Digest

ALIGNMENT: Final = 4096
"""Bytes: what offsets, lengths and addresses of O_DIRECT are multiples of."""

DEPTH: Final = 4
"""Chunks of one page that are on their way at once: a copy takes at most ``DEPTH * CHUNK`` bytes."""


class Pending(Protocol):
    """A chunk on its way between memory and the SSD."""

    def wait(self) -> int:
        """How many bytes were moved: fewer than asked for at the end of a file. Its memory is free after
        this, also where it raises OSError."""
        ...


class Lane(Protocol):
    """One open file on the SSD, read or written by one thread."""

    def start(self, memory: memoryview, offset: int) -> Pending:
        """Begins to move bytes, at an offset of the file, into or out of ``memory``. Whoever calls keeps the
        memory, and waits."""
        ...


class Copier(ABC):
    """A way to move pages. May be used by several threads at once."""

    name: ClassVar[str]
    """As ``--ssd-read-path`` calls it."""

    def __init__(self) -> None:
        self._buffers = Buffers()

    @property
    def mode(self) -> str:
        """What else is to be known of the way; may be ""."""
        return ""

    @abstractmethod
    def open_lane(
        self, fd: int, size: int, *, writing: bool, idle: bool
    ) -> contextlib.AbstractContextManager[Lane]:
        """The SSD's end of a copy of ``size`` bytes; ``fd`` stays the caller's. ``idle``: only while nobody
        else uses the disk, as far as the disk's scheduler heeds that."""

    def close(self) -> None:  # noqa: B027 - most ways hold nothing
        """Lets go of what the way holds. Nothing may be under way."""

    def read(self, source_fd: int, target_fd: int, size: int) -> Digest:
        """Fills a file in DRAM, which has its size and its memory already, with ``size`` bytes from a file on
        the SSD. Returns the digest of what was there: where the file is shorter, of fewer bytes.

        Bypasses the page cache where ``source_fd`` has O_DIRECT, and else leaves nothing in it.
        """
        direct = is_direct(source_fd)
        size = min(size, os.fstat(source_fd).st_size)
        state = xxhash.xxh3_128()
        done = begun = 0
        with (
            self.open_lane(source_fd, size, writing=False, idle=False) as lane,
            _Flight(lane, aligned=direct) as flight,
        ):
            while begun < size or flight:
                while begun < size and len(flight) < DEPTH:
                    length = min(CHUNK, size - begun)
                    flight.start(self._buffers.take(), length, begun)
                    begun += length
                buffer, length, moved = flight.land()
                state.update(buffer[:moved])
                _write_fully(target_fd, buffer[:moved], done)
                self._buffers.give(buffer)
                done += moved
                if moved < length:
                    break
        if not direct:
            os.posix_fadvise(source_fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return Digest(state.hexdigest(), done)

    def write(self, source_fd: int, target_fd: int, size: int, *, idle: bool = False) -> Work[Digest]:
        """Fills a new file on the SSD with ``size`` bytes from a file in DRAM. Returns the digest of what was
        written: where the file in DRAM is shorter, of fewer bytes. Yields once the last chunks are on their
        way.

        With O_DIRECT the last chunk is padded and the length set afterwards. Without, the bytes are on the
        disk when this returns, and no longer in the page cache.
        """
        direct = is_direct(target_fd)
        state = xxhash.xxh3_128()
        done = 0
        with (
            self.open_lane(target_fd, size, writing=True, idle=idle) as lane,
            _Flight(lane, aligned=direct) as flight,
        ):
            while done < size:
                buffer = self._land_whole(flight) if len(flight) == DEPTH else self._buffers.take()
                length = min(CHUNK, size - done)
                read = _read_fully(source_fd, buffer[:length], done)
                state.update(buffer[:read])
                if read:
                    flight.start(buffer, read, done)
                done += read
                if read < length:
                    break
            yield
            while flight:
                self._buffers.give(self._land_whole(flight))
        if not direct:
            os.fdatasync(target_fd)
            os.posix_fadvise(target_fd, 0, 0, os.POSIX_FADV_DONTNEED)
        elif done % ALIGNMENT:
            os.ftruncate(target_fd, done)
        return Digest(state.hexdigest(), done)

    @staticmethod
    def _land_whole(flight: _Flight) -> memoryview:
        buffer, length, moved = flight.land()
        if moved < length:
            raise TierFailed(f"the disk took {moved} of {length} bytes, and does not say why")
        return buffer


@contextlib.contextmanager
def io_priority(*, idle: bool) -> Iterator[None]:
    """Whether what this thread asks of a disk waits until nobody else uses it."""
    if not idle:
        yield
        return
    syscalls.set_io_priority(syscalls.IOPRIO_IDLE)
    try:
        yield
    finally:
        syscalls.set_io_priority(syscalls.IOPRIO_NONE)


def is_direct(fd: int) -> bool:
    """Whether a descriptor bypasses the page cache."""
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


class _Flight:
    """The chunks of one copy that are on their way, the oldest first. At its end all of them have landed,
    also when the copy fails: until then their memory and the file are in use."""

    def __init__(self, lane: Lane, *, aligned: bool) -> None:
        self._lane = lane
        self._aligned = aligned
        self._chunks: deque[tuple[memoryview, int, int, Pending]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for *_, pending in self._chunks:
            # The copy has failed already, or found the end of its file: this adds nothing.
            with contextlib.suppress(Exception):
                pending.wait()

    def __len__(self) -> int:
        return len(self._chunks)

    def _padded(self, length: int) -> int:
        return -(-length // ALIGNMENT) * ALIGNMENT if self._aligned else length

    def start(self, buffer: memoryview, length: int, offset: int) -> None:
        """``length`` bytes at ``offset``. Where the lane wants them aligned, what follows them in the buffer
        is overwritten: by zeros when the file is written."""
        padded = self._padded(length)
        buffer[length:padded] = bytes(padded - length)
        self._chunks.append((buffer, length, offset, self._lane.start(buffer[:padded], offset)))

    def land(self) -> tuple[memoryview, int, int]:
        """Waits for the oldest chunk: its buffer, the bytes that it was to have, and those that it has."""
        buffer, length, offset, pending = self._chunks.popleft()
        moved = pending.wait()
        # A part may arrive alone. What is not whole blocks ends a file, and can not be continued from.
        while 0 < moved < length and not (self._aligned and moved % ALIGNMENT):
            more = self._lane.start(buffer[moved : self._padded(length)], offset + moved).wait()
            if not more:
                break
            moved += more
        return buffer, length, min(moved, length)


def _read_fully(fd: int, memory: memoryview, offset: int) -> int:
    done = 0
    while done < len(memory) and (read := os.preadv(fd, [memory[done:]], offset + done)):
        done += read
    return done


def _write_fully(fd: int, memory: memoryview, offset: int) -> None:
    done = 0
    while done < len(memory):
        done += os.pwrite(fd, memory[done:], offset + done)
