"""Checks of what the system allows processes: memory cgroups, the out-of-memory killer, open files, and
whether they are seen at all."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from kvfs import mounts
from kvfs.config import read_memory
from kvfs.doctor.check import Check, read_setting
from kvfs.sizes import format_size

_WANTED_FILES = 65536
_SHOWN = 3
_SEARCHED = 5000
_RESOURCE_REMEDY = "mount as root with CAP_SYS_RESOURCE (in a container: --cap-add SYS_RESOURCE)"
_HOST_PROCESSES = 0xEFFFFFFC
"""The inode of the host's process namespace, the same on every Linux."""
_OOM_SCORE = Path("/proc/self/oom_score_adj")

_MEANING = (
    "the kernel charges a page to the cgroup of whoever writes it: a container that writes pages needs a "
    "limit with room for all of them, and is killed (OOM) when they exceed it; reading costs it nothing"
)


def _hierarchies() -> Iterator[tuple[Path, str, str]]:
    """Where memory cgroups are mounted: the directory, the file that holds a group's limit, and the
    controller as /proc/self/cgroup names it."""
    seen = set()
    for entry in mounts.read_mountinfo():
        if entry.device in seen:
            continue
        seen.add(entry.device)
        if entry.fstype == "cgroup2":
            yield entry.mountpoint, "memory.max", ""
        elif entry.fstype == "cgroup" and "memory" in entry.options:
            yield entry.mountpoint, "memory.limit_in_bytes", "memory"


def _limit(file: Path) -> int | None:
    """Bytes; None where the group has no limit below the machine's memory."""
    text = read_setting(str(file))
    if text is None or not text.isdecimal():
        return None
    number = int(text)
    return number if number < read_memory().total else None


def own_limit() -> tuple[int, Path] | None:
    """The tightest memory limit of this process, in bytes, and the group that has it."""
    groups = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = PurePosixPath(path)
    limits = []
    for directory, name, controller in _hierarchies():
        own = groups.get(controller)
        for group in (own, *own.parents) if own is not None else ():
            place = directory / str(group).lstrip("/")
            limit = _limit(place / name)
            if limit is not None:
                limits.append((limit, place))
    return min(limits, default=None)


def memory_cgroup() -> Check:
    tightest = own_limit()
    if tightest is None:
        return Check("memory cgroup", True, "no limit on this shell", _MEANING)
    limit, group = tightest
    return Check(
        "memory cgroup",
        None,
        f"{format_size(limit)} for this shell, by {group}",
        _MEANING,
        "raise the limit (docker run --memory, MemoryMax= of the unit), or write from outside of it",
    )


def limited_cgroups() -> Check:
    """The other groups of the host: a writer in one of them is the one that is killed."""
    limited: list[tuple[int, str]] = []
    searched = 0
    for directory, name, _controller in _hierarchies():
        for place, _below, files in os.walk(directory):
            searched += 1
            if searched > _SEARCHED:
                break
            limit = _limit(Path(place, name)) if name in files else None
            if limit is not None:
                limited.append((limit, str(Path(place).relative_to(directory))))
    if not limited:
        return Check("limited cgroups", True, "none on this host")
    limited.sort()
    tightest = ", ".join(f"{group} ({format_size(limit)})" for limit, group in limited[:_SHOWN])
    more = f" and {len(limited) - _SHOWN} more" if len(limited) > _SHOWN else ""
    return Check(
        "limited cgroups",
        None,
        f"{tightest}{more}",
        "a program in one of these can write no more pages than its limit leaves room for",
        "raise the limits of those that write pages",
    )


def out_of_memory() -> Check:
    before = _OOM_SCORE.read_text()
    try:
        _OOM_SCORE.write_text(str(max(-1000, int(before) - 1)))
        _OOM_SCORE.write_text(before)
    except OSError as error:
        return Check(
            "out of memory",
            False,
            f"the daemon's oom_score_adj cannot be lowered: {error.strerror}",
            "when memory runs out the daemon may be killed: open files and mappings survive, the mount does "
            "not, until kvfs mount brings it back with its pages",
            _RESOURCE_REMEDY,
        )
    return Check("out of memory", True, "the daemon can be spared: its oom_score_adj can be lowered")


def processes() -> Check:
    if os.stat("/proc/self/ns/pid").st_ino == _HOST_PROCESSES:
        return Check("processes", True, "those of the host are seen, in containers too")
    return Check(
        "processes",
        None,
        "only those of this container are seen",
        "when a program elsewhere is killed in the middle of a file, the half of it becomes a page",
        "for programs in other containers: hostPID: true in Kubernetes, docker run --pid host",
    )


def open_files() -> Check:
    limit = _reachable_files()
    found = f"the daemon may open {limit} files"
    if limit >= _WANTED_FILES:
        return Check("open files", True, found)
    return Check(
        "open files",
        False,
        found,
        "a page that is ready to be opened at full speed holds a file: further ones are opened more slowly",
        f"LimitNOFILE={_WANTED_FILES} in the unit, or ulimit -Hn {_WANTED_FILES} as root; or "
        + _RESOURCE_REMEDY,
    )


def _reachable_files() -> int:
    """How many files this process could open if it asked, found by asking for more than its limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = int(read_setting("/proc/sys/fs/nr_open") or 0)
    if before[1] == resource.RLIM_INFINITY or before[1] >= wanted:
        return wanted
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[0], wanted))
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    except (ValueError, PermissionError):
        return before[1]
    return wanted
