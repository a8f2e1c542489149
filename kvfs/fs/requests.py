"""What programs ask of a page, or of the whole mount, through attributes that no listing shows.

Of a file:
- user.kvfs.verify: getting it compares each copy with the digest, and gives "dram=ok ssd=bytes" or "draft";
  setting it to "repair" takes away what is damaged.
- user.kvfs.prefetch: getting it brings the page into DRAM, and gives "dram".
- user.kvfs.evict: setting it to "1" lets the page leave DRAM.

Of the root of the mount:
- user.kvfs.verify: setting it to "recount" counts what is on the SSD anew.
- user.kvfs.leftovers: setting it to "delete" deletes temporaries and quarantine on the SSD.

The kernel lets those get an attribute who may read the file, and those set one who may write to it. What is
set here takes something away, and is left to the owner of the file and to root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvfs.errors import AttributeMissing, NotPermitted, NotSupported, StalePage, UsageError
from kvfs.fs.attributes import OWN
from kvfs.verification import Verifier

if TYPE_CHECKING:
    from kvfs.index import Entry
    from kvfs.pool import Pool

VERIFY: Final = OWN + "verify"
EVICT: Final = OWN + "evict"
PREFETCH: Final = OWN + "prefetch"
LEFTOVERS: Final = OWN + "leftovers"
NAMES: Final = frozenset((VERIFY, EVICT, PREFETCH, LEFTOVERS))
"""The attributes; `kvfs.fs.attributes` has all others."""


class Requests:
    """Answers them; belongs to the event loop."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._verifier = Verifier(pool)

    async def get(self, entry: Entry, name: str) -> bytes:
        """Raises AttributeMissing for what can only be set, and StalePage for a page that was removed."""
        self._require_name(entry)
        if entry.is_file and name == VERIFY:
            found = await self._verifier.verify(entry)
            words = [f"{tier}={reason}" for tier, reason in found.items()] or ["draft"]
            return " ".join(words).encode()
        if entry.is_file and name == PREFETCH:
            if self._pool.storage is not None:
                await self._pool.storage.promotions.promote(entry)
            return self._pool.tier.name.encode()
        raise AttributeMissing(name)

    async def set(self, entry: Entry, name: str, value: bytes, uid: int) -> None:
        """Raises NotPermitted, UsageError for a request that means nothing, NotSupported for one that needs
        an SSD tier where there is none, and StalePage for a page that was removed."""
        self._require_name(entry)
        if uid not in (0, entry.owner.uid):
            raise NotPermitted(f"{name} is left to the owner of the file, and to root")
        request = (name, value)
        if entry.is_file and request == (VERIFY, b"repair"):
            await self._verifier.repair(entry)
        elif entry.is_file and request == (EVICT, b"1"):
            await self._pool.evictor.evict(entry)
        elif entry is self._pool.index.root and request in ((VERIFY, b"recount"), (LEFTOVERS, b"delete")):
            storage = self._pool.storage
            if storage is None:
                raise NotSupported("there is no SSD tier")
            if name == VERIFY:
                await storage.upkeep.recount()
            else:
                await storage.upkeep.delete_leftovers()
        else:
            raise UsageError(f"{name} cannot be set to {value!r} here")

    def _require_name(self, entry: Entry) -> None:
        """The kernel, told that a file is stale, looks its name up again: it may be that of another one."""
        if entry.parent is None and entry is not self._pool.index.root:
            raise StalePage("the file was removed")
