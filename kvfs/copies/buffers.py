"""Memory that a copy passes through."""

from __future__ import annotations

import contextlib
import mmap
from typing import Final

from kvfs.page import HUGEPAGE

CHUNK: Final = HUGEPAGE
"""Bytes of a buffer. Smaller chunks cost more: of each, two threads must hear."""

IDLE: Final = 16
"""Buffers that are kept for the next copy."""


class Buffers:
    """Buffers of ``CHUNK`` bytes, each aligned to a page of memory; used again, since touching fresh memory
    costs more than copying into it. Callers may be several threads."""

    def __init__(self) -> None:
        self._idle: list[memoryview] = []

    def take(self) -> memoryview:
        """A buffer that nobody else uses; what is in it means nothing."""
        try:
            return self._idle.pop()
        except IndexError:
            return _allocate()

    def give(self, buffer: memoryview) -> None:
        """Takes a buffer back into which nothing is moved any more. One that is dropped instead is freed."""
        if len(self._idle) < IDLE:
            self._idle.append(buffer)


def _allocate() -> memoryview:
    # Private, because only private memory gets hugepages by asking. A disk that takes memory in pieces of
    # 4 KiB fills one hugepage with a single request, and twice as fast.
    memory = mmap.mmap(-1, CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without transparent hugepages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
