"""Whether the directory of the SSD is still there: it may be removed, moved or unmounted under the mount.

The mount has it open, so a disk that was detached (``umount -l``) is read from for as long as it answers, and
used again when it is back where it was. What was removed is gone.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from kvfs.storage.storage import Storage

log = logging.getLogger("kvfs.storage.place")

INTERVAL: Final = 1.0
"""Seconds between two looks, each of which asks the disk nothing that it does not know by heart."""


class Place:
    """Belongs to the event loop. ``problem`` is why no page is written there now, "" while all is well."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._threads = trio.CapacityLimiter(1)
        self.problem = ""

    async def run(self) -> None:
        """Looks now and then, until there is nothing left to look for."""
        while not self._storage.history.is_lost:
            await trio.sleep(INTERVAL)
            await self.look()

    async def look(self) -> None:
        tier = self._storage.tier
        with trio.move_on_after(self._storage.io_timeout):  # who reads from a disk that hangs, says so
            is_there = await trio.to_thread.run_sync(
                tier.is_in_place, limiter=self._threads, abandon_on_cancel=True
            )
            if is_there is None:
                self._storage.give_up(f"{tier.directory} was removed")
            elif not is_there and not self.problem:
                self.problem = f"{tier.directory} is not there any more: it was moved or unmounted"
                log.warning("the SSD tier takes no pages: %s", self.problem)
            elif is_there and self.problem:
                self.problem = ""
                log.info("%s is back: the SSD tier takes pages again", tier.directory)
