"""The operations of the client, written once for all that can run them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, overload

from kvfs.errors import NoSuchPage, UsageError
from kvfs.service.client.held_files import HeldFiles
from kvfs.service.client.keys import Keys
from kvfs.service.client.pages import Pages, Unpublished, bytes_of
from kvfs.service.client.plain_files import Files, PageStat
from kvfs.service.client.runtime import Runtime
from kvfs.service.client.through_mount import ThroughMount

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer


class Core:
    """What a client can do on one mount. Every coroutine waits through the runtime only."""

    def __init__(self, mountpoint: Path, runtime: Runtime) -> None:
        self.mountpoint = mountpoint
        self._runtime = runtime
        self._files = Files(os.fspath(mountpoint))
        self._mount = ThroughMount(self._files, runtime)

    async def put(self, key: str, data: ReadableBuffer) -> None:
        """Stores a page, whole or not at all; one that has the key is replaced, whoever reads it keeps it.

        Raises UsageError where there are no bytes, OutOfRoom, FileTooLarge above half of the pool, and
        NotPermitted.
        """
        content = bytes_of(data)
        if not content.nbytes:
            raise UsageError(f"{key!r} has no bytes: an empty file is no page")
        await self._mount.put(key, content)

    async def get(self, key: str) -> bytes:
        """The bytes of a page. Raises NoSuchPage, which for a cache is a miss."""
        return await self._runtime.call(lambda: self._files.read(key))

    async def get_into(self, key: str, buffer: WriteableBuffer) -> int:
        """Copies a page into writable memory of exactly its size; gives its size in bytes.

        Raises NoSuchPage, and WrongSize where the page has another size: the memory then holds any bytes.
        """
        target = bytes_of(buffer)
        return await self._runtime.call(lambda: self._files.read_into(key, target))

    @overload
    async def exists(self, keys: str) -> bool: ...

    @overload
    async def exists(self, keys: Keys) -> list[bool]: ...

    async def exists(self, keys: str | Keys) -> bool | list[bool]:
        """Whether there is such a page; of several keys, for each in order."""
        if isinstance(keys, str):
            return (await self._mount.exists([keys]))[0]
        return await self._mount.exists(keys)

    async def match_prefix(self, keys: Keys) -> int:
        """How many of the keys, from the first on, have pages without a gap."""
        return await self._mount.match_prefix(_several(keys))

    async def open_batch(self, keys: Keys, wait_seconds: float = 0.0) -> Pages:
        """Opens many pages at once, those that are there. Pages that come within ``wait_seconds``, from
        a disk or from whoever makes them, are there too."""
        files = await self._mount.open(_several(keys), wait_seconds)
        return Pages(files, [key for key in keys if key not in files.sizes])

    async def create(self, sizes: Mapping[str, int]) -> tuple[HeldFiles, Unpublished, Runtime]:
        """What ``DraftBatch`` is made of. Errors as ``put``."""
        for key, size in sizes.items():
            if size < 1:
                raise UsageError(f"{key!r} was to have {size} bytes: a page has at least one")
        files, unpublished = await self._mount.create(sizes)
        return files, unpublished, self._runtime

    async def delete(self, keys: Keys) -> int:
        """Removes pages; gives how many there were. Whoever reads one keeps it."""
        return await self._mount.delete(_several(keys))

    async def prefetch(self, keys: Keys) -> int:
        """Has pages brought from the SSD into DRAM; gives how many there are."""
        return await self._mount.prefetch(_several(keys))

    async def touch(self, keys: Keys) -> int:
        """Uses pages, so that they are evicted later; gives how many there are."""
        return await self._mount.touch(_several(keys))

    async def pin(self, keys: Keys) -> int:
        """Keeps pages in DRAM until ``unpin``; gives how many there are. Raises TooManyPins."""
        return await self._mount.pin(_several(keys), True)

    async def unpin(self, keys: Keys) -> int:
        """Lets pages be evicted again; gives how many there are."""
        return await self._mount.pin(_several(keys), False)

    @overload
    async def stat(self, keys: str) -> PageStat: ...

    @overload
    async def stat(self, keys: Keys) -> dict[str, PageStat]: ...

    async def stat(self, keys: str | Keys) -> PageStat | dict[str, PageStat]:
        """What is known of a page; NoSuchPage where there is none. Of several keys, of those there are."""
        if not isinstance(keys, str):
            return await self._mount.stat(keys)
        found = await self._mount.stat([keys])
        if keys not in found:
            raise NoSuchPage(f"{keys!r} is not on {self.mountpoint}")
        return found[keys]

    async def close(self) -> None:
        """Lets go of the connection. Pages stay valid; drafts that were not committed go."""


def _several(keys: Keys | str) -> Keys:
    if isinstance(keys, str):
        raise UsageError(f"{keys!r} is one key: give a list of keys")
    return keys
