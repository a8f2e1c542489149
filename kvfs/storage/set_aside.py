"""What becomes of pages whose copies a walk over the SSD found damaged and set aside."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvfs.errors import NoSuchPage
from kvfs.index import STORED, Entry

if TYPE_CHECKING:
    from kvfs.storage.storage import Storage
    from kvfs.tiers.ssd import SsdTier


def copies_were_set_aside(storage: Storage, paths: list[bytes]) -> None:
    """Each is a miss. A page that was known to be there goes, unless DRAM has it: then it is copied again.

    Names may have moved, and pages been stored again, since the walk saw them. So whether there is a copy is
    looked at in the order of the history.
    """
    for path in paths:
        storage.pool.counters.misses["corrupt"] += 1
        entry = storage.pool.index.find(path)
        if entry is not None and entry.stored is not None:
            storage.history.append(partial(_require, storage.tier, path), partial(_looked, storage, entry))


def _require(tier: SsdTier, path: bytes) -> None:
    try:
        tier.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise NoSuchPage("the copy was set aside") from None


def _looked(storage: Storage, entry: Entry, error: Exception | None) -> None:
    if not isinstance(error, NoSuchPage) or entry.stored is None or entry.parent is None:
        return
    if entry.state == STORED:
        storage.pool.remove_everywhere(entry)
    else:
        storage.forget_copy(entry)
        storage.demotions.add(entry)
