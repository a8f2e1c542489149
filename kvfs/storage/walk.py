"""The walk over the SSD at the start, and what is answered until it is over."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

import trio

from kvfs.errors import TierFailed, TimedOut
from kvfs.index import Directory, Entry
from kvfs.storage.adoption import Adoption, look

if TYPE_CHECKING:
    from kvfs.storage.storage import Storage

STALLED_SECONDS: Final = 2.0
"""A walk that finds nothing for so long lets nobody wait who wants to see what there is."""


class Walk:
    """Belongs to the event loop. ``Storage.walked`` is set when it is over."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._adoption = Adoption(storage)

    def begin(self, nursery: trio.Nursery) -> None:
        self._adoption.progressed = trio.current_time()
        nursery.start_soon(self._run)

    async def _run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, nursery.cancel_scope)
            await self._storage.directory_times.restore_root()
            await self._adoption.run()
            nursery.cancel_scope.cancel()
        self._end()

    def _end(self) -> None:
        """Nobody waits for it any more."""
        storage = self._storage
        if not storage.walked.is_set():
            storage.walked.set()
            storage.rewritten.clear()
            storage.history.walked()
            storage.on_walked()

    async def _watch(self, walk: trio.CancelScope) -> None:
        """Nobody waits for a disk that does not answer."""
        storage, seen = self._storage, -1
        while seen != self._adoption.found:
            seen = self._adoption.found
            await trio.sleep(storage.io_timeout)
            if self._adoption.is_scanned:
                return
        storage.give_up(f"a walk over it found nothing new for {storage.io_timeout:g} s")
        walk.cancel()
        self._end()  # its thread may never come back

    async def find(self, directory: Directory, name: bytes) -> Entry | None:
        """What the SSD has under a name that the index does not know, while it is being walked."""
        storage = self._storage
        if storage.walked.is_set() or storage.history.is_lost:
            return None
        path = directory.child_path(name)
        # A disk that fails has nothing for now, and what is made meanwhile is newer than what it may have.
        with suppress(OSError, TierFailed, TimedOut):
            await storage.history.followed(path)
            found = await storage.in_thread(lambda path: look(storage.tier, path), path)
            if found is not None and name not in directory.children:
                self._adoption.adopt([found])
        return directory.children.get(name)

    async def listable(self) -> None:
        """Waits until all names are known, for as long as the walk gets on."""
        walked = self._storage.walked
        while not walked.is_set():
            left = self._adoption.progressed + STALLED_SECONDS - trio.current_time()
            if left <= 0:
                return
            with trio.move_on_after(left):
                await walked.wait()
