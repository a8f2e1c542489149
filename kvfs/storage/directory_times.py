"""When names of a directory last changed, as the mount tells it, on the SSD.

The directories there change whenever a page is copied or evicted, which no program did. So their time is kept
in an attribute, which follows the mount a little later.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import trio

from kvfs.errors import AttributeMissing, NoSuchPage, StalePage
from kvfs.index import Directory
from kvfs.tiers import ssd_following as following

if TYPE_CHECKING:
    from kvfs.storage.storage import Storage
    from kvfs.tiers.ssd import SsdTier

MTIME = "mtime"
"""Nanoseconds since 1970, in decimal."""
INTERVAL = 2.0


def recorded_ns(attributes: dict[str, bytes], otherwise_ns: int) -> int:
    """What the attributes of a directory on the SSD say of the time at which its names changed."""
    try:
        return int(attributes[MTIME])
    except (KeyError, ValueError):
        return otherwise_ns


class DirectoryTimes:
    """The directories whose time is another one than the SSD knows. Belongs to the event loop."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._changed: set[Directory] = set()
        storage.pool.directories.on_changed = self._changed.add

    async def run(self) -> None:
        """Tells the SSD now and then, for as long as the mount serves."""
        while True:
            await trio.sleep(INTERVAL)
            self.record_all()

    def record_all(self) -> None:
        pool, history = self._storage.pool, self._storage.history
        for directory in self._changed:
            with suppress(NoSuchPage, StalePage):
                text = b"%d" % pool.status(directory).st_mtime_ns
                history.append(partial(_record, self._storage.tier, directory.path(), text))
        self._changed.clear()

    async def restore_root(self) -> None:
        """Before the SSD is walked, and unless DRAM was kept: the root is there already."""
        pool, tier = self._storage.pool, self._storage.tier
        with trio.move_on_after(self._storage.io_timeout), suppress(AttributeMissing, OSError):
            text = await trio.to_thread.run_sync(tier.get_attribute, b"", MTIME, abandon_on_cancel=True)
            if not pool.index.root.children:
                time_ns = recorded_ns({MTIME: text}, pool.status(pool.index.root).st_mtime_ns)
                pool.tier.utime(b"", (time_ns, time_ns))


def _record(tier: SsdTier, path: bytes, text: bytes) -> None:
    if path:
        following.set_attribute(tier, path, MTIME, text)
    else:
        tier.set_attribute(path, MTIME, text)
