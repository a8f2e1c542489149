"""Names under which DRAM and the SSD have different pages at the start, after a daemon that was killed.

DRAM is right. What the SSD has under such a name was overwritten, or was moved by a change that the SSD has
not followed: then it is the copy of a page that DRAM has under another name, and is moved there. Were it
removed, the page would be lost if DRAM went too, before all is copied again.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import trio

from kvfs.errors import AttributeMissing
from kvfs.index import SEALED, UNCHECKED, Entry
from kvfs.page import DIGEST, Digest
from kvfs.storage.described import RESIDENT
from kvfs.syscalls import RENAME_EXCHANGE

if TYPE_CHECKING:
    from kvfs.storage.storage import Storage

BATCH: Final = 64
"""Pages that are asked for their digest between two turns of the event loop."""


class Conflicts:
    """Belongs to the event loop."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._digests: dict[bytes, Digest] = {}
        """Of what the SSD has under each name."""
        self._copies: list[tuple[Entry, bytes]] = []
        """Pages with several names, and the one under which the SSD has each."""

    def add(self, path: bytes, digest: Digest) -> None:
        self._digests[path] = digest

    def digest(self, entry: Entry) -> Digest | None:
        """Of a page in DRAM."""
        if entry.state in (SEALED, UNCHECKED) and entry.parent is not None:
            with suppress(AttributeMissing, FileNotFoundError, ValueError):
                return Digest.parse(self._storage.pool.tier.get_attribute(entry.path(), DIGEST))
        return None

    def has_copy(self, entry: Entry, path: bytes) -> None:
        """The SSD has a page of DRAM under one of its names."""
        entry.stored = RESIDENT
        if entry.links:
            self._copies.append((entry, path))

    def forget(self, path: bytes) -> None:
        """The name means something else by now."""
        self._digests.pop(path, None)

    async def resolve(self) -> bool:
        """Moves each copy to the page that it is of, and removes all others. False, and nothing is done,
        where names have changed meanwhile."""
        lacking = await self._lacking() if self._digests else {}
        if self._storage.history.named:
            return False
        while self._digests:
            path, digest = self._digests.popitem()
            entry = lacking.pop(digest, None)
            if entry is None or entry.stored is not None or self.digest(entry) != digest:
                self._storage.history.unlink(path)
            else:
                self._move(path, entry)
        self._link()
        return True

    def drop(self, changed: Iterable[bytes]) -> None:
        """Removes what the SSD has under names with different pages, and under those that have changed: what
        DRAM has is copied again."""
        for path in [*changed, *self._digests]:
            entry = self._storage.pool.index.find(path)
            if entry is None or entry.stored is None:
                self._storage.history.unlink(path)
        self._digests.clear()
        self._link()

    async def _lacking(self) -> dict[Digest, Entry]:
        """Pages in DRAM without a copy, by their digest."""
        lacking = {}
        pool = self._storage.pool
        pages = [entry for entry in pool.index.entries() if entry.stored is None and entry in pool.policy]
        for number, entry in enumerate(pages, 1):
            if entry.stored is None and (digest := self.digest(entry)) is not None:
                lacking[digest] = entry
            if number % BATCH == 0:
                await trio.lowlevel.checkpoint()
        return lacking

    def _move(self, path: bytes, entry: Entry) -> None:
        history, paths = self._storage.history, _paths(entry)
        new = path if path in paths else paths[0]
        if new != path and (other := self._digests.pop(new, None)) is not None:
            history.rename(path, new, RENAME_EXCHANGE)
            self._digests[path] = other
        elif new != path:
            history.rename(path, new, 0)
        self.has_copy(entry, new)

    def _link(self) -> None:
        """The SSD may not have followed all links before a crash, and a page is asked for by any name.
        What lay there until now has been moved."""
        for entry, path in self._copies:
            if entry.stored == RESIDENT:
                for other in _paths(entry):
                    if other != path:
                        self._storage.history.link(path, other)
        self._copies.clear()


def _paths(entry: Entry) -> list[bytes]:
    return [parent.child_path(name) for parent, name in entry.names()]
