"""Damaged pages, kept for a person to look at: in ``.kvfs-quarantine``, bounded, the oldest leave first.

A file there is named after the time when it came (nanoseconds, so that names sort by age) and has two more
attributes: "path", where it lay, and "reason". The tier moves files in and out, and calls this under its
lock.
"""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from kvfs.errors import AttributeMissing
from kvfs.tiers.attributes import Target
from kvfs.tiers.ssd_attributes import RecordAttributes
from kvfs.tiers.ssd_names import QUARANTINE
from kvfs.tiers.ssd_record import Record

PATH: Final = "path"
REASON: Final = "reason"

REASONS: Final = {
    "bytes": "its bytes do not match its digest",
    "size": "its length is not the one it was stored with",
    "attributes": "what was known of it is lost or damaged",
    "name": "it lies under a name that it was not stored under",
}

_LONGEST_PATH_KEPT = 1024
_LEAST_SIZE = 4096


@dataclass(frozen=True, slots=True)
class Quarantined:
    """One file in quarantine: ``name`` is what ``delete`` takes, ``path`` where it lay (the end of it, where
    it was long), ``since_ns`` the time since 1970 when it came, ``size`` the bytes it occupies."""

    name: bytes
    path: bytes
    reason: str
    size: int
    since_ns: int


class Quarantine:
    """What is in quarantine. ``unlink`` takes a path of the tier and keeps its accounts."""

    def __init__(
        self, attributes: RecordAttributes, limit_bytes: int, unlink: Callable[[bytes], None]
    ) -> None:
        self.limit_bytes = limit_bytes
        self._attributes = attributes
        self._unlink = unlink
        self._files: OrderedDict[bytes, int] = OrderedDict()
        self._total = 0

    def __len__(self) -> int:
        return len(self._files)

    @property
    def used_bytes(self) -> int:
        return self._total

    def load(self, dir_fd: int) -> None:
        """Reads what an earlier process left."""
        for name in sorted(os.listdir(b"/proc/self/fd/%d" % dir_fd)):
            status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
            self._add(name, status.st_blocks * 512)

    def _add(self, name: bytes, size: int) -> None:
        size = max(size, _LEAST_SIZE)
        self._files[name] = size
        self._total += size

    def label(self, target: Target, path: bytes, reason: str) -> None:
        """Notes at a file where it lies and what is wrong. A disk that is full, or a file that takes no
        attributes, loses the note and not the file's place in quarantine."""
        for name, value in ((REASON, reason.encode()), (PATH, path[-_LONGEST_PATH_KEPT:])):
            try:
                self._attributes.set(target, name, value)
            except OSError:
                return

    def new_name(self, now_ns: int) -> bytes:
        """The name for what comes at ``now_ns``, after all others by age."""
        newest = next(reversed(self._files), None)
        if newest is not None and newest.isdigit():
            now_ns = max(now_ns, int(newest) + 1)
        return b"%020d" % now_ns

    def came(self, name: bytes, size: int) -> None:
        """A file was moved in; the oldest ones leave until all fit."""
        self._add(name, size)
        self.shrink(self.limit_bytes)

    def shrink(self, limit_bytes: int) -> int:
        """Deletes the oldest files until the others take ``limit_bytes`` at most; returns the bytes freed."""
        before = self._total
        while self._total > limit_bytes:
            self.delete(next(iter(self._files)))
        return before - self._total

    def delete(self, name: bytes) -> None:
        """Raises KeyError for a name that is not there."""
        size = self._files.pop(name)
        self._total -= size
        with contextlib.suppress(FileNotFoundError):  # somebody has removed it by hand
            self._unlink(QUARANTINE + b"/" + name)

    def list(self, dir_fd: int) -> list[Quarantined]:
        """Everything there is, the oldest first."""
        found = []
        for name, size in list(self._files.items()):
            target = b"/proc/self/fd/%d/" % dir_fd + name
            notes = {}
            for attribute in (PATH, REASON):
                try:
                    notes[attribute] = self._attributes.get(target, attribute)
                except (OSError, AttributeMissing):
                    notes[attribute] = b""
            since_ns = int(name) if name.isdigit() else 0
            found.append(Quarantined(name, notes[PATH], notes[REASON].decode(), size, since_ns))
        return found


def damage(record: Record | None, attributes: Mapping[str, bytes], size: int) -> str:
    """Why a file of ``size`` bytes is not a page as it was stored: one of REASONS, or ""."""
    if REASON in attributes:  # a crash came between the note and the move
        reason = attributes[REASON].decode(errors="replace")
        return reason if reason in REASONS else "attributes"
    if record is None or record.digest is None:
        return "attributes"
    return "" if record.digest.size == size else "size"
