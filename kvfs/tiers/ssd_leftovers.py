"""What is left over on the SSD tier: temporaries nobody writes, damaged pages, and files that are not ours.

Everything here waits for the disk, and so belongs into a thread.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from kvfs.page import RESERVED
from kvfs.tiers.ssd_base import occupied
from kvfs.tiers.ssd_directory import is_ours
from kvfs.tiers.ssd_names import OWNER_FILE, QUARANTINE, TEMPORARY, is_reserved
from kvfs.tiers.ssd_pages import SsdPages


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file or directory: ``path`` below the tier, ``size`` the bytes that it occupies, ``since_ns`` the
    time since 1970 of its last change."""

    path: bytes
    size: int
    since_ns: int


def _leftover(path: bytes, status: os.stat_result) -> Leftover:
    return Leftover(path, occupied(status), status.st_mtime_ns)


def find_temporaries(tier: SsdPages) -> list[Leftover]:
    """What was never finished, and is not being written now: a failing disk did not let us delete it."""
    with tier.lock:
        directory = tier.beside(TEMPORARY)
        found = []
        for name in os.listdir(directory.proc):
            if name in tier.temporaries:
                continue
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
                if is_ours(status):
                    found.append(_leftover(TEMPORARY + b"/" + name, status))
    return found


def delete_temporaries(tier: SsdPages) -> None:
    """Deletes what ``find_temporaries`` finds now."""
    with tier.lock:
        for leftover in find_temporaries(tier):
            directory, name = tier.beside(TEMPORARY), leftover.path.rpartition(b"/")[2]
            is_directory = stat.S_ISDIR(os.stat(name, dir_fd=directory.fd, follow_symlinks=False).st_mode)
            (os.rmdir if is_directory else os.unlink)(name, dir_fd=directory.fd)


def find_foreign(tier: SsdPages) -> Iterator[Leftover | None]:
    """Walks the tier: each file or directory that is not ours, and None for each that is, so that whoever
    iterates can pause at any time. What is in a directory that is not ours is left out."""
    device = os.fstat(tier.root_fd).st_dev
    for top, directories, files, dir_fd in os.fwalk(b".", dir_fd=tier.root_fd):
        prefix = top[2:] + b"/" if top != b"." else b""
        ours = []
        for name in (*directories, *files):
            path = prefix + name
            if not prefix and _is_part_of_the_tier(name):
                if name in (TEMPORARY, QUARANTINE):
                    ours.append(name)
                continue
            try:
                status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
            except FileNotFoundError:
                continue
            is_own = is_ours(status) if is_reserved(path) else tier.is_own(dir_fd, name, status, path)
            if is_own and status.st_dev == device:
                ours.append(name)
                yield None
            else:
                yield _leftover(path, status)
        directories[:] = [name for name in directories if name in ours]


def _is_part_of_the_tier(name: bytes) -> bool:
    """Whether a name in the root is the tier's or the filesystem's own."""
    if name in (OWNER_FILE, TEMPORARY, QUARANTINE):
        return True
    return is_reserved(name) and not name.startswith(RESERVED)
