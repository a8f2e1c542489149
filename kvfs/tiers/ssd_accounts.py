"""How many bytes of its directory the SSD tier uses, kept by addition. Pages never take it above the
capacity; directories and attributes may, by a few blocks, until pages have made room for them.

What is counted is what ``du`` counts: the blocks of every file and directory of ours, once however many names
it has. Bytes that are being written are reserved before the first of them is. No I/O; any thread may ask.
"""

from __future__ import annotations

import threading
from typing import Final

from kvfs.errors import TierFull, TierUncounted
from kvfs.sizes import format_size
from kvfs.tiers.base import Room

LARGEST_SLACK: Final = 1 << 20
SLACK_PART: Final = 64


class Reservation:
    """Room for one page that is being written; it ends with ``release`` or as bytes in use."""

    __slots__ = ("_accounts", "size")

    def __init__(self, accounts: Accounts, size: int) -> None:
        self._accounts = accounts
        self.size = size

    def release(self) -> None:
        """Gives the room back; nothing happens the second time."""
        self._accounts._release(self)


class Accounts:
    """The sums. ``filesystem`` is what the filesystem said last: whoever may wait sets it anew."""

    def __init__(self, capacity_bytes: int, filesystem: Room) -> None:
        self.capacity_bytes = capacity_bytes
        self.filesystem = filesystem
        self._lock = threading.Lock()
        self._used = 0
        self._reserved = 0
        self.slack_bytes = min(LARGEST_SLACK, capacity_bytes // SLACK_PART)
        """Pages leave so much to directories and attributes, which grow by a block now and then."""
        self._is_counted = False
        self._seen: set[int] | None = None
        self._total = 0

    @property
    def is_counted(self) -> bool:
        """Whether the sum is known; before, it is the most that it can be: all that the filesystem holds."""
        return self._is_counted

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._known_used()

    @property
    def reserved_bytes(self) -> int:
        with self._lock:
            return self._reserved

    def _known_used(self) -> int:
        if self._is_counted:
            return self._used
        return min(self.capacity_bytes, self.filesystem.used_bytes)

    def room(self) -> Room:
        """The room of the tier; what is being written counts as used."""
        with self._lock:
            used, filesystem = self._known_used(), self.filesystem
            total = max(used, min(self.capacity_bytes, used + filesystem.free_bytes))
            return Room(
                total_bytes=total,
                free_bytes=max(0, self._free()),
                total_inodes=filesystem.total_inodes,
                free_inodes=filesystem.free_inodes,
                block_size=filesystem.block_size,
            )

    def _free(self) -> int:
        """Bytes; below 0 where more is used than may be."""
        return min(self.capacity_bytes - self._known_used(), self.filesystem.free_bytes) - self._reserved

    @property
    def excess_bytes(self) -> int:
        """What must be evicted before the tier is within its capacity; above 0 after it was made smaller."""
        with self._lock:
            return max(0, self._known_used() + self._reserved - self.capacity_bytes)

    # What is being written

    def reserve(self, size: int) -> Reservation:
        """Raises TierFull, or TierUncounted where only counting can tell whether there is room."""
        with self._lock:
            missing = size + self.slack_bytes - self._free()
            # A filesystem that makes inodes as it needs them says that it has none at all.
            missing_inodes = 1 - self.filesystem.free_inodes if self.filesystem.total_inodes else 0
            if missing > 0 or missing_inodes > 0:
                if not self._is_counted:
                    raise TierUncounted("the SSD tier is still being counted: nothing can be stored yet")
                raise TierFull(
                    f"the SSD tier has no room for {format_size(size)}",
                    max(0, missing),
                    max(0, missing_inodes),
                )
            self._reserved += size
        return Reservation(self, size)

    def _release(self, reservation: Reservation) -> None:
        with self._lock:
            self._reserved -= reservation.size
            reservation.size = 0

    def enlarge(self, reservation: Reservation, size: int) -> None:
        """A file turned out to occupy ``size`` bytes. Raises TierFull where that is beyond the capacity."""
        with self._lock:
            more = size - reservation.size
            if more <= 0:
                return
            missing = self._known_used() + self._reserved + more - self.capacity_bytes
            if missing > 0:
                raise TierFull(f"the SSD tier lacks {format_size(missing)} for a page", missing)
            self._reserved += more
            reservation.size = size

    # What there is

    def changed(self, inode: int, before: int, after: int) -> None:
        """A file or directory occupies ``after`` bytes and no longer ``before``; 0 where there is none."""
        with self._lock:
            self._used += after - before
            if self._seen is None:
                return
            if inode in self._seen:
                self._total += after - before
                if not after:
                    self._seen.discard(inode)  # another file may get the number
            elif after:
                self._seen.add(inode)
                self._total += after

    # Counting everything anew, while it changes

    def trust(self, used_bytes: int) -> None:
        """The sum is known from before."""
        with self._lock:
            self._used = used_bytes
            self._is_counted = True

    def begin_count(self) -> None:
        """From now on ``count`` tells of everything that there is; ``changed`` may be called meanwhile."""
        with self._lock:
            self._seen = set()
            self._total = 0

    def count(self, inode: int, size: int) -> None:
        """Counts a file or directory once. Nothing may change it between looking at it and this call."""
        with self._lock:
            if self._seen is not None and inode not in self._seen:
                self._seen.add(inode)
                self._total += size

    def end_count(self) -> int:
        """Takes the new sum for true; returns how much the old one was above it, 0 where there was none."""
        with self._lock:
            drift = self._used - self._total if self._is_counted else 0
            self._used = self._total
            self._is_counted = True
            self._seen = None
        return drift

    def abandon_count(self) -> None:
        """Everything stays as it was."""
        with self._lock:
            self._seen = None
