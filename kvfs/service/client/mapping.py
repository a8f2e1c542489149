"""Files that descriptors stand for, as memory of this process."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from typing import Final

from kvfs import syscalls
from kvfs.errors import TooManyMappings, means_no_memory
from kvfs.page import HUGEPAGE

_MAP_NORESERVE: Final = 0x4000


def map_files(
    descriptors: Sequence[int], sizes: Sequence[int], *, writable: bool
) -> tuple[list[memoryview], weakref.ref[mmap.mmap]]:
    """The bytes of open files, shared, side by side in one piece of memory: a view of each, and the memory.

    The descriptors can be closed at once. The memory is given back when nobody has a view of it any more, not
    even a library that only remembers the view: the reference tells when. The views are Python's writable
    ones even where files are mapped for reading only, since some libraries take no others. A write then is
    SIGSEGV, so give out ``toreadonly()``.

    Raises TooManyMappings where the kernel allows this process no more; each file takes one.
    """
    offsets, length = _layout(sizes)
    try:
        memory = mmap.mmap(-1, length + HUGEPAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        skipped = -syscalls.address_of(memory) % HUGEPAGE  # or else hugepages were mapped in small pieces
        for descriptor, size, offset in zip(descriptors, sizes, offsets, strict=True):
            syscalls.map_over(memory, skipped + offset, descriptor, size, writable=writable)
    except OSError as error:
        if means_no_memory(error):
            raise TooManyMappings(
                f"{len(sizes)} pages cannot be mapped: let go of pages that are not used any more, or raise "
                "vm.max_map_count (sysctl), of which each mapped page takes one"
            ) from None
        raise
    whole = memoryview(memory)
    starts = [skipped + offset for offset in offsets]
    views = [whole[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    return views, weakref.ref(memory)


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
