"""Paths on a mount as the client has them: the mount, and the key of a page below it."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from kvfs import mounts
from kvfs.cli.control import ANSWER_DEADLINE_SECONDS
from kvfs.cli.pages import shown
from kvfs.deadlines import answer_within
from kvfs.errors import DaemonFailed, NotMounted, UsageError


def mount_and_key(text: str) -> tuple[Path, str]:
    """The mount that a path is on, and the path below it; there need be nothing yet.

    Raises UsageError for an empty path and for the mountpoint itself, NotMounted where the path is on another
    filesystem, and DaemonFailed where nobody answers.
    """
    if not text:
        raise UsageError("the path is empty: name a page on a mount of kvfs")
    path = answer_within(ANSWER_DEADLINE_SECONDS, partial(os.path.realpath, text))
    if path is None:
        raise DaemonFailed(f"{shown(text)}: no answer within {ANSWER_DEADLINE_SECONDS:g} s")
    entry = max(
        (entry for entry in mounts.read_mountinfo() if Path(path).is_relative_to(entry.mountpoint)),
        key=lambda entry: (len(entry.mountpoint.parts), entry.mount_id),
        default=None,
    )
    if entry is None or entry.fstype != mounts.FSTYPE:
        filesystem = "another filesystem" if entry is None else entry.fstype
        raise NotMounted(f"{shown(text)} is on {filesystem}, not on a mount of kvfs")
    if Path(path) == entry.mountpoint:
        raise UsageError(f"{shown(text)} is the mount itself: name a page below it")
    return entry.mountpoint, os.path.relpath(path, entry.mountpoint)
