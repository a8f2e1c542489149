"""Which pages were used and not yet noted on the SSD: hit counts and recency that outlive the process. Pure.

The filesystem's own access times cannot serve: mounts have noatime or relatime, and hits are served from DRAM
without the disk hearing of it. So the time of the last use is written as the file's access time and the hits
into its record, later and in batches: at most BATCH pages every INTERVAL, whatever happens, which is 34 small
writes a second. The pages used last go first; where there are more than can ever be written, those used
longest ago are forgotten. A process that is killed loses the uses since the last batch, and a clean stop none
of those that are waiting.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, Generic, NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)

INTERVAL: Final = 30.0
"""Seconds."""
BATCH: Final = 1024
LIMIT: Final = 1 << 16


class Use(NamedTuple):
    """What is noted: the hits of a page so far, and when it was used last, in nanoseconds since 1970."""

    path: bytes
    hits: int
    used_ns: int


class Uses(Generic[Key]):
    """Keys are whatever the caller knows pages by; they become paths when they are taken. The caller gives
    the time, in seconds of any clock that only goes forward."""

    def __init__(self, interval: float = INTERVAL, batch: int = BATCH, limit: int = LIMIT) -> None:
        self._interval = interval
        self._batch = batch
        self._limit = limit
        self._next = 0.0
        self._used: OrderedDict[Key, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used)

    def note(self, key: Key, used_ns: int) -> None:
        """A page was used."""
        self._used[key] = used_ns
        self._used.move_to_end(key)
        if len(self._used) > self._limit:
            self._used.popitem(last=False)

    def forget(self, key: Key) -> None:
        """A page is gone."""
        self._used.pop(key, None)

    def take(self, now: float) -> list[tuple[Key, int]]:
        """What is to be noted now, with the times of use; nothing before the interval is over."""
        if now < self._next or not self._used:
            return []
        self._next = now + self._interval
        return self._take(self._batch)

    def take_all(self) -> list[tuple[Key, int]]:
        """Everything, for a clean stop."""
        return self._take(len(self._used))

    def _take(self, count: int) -> list[tuple[Key, int]]:
        return [self._used.popitem() for _ in range(min(count, len(self._used)))]
