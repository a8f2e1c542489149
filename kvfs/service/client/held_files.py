"""Files that are open, by key: descriptors until somebody wants their memory."""

from __future__ import annotations

import mmap
import os
import resource
import threading
import weakref
from collections.abc import Callable
from typing import ClassVar, Final, TypeVar

from kvfs.errors import WrongSize
from kvfs.service.client.mapping import map_files
from kvfs.service.client.plain_files import content_of, fill, write

Result = TypeVar("Result")

_SHARE: Final = 2
"""Of the files that this process may have open, a half is left to the rest of it."""


class HeldFiles:
    """Holds the files of one batch. Mapping costs more than copying once, and all that is mapped is one piece
    of memory; so nothing is mapped before somebody looks at it, and then everything, and the descriptors are
    closed. Where this process has many files open for the client, files are mapped as they come.

    Any thread may use it. Without ``close`` it closes when it is forgotten.
    """

    _open: ClassVar[int] = 0
    """Descriptors of all batches of this process."""
    _count: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, *, writable: bool) -> None:
        self.sizes: dict[str, int] = {}
        self._writable = writable
        self._descriptors: dict[str, int] = {}
        self._memory: list[weakref.ref[mmap.mmap]] = []
        self._views: dict[str, memoryview] = {}
        self._lock = threading.RLock()
        self._most_open = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE

    def add(self, key: str, descriptor: int, size: int) -> None:
        """Takes over a descriptor of a file of ``size`` bytes; of two with one key it keeps the first."""
        if key in self.sizes:
            os.close(descriptor)
            return
        with self._lock:
            self.sizes[key] = size
            self._descriptors[key] = descriptor
        self._counted(1)
        if HeldFiles._open > self._most_open:
            self.map()

    def view(self, key: str) -> memoryview:
        """The memory of a file, one that Python would write to. Raises KeyError."""
        with self._lock:
            if key in self._descriptors:
                self.map()
            return self._views[key]

    def map(self) -> None:
        """Maps what is not mapped yet. Raises TooManyMappings."""
        with self._lock:
            if self._descriptors:
                sizes = [self.sizes[key] for key in self._descriptors]
                files = list(self._descriptors.values())
                views, memory = map_files(files, sizes, writable=self._writable)
                self._views.update(zip(self._descriptors, views, strict=True))
                self._memory.append(memory)
                self._close_descriptors()

    def content(self, key: str) -> bytes:
        """A copy of a file."""
        return self._with_file(
            key, lambda descriptor: content_of(key, descriptor, self.sizes[key]), lambda view: bytes(view)
        )

    def copy_out(self, key: str, target: memoryview) -> None:
        """Copies a file into memory, which must have its size. Raises WrongSize and KeyError."""
        self._require_size(key, target.nbytes)

        def copy(view: memoryview) -> None:
            target[:] = view

        self._with_file(key, lambda descriptor: fill(key, descriptor, target), copy)

    def copy_in(self, key: str, content: memoryview) -> None:
        """Copies memory into a file, which must have its size. Raises WrongSize and KeyError."""
        self._require_size(key, content.nbytes)

        def copy(view: memoryview) -> None:
            view[:] = content

        self._with_file(key, lambda descriptor: write(descriptor, content), copy)

    def _require_size(self, key: str, size: int) -> None:
        if self.sizes[key] != size:
            raise WrongSize.of(key, self.sizes[key], size)

    def _with_file(
        self, key: str, by_descriptor: Callable[[int], Result], by_view: Callable[[memoryview], Result]
    ) -> Result:
        """What one of the two gives; a descriptor of our own, which nobody closes meanwhile."""
        with self._lock:
            descriptor = self._descriptors.get(key)
            if descriptor is None:
                view = self._views[key]
            else:
                descriptor = os.dup(descriptor)
        if descriptor is None:
            return by_view(view)
        try:
            return by_descriptor(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Lets go of the files. Memory that somebody has a view of stays until that is gone."""
        with self._lock:
            self._close_descriptors()
            self._views.clear()

    def close_memory(self) -> None:
        """Lets go of the files and of their memory. Raises BufferError while somebody has a view of it."""
        self.close()
        if any(memory() is not None for memory in self._memory):
            raise BufferError

    def _close_descriptors(self) -> None:
        count = len(self._descriptors)
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
        self._counted(-count)

    @classmethod
    def _counted(cls, count: int) -> None:
        with cls._count:
            cls._open += count

    def __del__(self) -> None:
        self._close_descriptors()
