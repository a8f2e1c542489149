"""Bytes that say of themselves which version of a file they are, and whether they are whole."""

from __future__ import annotations

import hashlib
import random
import struct

_HEADER = struct.Struct("<8sQQ")
_MAGIC = b"a-page-\n"
_CHECKSUM = 16
SMALLEST = _HEADER.size + _CHECKSUM


def make(version: int, size: int) -> bytes:
    """The content of ``size`` bytes, at least SMALLEST, that the version with this number has."""
    head = _HEADER.pack(_MAGIC, version, size)
    body = head + random.Random(version).randbytes(size - SMALLEST)
    return body + hashlib.blake2b(body, digest_size=_CHECKSUM).digest()


def version_of(content: bytes) -> int:
    """The number of the version; ValueError for bytes that nobody wrote like this."""
    if len(content) < SMALLEST:
        raise ValueError(f"{len(content)} bytes are no page")
    magic, version, size = _HEADER.unpack_from(content)
    if magic != _MAGIC or size != len(content):
        raise ValueError(f"{len(content)} bytes that begin with {content[:24]!r} are no page")
    body, checksum = content[:-_CHECKSUM], content[-_CHECKSUM:]
    if hashlib.blake2b(body, digest_size=_CHECKSUM).digest() != checksum:
        raise ValueError(f"version {version}, {size} bytes, is not as it was written")
    return int(version)
