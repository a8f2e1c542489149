"""The private tmpfs that holds the DRAM tier: which options this kernel takes, mounting and resizing."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from kvfs import mounts, syscalls
from kvfs.errors import MountpointError, UsageError

SOURCE = "kvfs-dram"
# Every read and mapping sets the access time, from which the next daemon learns the order of eviction.
FLAGS = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC | syscalls.MS_STRICTATIME
LEAST_INODES = 1 << 18

_NODES = Path("/sys/devices/system/node")


@dataclass(slots=True)
class Options:
    """The optional mount options of a tmpfs: those to use, and why others that were wanted are not.

    Both name an option as mount(8) does, "huge=within_size" or "noswap".
    """

    usable: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)


def memory_nodes() -> list[int]:
    """The NUMA nodes of this host that have memory; [0] where the kernel knows no NUMA."""
    try:
        text = (_NODES / "has_memory").read_text()
    except FileNotFoundError:
        return [0]
    nodes: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        nodes += range(int(first), int(last or first) + 1)
    return nodes


def memory_policy(numa: str) -> str:
    """The mount option for ``numa``: "" is the kernel's default, else "interleave" or the number of a node.

    Raises UsageError for anything else, and for a node that this host does not have.
    """
    if not numa:
        return ""
    if numa == "interleave":
        return "mpol=interleave"
    nodes = memory_nodes()
    if not (numa.isascii() and numa.isdecimal()) or int(numa) not in nodes:
        known = ", ".join(str(node) for node in nodes)
        raise UsageError(
            f"--numa {numa}: write interleave, or a NUMA node of this host that has memory: {known}"
        )
    return f"mpol=bind:{int(numa)}"


def probe_options(hugepages: str, numa: str) -> Options:
    """Tries each option that the tier wants on a tmpfs that is mounted nowhere."""
    options = Options()
    wanted = [
        "huge=never" if hugepages == "off" else "huge=within_size",
        memory_policy(numa),
        "noswap",
        "inode64",
    ]
    for option in filter(None, wanted):
        name, _, value = option.partition("=")
        try:
            os.close(syscalls.make_filesystem("tmpfs", {name: value or None}))
        except OSError as error:
            options.missing[option] = f"refused by Linux {os.uname().release}: {error.strerror}"
        else:
            options.usable.append(option)
    return options


def limits(pool_bytes: int, least_inodes: int = 0) -> str:
    """The mount options that bound a tmpfs: bytes, and files so many that pages of 16 KiB would fit."""
    return f"size={pool_bytes},nr_inodes={max(LEAST_INODES, pool_bytes // 16384, least_inodes)}"


def mount(directory: Path, pool_bytes: int, options: Options) -> None:
    """Mounts a new tmpfs. Raises OSError, PermissionError where the caller may not mount."""
    data = ",".join([limits(pool_bytes), "mode=0700", *options.usable])
    syscalls.mount(SOURCE, directory, "tmpfs", FLAGS, data)


def remount(directory: Path, data: str) -> None:
    """Changes options of a mounted tmpfs. Raises OSError, EINVAL where ``data`` is less than what is used."""
    syscalls.mount(None, directory, None, syscalls.MS_REMOUNT | FLAGS, data)


def adopt(directory: Path, options: Options) -> None:
    """Gives a tmpfs that is mounted already those options that it can still get, and notes the others."""
    present = mounts.find(directory)[-1].options
    if not _has(options.usable, "mpol=") and _has(present, "mpol="):
        options.usable.append("mpol=local")  # what the default means; the kernel ignores mpol=default here
    for option in list(options.usable):
        if option in present or (option == "huge=never" and not _has(present, "huge=")):
            continue
        try:
            remount(directory, option)
        except OSError as error:
            options.usable.remove(option)
            options.missing[option] = (
                "the tmpfs was mounted without it before and cannot get it now "
                f"({error.strerror}); it comes with the first mount after an umount without --keep"
            )


def _has(options: Collection[str], beginning: str) -> bool:
    return any(option.startswith(beginning) for option in options)


def top(directory: Path) -> mounts.MountEntry | None:
    """The tmpfs mounted on ``directory``, or None where nothing is.

    Raises MountpointError when it is another filesystem.
    """
    entries = mounts.find(directory)
    if not entries:
        return None
    entry = entries[-1]
    if entry.fstype != "tmpfs":
        raise MountpointError(
            f"{directory}: {entry.fstype} from {entry.source} is mounted where the DRAM tier belongs; "
            f"unmount it (umount {directory}), or choose another --state-dir"
        )
    return entry
