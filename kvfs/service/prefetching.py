"""Pages that somebody will want soon: brought into DRAM in the background, within limits."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from kvfs.counters import LimitedLog
from kvfs.errors import Busy, KvfsError, StalePage
from kvfs.index import SEALED, Entry
from kvfs.service.messages import DONE

if TYPE_CHECKING:
    from kvfs.opening import Openings

log = logging.getLogger("kvfs.service.prefetching")

MOST_WAITING = 1024
WORKERS = 2
"""Of the threads that read pages, some are left to those who wait for them."""
EXPIRY_SECONDS = 30.0
"""What could not be begun by then is not what anybody needs next."""


class Prefetches:
    """What is to be brought up, in the order in which it was asked for. Belongs to the event loop."""

    def __init__(self, openings: Openings) -> None:
        self._openings = openings
        self._waiting: dict[Entry, float] = {}
        """Until when (trio's clock) each may begin."""
        self._asked = trio.Event()
        self._log = LimitedLog(log)
        self.done = 0
        self.expired = 0
        self.refused = 0

    def add(self, entry: Entry) -> int:
        """Notes a page; a code for its client."""
        if entry.state == SEALED or entry in self._waiting:
            return DONE
        if len(self._waiting) >= MOST_WAITING:
            self.refused += 1
            return Busy.errno
        self._waiting[entry] = trio.current_time() + EXPIRY_SECONDS
        self._asked.set()
        return DONE

    async def run(self) -> None:
        """For as long as the service serves."""
        async with trio.open_nursery() as nursery:
            for _ in range(WORKERS):
                nursery.start_soon(self._work)

    async def _work(self) -> None:
        while True:
            while not self._waiting:
                self._asked = trio.Event()
                await self._asked.wait()
            entry = next(iter(self._waiting))
            if self._waiting.pop(entry) < trio.current_time():
                self.expired += 1
                continue
            await self._bring(entry)

    async def _bring(self, entry: Entry) -> None:
        """Nobody waits for it, so no failure is anybody's."""
        try:
            await self._openings.make_readable(entry)
            self.done += 1
        except StalePage:
            await trio.lowlevel.checkpoint()
        except (KvfsError, OSError) as error:
            self._log.warning("prefetch", f"a page could not be brought into DRAM ahead of time: {error}")
        except Exception as error:
            self._log.warning("bug", "a page could not be brought into DRAM ahead of time", error)

    def statistics(self) -> dict[str, int]:
        """For status."""
        return {
            "waiting": len(self._waiting),
            "done": self.done,
            "expired": self.expired,
            "refused": self.refused,
        }
