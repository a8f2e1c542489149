"""Checks of memory: how much, of what kind, and can it be ours alone."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvfs import syscalls
from kvfs.config import DEFAULT_POOL_SHARE, WARNING_POOL_SHARE, read_memory
from kvfs.doctor.check import Check, read_setting
from kvfs.page import HUGEPAGE
from kvfs.sizes import format_size
from kvfs.tiers import hugepages as hugepage_probe
from kvfs.tiers import tmpfs

_TRANSPARENT = "/sys/kernel/mm/transparent_hugepage"
_BORROWED = Path("/dev/shm")
_ROOT_REMEDY = "mount as root; in a container: --cap-add SYS_ADMIN"


def size() -> Check:
    memory = read_memory()
    default = format_size(int(memory.available * DEFAULT_POOL_SHARE))
    found = (
        f"{format_size(memory.total)}, of which {format_size(memory.available)} is available: the pool is "
        f"{default} unless --pool says otherwise, which warns above "
        f"{format_size(int(memory.total * WARNING_POOL_SHARE))}"
    )
    return Check("memory", True, found)


def private_tmpfs() -> Check:
    try:
        os.close(syscalls.make_filesystem("tmpfs", {}))
    except OSError as error:
        return Check(
            "private tmpfs",
            False,
            f"cannot be made: {error.strerror}",
            without_a_tmpfs(),
            _ROOT_REMEDY,
        )
    return Check("private tmpfs", True, "tried: can be made")


def without_a_tmpfs() -> str:
    """What holds for pages that cannot have a tmpfs of their own."""
    try:
        room = os.statvfs(_BORROWED)
        place = f"a directory below {_BORROWED} (of {format_size(room.f_blocks * room.f_frsize)})"
    except OSError:
        place = "a directory of another tmpfs"
    return (
        f"pages lie in {place}: their limit is kept by the daemon, they may be swapped out, and they come to "
        "hugepages only once they are sealed"
    )


def hugepages() -> Check:
    reason = _hugepage_refusal()
    if not reason:
        return Check("hugepages", True, "tried: a file on a tmpfs with huge=within_size lies on 2 MiB pages")
    return Check(
        "hugepages",
        False,
        reason,
        "reading is slower, writing several times so; --hugepages require refuses to mount",
        "a kernel with CONFIG_TRANSPARENT_HUGEPAGE, shmem_enabled not at deny, and enough free memory in one "
        "piece (echo 1 >/proc/sys/vm/compact_memory)",
    )


def _hugepage_refusal() -> str:
    try:
        filesystem = syscalls.make_filesystem("tmpfs", {"size": str(2 * HUGEPAGE), "huge": "within_size"})
    except OSError as error:
        return f"a tmpfs with huge=within_size cannot be made: {error.strerror}"
    try:
        root = syscalls.mount_detached(filesystem)
        try:
            return hugepage_probe.probe(root, ["huge=within_size"])
        finally:
            os.close(root)
    finally:
        os.close(filesystem)


def transparent_hugepages() -> Check:
    setting = read_setting(f"{_TRANSPARENT}/shmem_enabled")
    length = read_setting(f"{_TRANSPARENT}/hpage_pmd_size")
    if setting is None or length is None:
        return Check(
            "transparent hugepages",
            False,
            "this kernel has none",
            "pages lie on small pages",
            "a kernel with CONFIG_TRANSPARENT_HUGEPAGE",
        )
    chosen = re.search(r"\[(\w+)\]", setting)
    found = f"of {format_size(int(length))}; shmem_enabled is {chosen[1] if chosen else setting}"
    if chosen is not None and chosen[1] == "deny":
        remedy = f"echo never >{_TRANSPARENT}/shmem_enabled; the mount asks for hugepages by itself"
        return Check("transparent hugepages", False, found, "no tmpfs of this host gets hugepages", remedy)
    if int(length) != HUGEPAGE:
        consequence = f"pages smaller than {format_size(int(length))} get no hugepage"
        return Check("transparent hugepages", None, found, consequence, "a kernel with 4 KiB base pages")
    return Check("transparent hugepages", True, found)


def _swap_bytes() -> int:
    lines = (read_setting("/proc/swaps") or "").splitlines()[1:]
    return sum(int(line.split()[2]) for line in lines) << 10


def noswap() -> Check:
    try:
        os.close(syscalls.make_filesystem("tmpfs", {"noswap": None}))
    except OSError as error:
        found = f"refused: {error.strerror}"
    else:
        return Check("noswap", True, "tried: the kernel keeps pages of the tier out of swap")
    if not _swap_bytes():
        return Check("noswap", None, found, "nothing while this host has no swap")
    return Check(
        "noswap",
        False,
        found,
        "pages may be swapped out, and then be read at the speed of the disk",
        "Linux 6.4 or later and mounting as root; or switch swap off (swapoff -a)",
    )


def swap() -> Check:
    total = _swap_bytes()
    if not total:
        return Check("swap", True, "none")
    consequence = "programs may be swapped out when the pool takes the memory that they need"
    return Check("swap", None, format_size(total), consequence, "choose --pool so that programs keep theirs")


def numa() -> Check:
    nodes = tmpfs.memory_nodes()
    found = ", ".join(f"node {node}{_node_size(node)}" for node in nodes)
    if len(nodes) == 1:
        return Check("NUMA", True, found)
    return Check(
        "NUMA",
        None,
        found,
        "a page lies on the node where its writer ran and is read more slowly from the others, and a pool "
        "larger than one node fills them unevenly",
        "--numa interleave spreads pages evenly, --numa NODE keeps them beside one device",
    )


def _node_size(node: int) -> str:
    text = read_setting(f"/sys/devices/system/node/node{node}/meminfo") or ""
    match = re.search(r"MemTotal:\s+(\d+) kB", text)
    return f" with {format_size(int(match[1]) << 10)}" if match else ""
