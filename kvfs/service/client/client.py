"""The client for programs without an event loop."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

from kvfs.service.client.core import Core
from kvfs.service.client.keys import Keys
from kvfs.service.client.pages import DraftBatch, Pages
from kvfs.service.client.plain_files import PageStat
from kvfs.service.client.runtime import finish

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer


class Drafts(DraftBatch):
    """Drafts whose block commits them at its end, or aborts them where it is left by an exception."""

    def commit(self) -> None:
        """Makes all drafts pages, visible to everybody. Raises PageInUse while views or tensors are held."""
        finish(self._publish())

    def abort(self) -> None:
        """Drops them."""
        finish(self._discard())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort()
        elif self.is_open:
            self.commit()


class Client:
    """One mount, for any number of threads. A forked child has a connection of its own.

    The calls are those of ``Core``, which says what each does and raises.
    """

    def __init__(self, core: Core) -> None:
        self._core = core

    @property
    def mountpoint(self) -> Path:
        return self._core.mountpoint

    def put(self, key: str, data: ReadableBuffer) -> None:
        finish(self._core.put(key, data))

    def get(self, key: str) -> bytes:
        return finish(self._core.get(key))

    def get_into(self, key: str, buffer: WriteableBuffer) -> int:
        return finish(self._core.get_into(key, buffer))

    @overload
    def exists(self, keys: str) -> bool: ...

    @overload
    def exists(self, keys: Keys) -> list[bool]: ...

    def exists(self, keys: str | Keys) -> bool | list[bool]:
        asked: Coroutine[Any, Any, bool | list[bool]] = self._core.exists(keys)
        return finish(asked)

    def match_prefix(self, keys: Keys) -> int:
        return finish(self._core.match_prefix(keys))

    def open_batch(self, keys: Keys, wait_seconds: float = 0.0) -> Pages:
        return finish(self._core.open_batch(keys, wait_seconds))

    def create_batch(self, sizes: Mapping[str, int]) -> Drafts:
        """Drafts of these sizes in bytes, to be written to and then committed together. Errors as ``put``."""
        return Drafts(*finish(self._core.create(sizes)))

    def delete(self, keys: Keys) -> int:
        return finish(self._core.delete(keys))

    def prefetch(self, keys: Keys) -> int:
        return finish(self._core.prefetch(keys))

    def touch(self, keys: Keys) -> int:
        return finish(self._core.touch(keys))

    def pin(self, keys: Keys) -> int:
        return finish(self._core.pin(keys))

    def unpin(self, keys: Keys) -> int:
        return finish(self._core.unpin(keys))

    @overload
    def stat(self, keys: str) -> PageStat: ...

    @overload
    def stat(self, keys: Keys) -> dict[str, PageStat]: ...

    def stat(self, keys: str | Keys) -> PageStat | dict[str, PageStat]:
        asked: Coroutine[Any, Any, PageStat | dict[str, PageStat]] = self._core.stat(keys)
        return finish(asked)

    def close(self) -> None:
        finish(self._core.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
