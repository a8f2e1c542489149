"""Pages that were opened, and drafts that were made, many at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from kvfs.errors import PageInUse
from kvfs.service.client.held_files import HeldFiles
from kvfs.service.client.runtime import Runtime

if TYPE_CHECKING:
    import torch
    from _typeshed import ReadableBuffer, WriteableBuffer


def bytes_of(buffer: ReadableBuffer) -> memoryview:
    """Any contiguous buffer as bytes; numpy arrays and the like too."""
    return memoryview(buffer).cast("B")


class Batch(Mapping[str, memoryview]):
    """Files by key. All are mapped when the first is looked at; who only copies needs no mapping. Any thread
    may use it."""

    def __init__(self, files: HeldFiles) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files.sizes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files.sizes)

    def __contains__(self, key: object) -> bool:
        return key in self._files.sizes

    def size(self, key: str) -> int:
        """In bytes."""
        return self._files.sizes[key]

    def tensor(self, key: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The bytes of a file as a tensor of one dimension that shares its memory; of uint8 unless said
        otherwise. A page is mapped for reading only: writing to its tensor ends the process."""
        import torch

        return torch.frombuffer(self._files.view(key), dtype=dtype or torch.uint8)

    def map(self) -> None:
        """Maps all files now. Raises TooManyMappings."""
        self._files.map()


class Pages(Batch):
    """Pages that are open for reading: a mapping from key to its bytes, a read-only view.

    They stay valid whatever happens to the keys, or to the daemon. Keys that were not found are in
    ``missing``, in the order in which they were asked for.
    """

    def __init__(self, files: HeldFiles, missing: Sequence[str]) -> None:
        super().__init__(files)
        self.missing = tuple(missing)

    def __getitem__(self, key: str) -> memoryview:
        return self._files.view(key).toreadonly()

    def read_into(self, key: str, buffer: WriteableBuffer) -> None:
        """Copies a page into memory of exactly its size, without a mapping. Other threads run meanwhile."""
        self._files.copy_out(key, bytes_of(buffer))

    def close(self) -> None:
        """Lets go of the pages. What somebody has a view of stays until that is gone."""
        self._files.close()

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

    def __init__(self, files: HeldFiles, unpublished: Unpublished, runtime: Runtime) -> None:
        super().__init__(files)
        self._unpublished = unpublished
        self._runtime = runtime
        self.is_open = True

    def __getitem__(self, key: str) -> memoryview:
        return self._files.view(key)

    def write(self, key: str, data: ReadableBuffer) -> None:
        """Copies a whole page into its draft, without a mapping: faster where the bytes lie in one piece."""
        self._files.copy_in(key, bytes_of(data))

    async def _publish(self) -> None:
        if not self.is_open:
            raise ValueError("the batch was committed or aborted before: create another one")
        try:
            self._files.close_memory()
        except BufferError:
            raise PageInUse(
                "views or tensors of the drafts are still held, through which the pages could be changed "
                "later: delete them, then commit again"
            ) from None
        self.is_open = False
        await self._unpublished.commit()

    async def _discard(self) -> None:
        if self.is_open:
            self.is_open = False
            self._files.close()
            await self._runtime.shield(self._unpublished.abort())
