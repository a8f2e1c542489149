"""What the SSD tier knows of a file or directory, as the bytes of one extended attribute. Pure.

One attribute instead of five, in binary, because ext4 keeps only 88 bytes of attributes in an inode of common
size: what is larger costs a block of its own for each file, and after a reboot a read for each of those.
(100,000 pages walked cold: 2.1 s as one attribute of 52 bytes, 26 s as four of text.) Layout, little-endian:

    u32 checksum (xxh32 of all that follows), u8 fields,
    [digest: 16 bytes, u64 size] [owner: u16 mode, u32 uid, u32 gid] u32 hits [u64 identity] u64 names…
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import xxhash

from kvfs.page import DIGEST, OWNER, SPARSE, Digest, Owner

HITS: Final = "hits"
MOST_HITS: Final = (1 << 32) - 1

_CHECKSUM_SIZE = 4

_HAS_DIGEST = 1
_HAS_OWNER = 2
_IS_SPARSE = 4
_HAS_IDENTITY = 8


def _format(fields: int, names: int) -> str:
    """The layout as ``struct`` writes it."""
    digest = "16sQ" if fields & _HAS_DIGEST else ""
    owner = "HII" if fields & _HAS_OWNER else ""
    identity = "Q" if fields & _HAS_IDENTITY else ""
    return f"<IB{digest}{owner}I{identity}{names}Q"


@lru_cache(maxsize=1024)
def _layout(fields: int, length: int) -> struct.Struct:
    """The layout of a record of so many bytes. Raises ValueError where there is none."""
    names, rest = divmod(length - struct.calcsize(_format(fields, 0)), 8)
    if names < 0 or rest:
        raise ValueError("the record of a file has a strange length")
    return struct.Struct(_format(fields, names))


_owner = lru_cache(maxsize=1024)(Owner)
"""Pages share their owners."""


@dataclass(slots=True)
class Record:
    """``identity`` tells directories apart, 0 for a file. ``names`` are the bindings of ``ssd_names``: one
    for each place where the file or directory may lie."""

    digest: Digest | None = None
    owner: Owner | None = None
    sparse: bool = False
    hits: int = 0
    identity: int = 0
    names: tuple[int, ...] = ()

    def pack(self) -> bytes:
        fields = 0
        parts: list[bytes | int] = []
        if self.digest is not None:
            fields |= _HAS_DIGEST
            parts += (bytes.fromhex(self.digest.hex), self.digest.size)
        if self.owner is not None:
            fields |= _HAS_OWNER
            parts += (self.owner.mode, self.owner.uid, self.owner.gid)
        if self.sparse:
            fields |= _IS_SPARSE
        parts.append(min(self.hits, MOST_HITS))
        if self.identity:
            fields |= _HAS_IDENTITY
            parts.append(self.identity)
        parts += self.names
        packed = struct.pack(_format(fields, len(self.names)), 0, fields, *parts)
        body = packed[_CHECKSUM_SIZE:]
        return struct.pack("<I", xxhash.xxh32_intdigest(body)) + body

    @classmethod
    def unpack(cls, value: bytes) -> Record:
        """Raises ValueError for anything that ``pack`` did not make."""
        if len(value) <= _CHECKSUM_SIZE:
            raise ValueError("the record of a file is cut short")
        fields = value[_CHECKSUM_SIZE]
        parts = _layout(fields, len(value)).unpack(value)
        if parts[0] != xxhash.xxh32_intdigest(value[_CHECKSUM_SIZE:]):
            raise ValueError("the record of a file does not match its checksum")
        digest = owner = None
        identity, place = 0, 2
        if fields & _HAS_DIGEST:
            digest = Digest(parts[2].hex(), parts[3])
            place = 4
        if fields & _HAS_OWNER:
            owner = _owner(*parts[place : place + 3])
            place += 3
        hits = parts[place]
        if fields & _HAS_IDENTITY:
            place += 1
            identity = parts[place]
        return cls(digest, owner, bool(fields & _IS_SPARSE), hits, identity, parts[place + 1 :])

    # The same as attributes with a name and a text, as every tier has them

    def texts(self) -> dict[str, bytes]:
        """What is known, by the names and in the text forms of ``kvfs.page``."""
        known: dict[str, bytes] = {}
        if self.digest is not None:
            known[DIGEST] = self.digest.format().encode()
        if self.owner is not None:
            known[OWNER] = self.owner.format().encode()
        if self.sparse:
            known[SPARSE] = b"1"
        if self.hits:
            known[HITS] = b"%d" % self.hits
        return known

    def set_text(self, name: str, value: bytes) -> None:
        """Sets one of ``TEXTS``. Raises ValueError for a value that is not in its text form."""
        if name == DIGEST:
            self.digest = Digest.parse(value)
        elif name == OWNER:
            self.owner = Owner.parse(value)
        elif name == SPARSE:
            self.sparse = True
        else:
            self.hits = min(int(value), MOST_HITS)

    def remove_text(self, name: str) -> None:
        """Forgets one of ``TEXTS``."""
        if name == DIGEST:
            self.digest = None
        elif name == OWNER:
            self.owner = None
        elif name == SPARSE:
            self.sparse = False
        else:
            self.hits = 0


TEXTS: Final = frozenset((DIGEST, OWNER, SPARSE, HITS))
"""The attributes that a record holds; all others are attributes of their own."""
