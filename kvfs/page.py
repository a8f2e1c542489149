"""What is known of a page: values, and the text forms they have as attributes of its file. Pure."""

from __future__ import annotations

import mmap
import re
import stat
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import xxhash

HUGEPAGE: Final = 2 << 20

DIGEST: Final = "digest"
OWNER: Final = "owner"
SPARSE: Final = "sparse"
"""Of a page that was meant to have holes."""
PIN: Final = "pin"
"""Of a page that is to stay in DRAM."""
TTL: Final = "ttl"
"""The `Lifetime` of a page; of a directory, that of the pages which are sealed below it."""
USER: Final = "user."
"""What the name of a user's own attribute begins with, below the tier's prefix."""

RESERVED: Final = b".kvfs"
"""Names in the root of the mount, and of each tier, that begin with this are our own."""

ALGORITHM: Final = "xxh3-128"

_DIGEST = re.compile(r"xxh3-128:([0-9a-f]{32}):(0|[1-9][0-9]*)", re.ASCII)
_OWNER = re.compile(r"([0-7]{1,6}) (0|[1-9][0-9]{0,9}) (0|[1-9][0-9]{0,9})", re.ASCII)
_LIFETIME = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,3})?) (0|[1-9][0-9]{0,19})", re.ASCII)
_IDENTIFIERS = 1 << 32


def shown(path: bytes) -> str:
    """A path on one line, whatever characters are in it."""
    text = path.decode(errors="backslashreplace")
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


@dataclass(frozen=True, slots=True)
class Digest:
    """The xxh3-128 of a page's bytes (32 lower-case hexadecimal digits) and their number.

    It tells accident from intact; it is no defence against somebody who can write the tier.
    """

    hex: str
    size: int

    @classmethod
    def parse(cls, text: str | bytes) -> Digest:
        """Reads "xxh3-128:HEX:SIZE". Raises ValueError for anything else."""
        if isinstance(text, bytes):
            text = text.decode("ascii")
        match = _DIGEST.fullmatch(text)
        if match is None:
            raise ValueError(f"not a digest: {text[:80]!r}")
        return cls(match[1], int(match[2]))

    def format(self) -> str:
        """The text form that ``parse`` reads."""
        return f"{ALGORITHM}:{self.hex}:{self.size}"

    def __str__(self) -> str:
        return self.format()


def digest_of(content: bytes | bytearray | memoryview | mmap.mmap) -> Digest:
    """The digest of a whole page. Other threads run meanwhile, at about 14 GB/s a core."""
    size = content.nbytes if isinstance(content, memoryview) else len(content)
    return Digest(xxhash.xxh3_128(content).hexdigest(), size)


@dataclass(frozen=True, slots=True)
class Owner:
    """What the mount shows as a file's mode (type and permission bits), user and group."""

    mode: int
    uid: int
    gid: int

    @classmethod
    def parse(cls, text: str | bytes) -> Owner:
        """Reads "100644 1000 1000": the mode is octal. Raises ValueError for anything else."""
        return _parse_owner(text)

    def format(self) -> str:
        """The text form that ``parse`` reads."""
        return f"{self.mode:o} {self.uid} {self.gid}"

    def __str__(self) -> str:
        return self.format()


def new_owner(parent: Owner, mode: int, uid: int, gid: int) -> Owner:
    """That of a new entry in a directory: it belongs to its maker, and to the group of a setgid directory."""
    inherits = parent.mode & stat.S_ISGID
    if inherits and stat.S_ISDIR(mode):
        mode |= stat.S_ISGID
    return Owner(mode, uid, parent.gid if inherits else gid)


@dataclass(frozen=True, slots=True)
class Lifetime:
    """How long a page lives, in seconds above 0, and since when, in nanoseconds since 1970; 0 before it was
    sealed, and of a directory."""

    seconds: float
    sealed_ns: int = 0

    @classmethod
    def parse(cls, text: str | bytes) -> Lifetime:
        """Reads "3600 1764547200000000000". Raises ValueError for anything else."""
        if isinstance(text, bytes):
            text = text.decode("ascii")
        match = _LIFETIME.fullmatch(text)
        if match is None or not float(match[1]):
            raise ValueError(f"not the lifetime of a page: {text[:80]!r}")
        return cls(float(match[1]), int(match[2]))

    def format(self) -> str:
        """The text form that ``parse`` reads."""
        return f"{self.seconds_text} {self.sealed_ns}"

    @property
    def seconds_text(self) -> str:
        """The seconds as a number without an exponent."""
        return f"{self.seconds:.3f}".rstrip("0").rstrip(".")

    def __str__(self) -> str:
        return self.format()


@lru_cache(maxsize=1024)
def _parse_owner(text: str | bytes) -> Owner:
    """Very many files have few owners."""
    if isinstance(text, bytes):
        text = text.decode("ascii")
    match = _OWNER.fullmatch(text)
    if match is None:
        raise ValueError(f"not an owner: {text[:80]!r}")
    owner = Owner(int(match[1], 8), int(match[2]), int(match[3]))
    if not stat.S_IFMT(owner.mode) or owner.mode >= 0o200000 or max(owner.uid, owner.gid) >= _IDENTIFIERS:
        raise ValueError(f"not an owner: {text!r}")
    return owner
