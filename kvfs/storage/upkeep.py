"""Looking after the SSD while it is in use: what is left over there, and counting it anew.

The mount serves meanwhile. Who asks waits no longer than for any other answer of the disk, as long as it gets
on.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeVar

import trio

from kvfs.storage.set_aside import copies_were_set_aside
from kvfs.tiers.ssd_leftovers import Leftover, delete_temporaries, find_foreign, find_temporaries
from kvfs.tiers.ssd_scan import PAUSE, Findings, Stored, scan_in_background

if TYPE_CHECKING:
    from kvfs.pool import Pool
    from kvfs.storage.storage import Storage

log = logging.getLogger("kvfs.storage.upkeep")

BATCH: Final = 512
"""Files that are looked at between two turns of the event loop."""
MOST_LISTED: Final = 1000
"""Files of each kind that are named; all are counted."""

Answer = TypeVar("Answer")


@dataclass(eq=False)
class _Count:
    """A walk under way. ``batches`` grow as long as it gets on; ``findings`` and ``error`` are its end."""

    batches: int = 0
    done: trio.Event = field(default_factory=trio.Event)
    findings: Findings = field(default_factory=Findings)
    error: Exception | None = None

    def note(self, _batch: list[Stored]) -> None:
        self.batches += 1


class Upkeep:
    """Belongs to the event loop."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._threads = trio.CapacityLimiter(1)
        self._count: _Count | None = None

    # What is left over

    async def leftovers(self) -> dict[str, Any]:
        """What is left over: how many of each kind, how large, and which. Sizes in bytes, ages in seconds,
        paths as os.fsdecode gives them.

        Raises TimedOut, and OSError where the disk fails.
        """
        tier = self._storage.tier
        temporaries = await self._in_thread(lambda: find_temporaries(tier))
        quarantined = await self._in_thread(tier.list_quarantined)
        foreign = await self._find_foreign()
        return {
            "directory": str(tier.directory),
            "temporaries": _kind([_row(one.path, one.size, one.since_ns) for one in temporaries]),
            "quarantine": _kind(
                [_row(one.path, one.size, one.since_ns, reason=one.reason) for one in quarantined]
            ),
            "foreign": _kind([_row(one.path, one.size, one.since_ns) for one in foreign]),
        }

    async def _find_foreign(self) -> list[Leftover]:
        walk = find_foreign(self._storage.tier)
        found: list[Leftover] = []
        while batch := await self._in_thread(lambda: list(islice(walk, BATCH))):
            found += [one for one in batch if one is not None]
            await trio.sleep(PAUSE)
        return found

    async def delete_leftovers(self) -> None:
        """Deletes the temporaries and the quarantine. Raises as ``leftovers``."""
        tier = self._storage.tier
        await self._in_thread(lambda: delete_temporaries(tier))
        await self._in_thread(lambda: tier.shrink_quarantine(0))

    async def _in_thread(self, work: Callable[[], Answer]) -> Answer:
        storage = self._storage
        storage.health.require(trio.current_time())
        with trio.move_on_after(storage.io_timeout):
            answer = await trio.to_thread.run_sync(work, limiter=self._threads, abandon_on_cancel=True)
            storage.succeeded()
            return answer
        raise storage.failed(f"it was not looked through within {storage.io_timeout:g} s")

    # Counting anew

    async def recount(self) -> Findings:
        """Counts everything on the SSD anew, and sets aside what is plainly damaged. Who asks while that is
        being done gets the same answer.

        Raises TimedOut where the walk does not get on, and OSError where the disk fails.
        """
        storage = self._storage
        await storage.walked.wait()
        storage.health.require(trio.current_time())
        if self._count is None:
            self._count = _Count()
            storage.nursery.start_soon(self._run, self._count)
        count, seen = self._count, -1
        while not count.done.is_set():
            if seen == count.batches:
                raise storage.failed(f"counting it found nothing new for {storage.io_timeout:g} s")
            seen = count.batches
            with trio.move_on_after(storage.io_timeout):
                await count.done.wait()
        if count.error is not None:
            raise count.error
        return count.findings

    async def _run(self, count: _Count) -> None:
        """The walk, of which no failure may end the mount."""
        try:
            set_aside = partial(copies_were_set_aside, self._storage)
            count.findings = await scan_in_background(self._storage.tier, count.note, set_aside)
            log.info("the SSD tier was counted anew: %d bytes too many before", count.findings.drift_bytes)
            self._storage.succeeded()
        except Exception as error:
            count.error = error
        finally:
            self._count = None
            count.done.set()


async def leftovers_text(pool: Pool) -> bytes:
    """The content of .kvfs/leftovers: JSON, in which "ssd" is null without an SSD tier."""
    found = None if pool.storage is None else await pool.storage.upkeep.leftovers()
    return (json.dumps({"ssd": found, "expired": pool.lifetimes.expired()}, indent=2) + "\n").encode()


def _row(path: bytes, size: int, since_ns: int, **more: str) -> dict[str, Any]:
    age = max(0.0, round((time.time_ns() - since_ns) / 1e9, 1))
    return {"path": path.decode(errors="surrogateescape"), **more, "bytes": size, "age_seconds": age}


def _kind(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "count": len(rows),
        "bytes": sum(row["bytes"] for row in rows),
        "files": list(rows[:MOST_LISTED]),
    }
