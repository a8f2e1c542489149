"""Every operation through the mount alone: slower, and all that there is where the socket cannot be used."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from time import monotonic
from typing import Final

from kvfs.errors import NoSuchPage
from kvfs.service.client.held_files import HeldFiles
from kvfs.service.client.keys import Keys
from kvfs.service.client.plain_files import Files, PageStat
from kvfs.service.client.runtime import Runtime

_SHORTEST_PAUSE: Final = 0.001
_LONGEST_PAUSE: Final = 0.05
"""Seconds between two looks for pages that are waited for."""


class ThroughMount:
    """Opens, renames and removes files. Each call handles its keys in order, in one thread."""

    def __init__(self, files: Files, runtime: Runtime) -> None:
        self._files = files
        self._runtime = runtime

    async def exists(self, keys: Keys) -> list[bool]:
        return await self._runtime.call(lambda: [self._files.exists(key) for key in keys])

    async def match_prefix(self, keys: Keys) -> int:
        return await self._runtime.call(lambda: sum(1 for _ in takewhile(self._files.exists, keys)))

    async def open(self, keys: Keys, wait_seconds: float) -> HeldFiles:
        """Looks again and again for what is missing: the mount does not tell when a page comes."""
        found = HeldFiles(writable=False)
        deadline = monotonic() + wait_seconds
        pause = _SHORTEST_PAUSE
        try:
            await self._runtime.call(partial(self._open, keys, found))
            while len(found.sizes) < len(set(keys)) and (left := deadline - monotonic()) > 0:
                await self._runtime.sleep(min(pause, left))
                pause = min(2 * pause, _LONGEST_PAUSE)
                await self._runtime.call(partial(self._open, keys, found))
        except BaseException:
            found.close()
            raise
        return found

    def _open(self, keys: Keys, found: HeldFiles) -> None:
        """Adds the pages that are there and not found yet."""
        for key in keys:
            if key not in found.sizes:
                with suppress(NoSuchPage):
                    descriptor = self._files.open(key)
                    found.add(key, descriptor, os.fstat(descriptor).st_size)

    async def create(self, sizes: Mapping[str, int]) -> tuple[HeldFiles, PlainDrafts]:
        return await self._runtime.call(partial(self._create, sizes))

    def _create(self, sizes: Mapping[str, int]) -> tuple[HeldFiles, PlainDrafts]:
        made = HeldFiles(writable=True)
        drafts = PlainDrafts(self._files, self._runtime)
        try:
            for key, size in sizes.items():
                drafts.temporaries[key], descriptor = self._files.create(key, size)
                made.add(key, descriptor, size)
        except BaseException:
            made.close()
            drafts.discard()
            raise
        return made, drafts

    async def put(self, key: str, content: memoryview) -> None:
        await self._runtime.call(partial(self._files.put, key, content))

    async def delete(self, keys: Keys) -> int:
        return await self._runtime.call(lambda: sum(map(self._files.delete, keys)))

    async def touch(self, keys: Keys) -> int:
        return await self._runtime.call(lambda: sum(map(self._files.touch, keys)))

    async def prefetch(self, keys: Keys) -> int:
        """Waits until they are there: the mount knows no other way."""
        return await self._runtime.call(lambda: sum(map(self._files.prefetch, keys)))

    async def pin(self, keys: Keys, pinned: bool) -> int:
        return await self._runtime.call(lambda: sum(self._files.pin(key, pinned) for key in keys))

    async def stat(self, keys: Keys) -> dict[str, PageStat]:
        found = await self._runtime.call(lambda: [(key, self._files.stat(key)) for key in keys])
        return {key: status for key, status in found if status is not None}


@dataclass(slots=True)
class PlainDrafts:
    """Files under temporary names, which a rename makes pages one after the other."""

    files: Files
    runtime: Runtime
    temporaries: dict[str, bytes] = field(default_factory=dict)

    async def commit(self) -> None:
        await self.runtime.call(self._publish)

    async def abort(self) -> None:
        await self.runtime.call(self.discard)

    def _publish(self) -> None:
        try:
            while self.temporaries:
                key, temporary = next(iter(self.temporaries.items()))
                self.files.publish(key, temporary)
                del self.temporaries[key]
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        while self.temporaries:
            self.files.discard(self.temporaries.popitem()[1])
