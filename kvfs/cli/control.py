"""Asking a mounted kvfs through its hidden control files, without ever waiting for ever."""

from __future__ import annotations

import errno as numbers
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from kvfs import mounts
from kvfs.deadlines import answer_within
from kvfs.errors import DaemonFailed, KvfsError, NotMounted, NotPermitted
from kvfs.state import StateDirectory, all_states

ANSWER_DEADLINE_SECONDS = 5.0


def is_dead(mountpoint: Path) -> bool:
    """Whether the mount has lost its daemon; one that hangs has not."""
    return bool(answer_within(ANSWER_DEADLINE_SECONDS, partial(mounts.is_dead, mountpoint)))


def require_mount(mountpoint: Path) -> mounts.MountEntry:
    """The kvfs mount on top of this path; NotMounted when there is none."""
    entries = mounts.find(mountpoint)
    if not entries:
        raise NotMounted(f"nothing is mounted at {mountpoint}: kvfs status lists what is")
    if entries[-1].fstype != mounts.FSTYPE:
        raise NotMounted(f"{mountpoint} is {entries[-1].fstype}, not kvfs: kvfs status lists what is")
    return entries[-1]


def read_control(mountpoint: Path, name: str, deadline: float = ANSWER_DEADLINE_SECONDS) -> str:
    """The text of a control file, such as "status.json".

    Raises NotMounted when the daemon is gone, NotPermitted when the caller may not look, and DaemonFailed
    when there is no answer within ``deadline`` seconds.
    """
    try:
        answer = answer_within(deadline, (mountpoint / ".kvfs" / name).read_text)
    except OSError as error:
        raise _unreadable(mountpoint, name, error) from None
    if answer is None:
        raise DaemonFailed(
            f"{mountpoint} does not answer within {deadline:g} s: its daemon hangs or is stopped"
        )
    return answer


def _unreadable(mountpoint: Path, name: str, error: OSError) -> KvfsError:
    if error.errno in (numbers.ENOTCONN, numbers.ECONNABORTED):
        return NotMounted(
            f"the daemon of {mountpoint} is gone: kvfs mount serves its pages again, kvfs umount frees them"
        )
    if isinstance(error, PermissionError):
        advice = "use sudo" if os.geteuid() else "ask the user who mounted it without allow_other"
        return NotPermitted(f"{mountpoint} cannot be read by you: {advice}")
    return DaemonFailed(f"{mountpoint}/.kvfs/{name} cannot be read: {error.strerror}")


def read_status(mountpoint: Path, deadline: float = ANSWER_DEADLINE_SECONDS) -> dict[str, Any]:
    """The mount's status.json; errors as in ``read_control``."""
    status = json.loads(read_control(mountpoint, "status.json", deadline))
    assert isinstance(status, dict)
    return status


def find_state(mountpoint: Path, base: Path | None) -> StateDirectory:
    """The state directory of a mountpoint, wherever it was put; it may not exist.

    Looks below ``base`` if it is given; else below the default, then where a tmpfs is mounted that can only
    be this mountpoint's DRAM, and then asks the mount itself.
    """
    usual = StateDirectory.for_mountpoint(mountpoint, base)
    if base is not None or usual.exists():
        return usual
    for entry in mounts.read_mountinfo():
        place = entry.mountpoint
        if entry.fstype == "tmpfs" and place.name == "dram" and place.parent.name == usual.path.name:
            return StateDirectory(place.parent)
    try:
        elsewhere = read_status(mountpoint)["config"]["state_dir"]["value"]
    except (NotMounted, NotPermitted, DaemonFailed, KeyError):
        return usual
    return StateDirectory.for_mountpoint(mountpoint, Path(elsewhere))


def unmounted_states(base: Path | None) -> list[tuple[Path, StateDirectory]]:
    """Mountpoints with a state that nobody serves, with that state: crashed, or kept on purpose."""
    mounted = {entry.mountpoint for entry in mounts.read_mountinfo() if entry.fstype == mounts.FSTYPE}
    found = []
    for state in all_states(base):
        config = state.read_config()
        if config is not None and config.mountpoint not in mounted and state.daemon_pid() is None:
            found.append((config.mountpoint, state))
    return found
