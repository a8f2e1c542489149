"""What stat tells of a page whose bytes are on the SSD only, in as little memory as it takes. Pure."""

from __future__ import annotations

import os
import struct
from typing import Final

from kvfs.page import Owner

_FIELDS: Final = struct.Struct("<QQqq")
BLOCK_SIZE: Final = 4096
RESIDENT: Final = b""
"""``Entry.stored`` of a page in DRAM that has a copy on the SSD: what stat tells of it, DRAM's file does."""


def pack(size: int, blocks: int, atime_ns: int, mtime_ns: int) -> bytes:
    """Sizes in bytes and in blocks of 512 bytes, times in nanoseconds since 1970."""
    return _FIELDS.pack(size, blocks, atime_ns, mtime_ns)


def pack_status(status: os.stat_result) -> bytes:
    return pack(status.st_size, status.st_blocks, status.st_atime_ns, status.st_mtime_ns)


def with_times(packed: bytes, atime_ns: int, mtime_ns: int) -> bytes:
    """The same file after utimens(2)."""
    size, blocks, *_ = _FIELDS.unpack(packed)
    return pack(size, blocks, atime_ns, mtime_ns)


def mtime_ns(packed: bytes) -> int:
    """In nanoseconds since 1970."""
    modified: int = _FIELDS.unpack(packed)[3]
    return modified


def status_of(packed: bytes, owner: Owner, links: int) -> os.stat_result:
    """As stat(2) would tell it."""
    size, blocks, atime_ns, mtime_ns = _FIELDS.unpack(packed)
    times_ns = (atime_ns, mtime_ns, mtime_ns)
    fields = (owner.mode, 0, 0, links, owner.uid, owner.gid, size, *(ns // 10**9 for ns in times_ns))
    names = ("st_atime_ns", "st_mtime_ns", "st_ctime_ns")
    more = {"st_blocks": blocks, "st_blksize": BLOCK_SIZE, **dict(zip(names, times_ns, strict=True))}
    return os.stat_result(fields, more)
