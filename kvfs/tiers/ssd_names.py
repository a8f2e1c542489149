"""Which names on the SSD are the tier's own, and how a file is bound to the name it was stored under. Pure.

A digest travels with its file: two files that somebody swaps would each match their own. So a file also knows
where it belongs: its record holds a binding, the hash of its name and of the identity of its directory. A
directory has a random identity, and a binding of its own. Renaming a directory therefore changes one record,
however much is in it, and a page that lies under another's name is found out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import xxhash

from kvfs.page import RESERVED

OWNER_FILE: Final = b".kvfs-owner"
TEMPORARY: Final = b".kvfs-temporary"
QUARANTINE: Final = b".kvfs-quarantine"

ROOT_IDENTITY: Final = 1
FIRST_IDENTITY: Final = 2

_LOST_AND_FOUND = b"lost+found"


def is_reserved(path: bytes) -> bool:
    """Whether a path is the tier's or the filesystem's own, and no place for a page."""
    first = path.partition(b"/")[0]
    return first.startswith(RESERVED) or first == _LOST_AND_FOUND


def binding(identity: int, name: bytes) -> int:
    """What the record of ``name`` holds when it belongs into the directory of this identity: 64 bits."""
    bound: int = xxhash.xxh3_64_intdigest(identity.to_bytes(8, "little") + name)
    return bound


def prefixes(path: bytes) -> Iterator[bytes]:
    """The directories on the way to ``path`` and the path itself, from the top: "a", "a/b", "a/b/c"."""
    end = path.find(b"/")
    while end >= 0:
        yield path[:end]
        end = path.find(b"/", end + 1)
    if path:
        yield path
