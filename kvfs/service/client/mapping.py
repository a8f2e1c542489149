"""Files that descriptors stand for, as memory of this process."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Final

from kvfs import syscalls
from kvfs.errors import TooManyMappings, means_no_memory
from kvfs.page import HUGEPAGE

_MAP_NORESERVE: Final = 0x4000


class MappedFiles:
    """The bytes of open files, shared, side by side in one piece of address space.

    The descriptors can be closed at once. The memory is given back by ``close``, or when nobody has a view of
    it any more. ``views`` are Python's writable ones even where the files are mapped for reading only, since
    some libraries take no others: a write then is SIGSEGV, so give out ``toreadonly()``.

    Raises TooManyMappings where the kernel allows this process no more; each file takes one.
    """

    def __init__(self, descriptors: Sequence[int], sizes: Sequence[int], *, writable: bool) -> None:
        offsets, length = _layout(sizes)
        try:
            memory = mmap.mmap(-1, length + HUGEPAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
            skipped = -syscalls.address_of(memory) % HUGEPAGE  # or else hugepages were mapped in small pieces
            for descriptor, size, offset in zip(descriptors, sizes, offsets, strict=True):
                syscalls.map_over(memory, skipped + offset, descriptor, size, writable=writable)
        except OSError as error:
            if means_no_memory(error):
                raise TooManyMappings(
                    f"{len(sizes)} pages cannot be mapped: let go of pages that are not used any more, or "
                    "raise vm.max_map_count (sysctl), of which each mapped page takes one"
                ) from None
            raise
        self._memory = memory
        self._whole = memoryview(memory)
        self.views = [
            self._whole[skipped + offset : skipped + offset + size]
            for offset, size in zip(offsets, sizes, strict=True)
        ]

    def close(self) -> None:
        """Gives the memory back now. Raises BufferError while somebody else has a view of it."""
        for view in (*self.views, self._whole):
            view.release()
        self._memory.close()


def _layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each file begins, and where the last one ends, in bytes."""
    offsets = []
    end = 0
    for size in sizes:
        alignment = HUGEPAGE if size >= HUGEPAGE else mmap.PAGESIZE
        start = -(-end // alignment) * alignment
        offsets.append(start)
        end = start + size
    return offsets, end
