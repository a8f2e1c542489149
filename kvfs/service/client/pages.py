"""Pages that were opened, and drafts that were made, many at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from kvfs.errors import PageInUse, WrongSize
from kvfs.service.client.mapping import MappedFiles
from kvfs.service.client.plain_files import fill, write
from kvfs.service.client.runtime import Runtime

if TYPE_CHECKING:
    import torch
    from _typeshed import ReadableBuffer, WriteableBuffer


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A descriptor, and the size of its file in bytes."""

    descriptor: int
    size: int


def bytes_of(buffer: ReadableBuffer) -> memoryview:
    """Any contiguous buffer as bytes; numpy arrays and the like too."""
    return memoryview(buffer).cast("B")


class Batch(Mapping[str, memoryview]):
    """Files by key. They are mapped when the first is looked at, all at once, and their descriptors closed;
    who only copies needs no mapping. Any thread may use it."""

    _writable = False

    def __init__(self, files: Mapping[str, OpenFile], closed: Callable[[int], None] | None = None) -> None:
        self._sizes = {key: file.size for key, file in files.items()}
        self._descriptors = {key: file.descriptor for key, file in files.items()}
        self._closed = closed
        self._mapped: MappedFiles | None = None
        self._views: dict[str, memoryview] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def __getitem__(self, key: str) -> memoryview:
        view = self._writable_view(key)
        return view if self._writable else view.toreadonly()

    def size(self, key: str) -> int:
        """In bytes."""
        return self._sizes[key]

    def tensor(self, key: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The bytes of a file as a tensor of one dimension that shares its memory; of uint8 unless said
        otherwise. A page is mapped for reading only: writing to its tensor ends the process."""
        import torch

        return torch.frombuffer(self._writable_view(key), dtype=dtype or torch.uint8)

    def _writable_view(self, key: str) -> memoryview:
        if key not in self._sizes:
            raise KeyError(key)
        with self._lock:
            if self._mapped is None:
                self._map()
            return self._views[key]

    def map(self) -> None:
        """Maps all files now, and closes their descriptors."""
        with self._lock:
            if self._mapped is None:
                self._map()

    def _map(self) -> None:
        if len(self._descriptors) < len(self._sizes):
            raise ValueError("the batch is closed")
        files = list(self._descriptors.values())
        self._mapped = MappedFiles(files, list(self._sizes.values()), writable=self._writable)
        self._views = dict(zip(self._sizes, self._mapped.views, strict=True))
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        count = len(self._descriptors)
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
        if count and self._closed is not None:
            self._closed(count)

    def __del__(self) -> None:
        self._close_descriptors()


class Pages(Batch):
    """Pages that are open for reading: a mapping from key to its bytes, a read-only view.

    They stay valid whatever happens to the keys, or to the daemon. Keys that were not found are in
    ``missing``, in the order in which they were asked for.
    """

    def __init__(
        self,
        files: Mapping[str, OpenFile],
        missing: Sequence[str],
        closed: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(files, closed)
        self.missing = tuple(missing)

    def read_into(self, key: str, buffer: WriteableBuffer) -> int:
        """Copies a page into memory of exactly its size, in bytes, which is returned. Without a mapping,
        which costs more than it saves for bytes that are needed once. Other threads run meanwhile."""
        target = bytes_of(buffer)
        with self._lock:
            descriptor = None if self._mapped is not None else os.dup(self._descriptors[key])
        if descriptor is None:
            view = self._views[key]
            if view.nbytes != target.nbytes:
                raise WrongSize.of(key, view.nbytes, target.nbytes)
            target[:] = view
            return target.nbytes
        try:
            return fill(key, descriptor, target)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Lets go of the pages. What somebody has a view of stays until that is gone."""
        with self._lock:
            self._views.clear()
            self._mapped = None
            self._close_descriptors()
            self._sizes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Unpublished(Protocol):
    """How drafts become pages, or go."""

    async def commit(self) -> None: ...

    async def abort(self) -> None: ...


class DraftBatch(Batch):
    """Drafts: writable memory by key, which nobody else sees. What was written to them becomes pages under
    their keys, all together, or nothing does."""

    _writable = True

    def __init__(
        self,
        files: Mapping[str, OpenFile],
        unpublished: Unpublished,
        runtime: Runtime,
        closed: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(files, closed)
        self._unpublished = unpublished
        self._runtime = runtime
        self.is_open = True

    def write(self, key: str, data: ReadableBuffer) -> None:
        """Copies a whole page into its draft, without a mapping: faster where the bytes lie in one piece."""
        content = bytes_of(data)
        if content.nbytes != self._sizes[key]:
            raise WrongSize.of(key, content.nbytes, self._sizes[key])
        with self._lock:
            descriptor = None if self._mapped is not None else os.dup(self._descriptors[key])
        if descriptor is None:
            self._views[key][:] = content
            return
        try:
            write(descriptor, content)
        finally:
            os.close(descriptor)

    async def _publish(self) -> None:
        """Raises PageInUse where somebody has views or tensors of the drafts: through them the pages could
        change later. Let go of them, and commit again."""
        self._require_open()
        self._let_go()
        self.is_open = False
        await self._unpublished.commit()

    async def _discard(self) -> None:
        """Views of the drafts may live on; nobody will see what is written to them."""
        if self.is_open:
            self.is_open = False
            with self._lock:
                self._views.clear()
                self._mapped = None
                self._close_descriptors()
            await self._runtime.shield(self._unpublished.abort())

    def _require_open(self) -> None:
        if not self.is_open:
            raise ValueError("the batch was committed or aborted before: create another one")

    def _let_go(self) -> None:
        with self._lock:
            self._close_descriptors()
            if self._mapped is not None:
                self._views.clear()
                try:
                    self._mapped.close()
                except BufferError:
                    raise PageInUse(
                        "views or tensors of the drafts are still held, through which the pages could be "
                        "changed later: delete them, then commit"
                    ) from None
                self._mapped = None
