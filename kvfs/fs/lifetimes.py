"""How long a page stays, as attributes that programs read and set: user.kvfs.pin and user.kvfs.ttl.

Of a file:
- user.kvfs.pin: "1" keeps the page in DRAM, "0" no longer does, and nor does removing it.
- user.kvfs.ttl: how long after it was sealed the page expires, as in "90", "30m" or "7d"; read as "1800s".
Of a directory:
- user.kvfs.ttl: the same for every file that is sealed below it from then on and has none of its own.

Listings show them where they are set. To set them is left to the owner of the file and to root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyfuse3 import FUSEError

from kvfs.errors import AttributeMissing, NotPermitted, NotSupported, TooManyPins, UsageError
from kvfs.fs.attributes import OWN
from kvfs.page import PIN, TTL, Lifetime
from kvfs.sizes import parse_duration

if TYPE_CHECKING:
    from kvfs.index import Entry
    from kvfs.pool import Pool

PIN_ATTRIBUTE: Final = OWN + PIN
TTL_ATTRIBUTE: Final = OWN + TTL
NAMES: Final = frozenset((PIN_ATTRIBUTE, TTL_ATTRIBUTE))

SHORTEST: Final = 0.001
LONGEST: Final = 100 * 365 * 86400.0
"""Seconds."""


class LifetimeAttributes:
    """Answers for both; belongs to the event loop."""

    def __init__(self, pool: Pool) -> None:
        self._lifetimes = pool.lifetimes

    async def get(self, entry: Entry, name: str) -> bytes:
        """Raises AttributeMissing, and what asking the SSD raises."""
        value = await self._lifetimes.read_attribute(entry, name.removeprefix(OWN))
        if name == PIN_ATTRIBUTE:
            return value
        try:
            return f"{Lifetime.parse(value).seconds_text}s".encode()
        except ValueError:
            raise AttributeMissing(name) from None

    async def set(self, entry: Entry, name: str, value: bytes, uid: int) -> None:
        """Raises NotPermitted, UsageError for a value that means nothing, FUSEError for a page beyond the
        budget for pinned ones, and what bringing it into DRAM raises."""
        self._require_owner(entry, name, uid)
        if name == TTL_ATTRIBUTE and (entry.is_file or entry.is_directory):
            await self._lifetimes.set_ttl(entry, _parse_ttl(value))
        elif not entry.is_file:
            raise NotSupported(f"{name} is for files: kvfs pin takes a directory too")
        elif value == b"1":
            try:
                await self._lifetimes.pin(entry)
            except TooManyPins as error:  # the pool is not full, and nothing needs to be logged
                raise FUSEError(error.errno) from error
        elif value == b"0":
            self._lifetimes.unpin(entry)
        else:
            raise UsageError(f"{name} is 1 or 0, not {value[:80]!r}")

    async def remove(self, entry: Entry, name: str, uid: int) -> None:
        """Raises NotPermitted and AttributeMissing."""
        self._require_owner(entry, name, uid)
        await self._lifetimes.read_attribute(entry, name.removeprefix(OWN))
        if name == PIN_ATTRIBUTE:
            self._lifetimes.unpin(entry)
        else:
            self._lifetimes.remove_ttl(entry)

    @staticmethod
    def _require_owner(entry: Entry, name: str, uid: int) -> None:
        if uid not in (0, entry.owner.uid):
            raise NotPermitted(f"{name} is left to the owner of the file, and to root")


def _parse_ttl(value: bytes) -> float:
    """Seconds. Raises UsageError."""
    try:
        seconds = parse_duration(value.decode("ascii"))
    except UnicodeDecodeError:
        raise UsageError("a time to live is a number of seconds, or 30m, 1h, 7d") from None
    if not SHORTEST <= seconds <= LONGEST:
        raise UsageError("a time to live is more than nothing, and at most 100 years")
    return seconds
