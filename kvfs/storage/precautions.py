"""What must be true on the SSD before something happens in DRAM.

The SSD follows the mount a little later. If the daemon is killed in between, the next one finds in DRAM what
the mount was, and on the SSD what it was a moment before; of two pages of one name it takes that of DRAM, for
the other is normally what was overwritten. It must never be a page that only had the name before. So

- a name that a page has left which only the SSD has is given to nothing else until that has followed
  (`History.vacated`);
- a page stays in DRAM until the SSD has it under the names that it has now;
- a page that only the SSD has comes to DRAM before it exchanges names with one that DRAM has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfs.errors import NotSupported
from kvfs.index import STORED, Directory, Entry

if TYPE_CHECKING:
    from kvfs.storage.storage import Storage


class Precautions:
    """Belongs to the event loop. While the SSD does not follow, those who cannot wait go on without."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    async def before_leaving_dram(self, entry: Entry) -> None:
        """Waits until a page may be evicted. Raises TierFailed where the SSD does not follow."""
        for parent, name in list(entry.names()):
            await self._storage.history.followed(parent.child_path(name))

    def may_leave_dram(self, entry: Entry) -> bool:
        """Whether a page may be evicted now, for all that the SSD has of it."""
        history = self._storage.history
        if entry.stored is None or history.failure:
            return True
        return not any(history.concerns(parent.child_path(name)) for parent, name in entry.names())

    async def before_writing_anew(self, entry: Entry) -> None:
        """Waits until a page that only the SSD has may be a draft in DRAM. Raises TierFailed."""
        for parent, name in list(entry.names()):
            await self._storage.history.vacated(parent.child_path(name))

    async def before_exchange(self, one: Entry | None, other: Entry | None) -> None:
        """Waits until two names may be exchanged. Raises NotSupported for directories with pages that only
        the SSD has, and what promoting raises."""
        pair = [entry for entry in (one, other) if entry is not None]
        for entry in pair:
            if isinstance(entry, Directory) and any(below.state == STORED for below in entry.below()):
                raise NotSupported("directories with pages that only the SSD has are not exchanged")
        if any(entry.state != STORED for entry in pair):
            for entry in pair:
                await self._storage.promotions.promote(entry)
