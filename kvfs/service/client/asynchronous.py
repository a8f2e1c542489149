"""The client for programs with an event loop: the same calls with ``await``."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from kvfs.service.client.core import Core
from kvfs.service.client.pages import DraftBatch


class AsyncDrafts(DraftBatch):
    """Drafts whose block commits them at its end, or aborts them where it is left by an exception."""

    async def commit(self) -> None:
        """Makes all drafts pages, visible to everybody. Raises PageInUse while views or tensors are held."""
        await self._publish()

    async def abort(self) -> None:
        """Drops them."""
        await self._discard()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            await self._discard()
        elif self.is_open:
            await self._publish()


class AsyncClient(Core):
    """One mount, for the tasks of one event loop."""

    async def create_batch(self, sizes: Mapping[str, int]) -> AsyncDrafts:
        """Drafts of these sizes in bytes, to be written to and then committed together. Errors as ``put``."""
        return AsyncDrafts(*await self.create(sizes))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
