"""What this machine can do for kvfs, and what to change where it cannot: the checks of ``kvfs doctor``."""

from __future__ import annotations

from kvfs.doctor import fuse, limits, memory
from kvfs.doctor.check import Check, is_root

__all__ = ["Check", "examine"]

_CHECKS = (
    fuse.kernel,
    fuse.device,
    fuse.passthrough,
    fuse.libfuse,
    fuse.fusermount,
    fuse.other_users,
    fuse.request_size,
    memory.size,
    memory.private_tmpfs,
    memory.hugepages,
    memory.transparent_hugepages,
    memory.noswap,
    memory.swap,
    memory.numa,
    limits.memory_cgroup,
    limits.limited_cgroups,
    limits.out_of_memory,
    limits.open_files,
    limits.processes,
)
_OF_ROOT = (
    fuse.passthrough,
    memory.private_tmpfs,
    memory.hugepages,
    memory.noswap,
    limits.out_of_memory,
    limits.open_files,
)
"""What only a mount made by root can have."""


def examine() -> list[Check]:
    """Makes every check, by trying where it can; takes well below a second and leaves nothing behind.

    For an ordinary user, one note stands for the checks that do not apply.
    """
    if is_root():
        return [check() for check in _CHECKS]
    return [_without_root(), *(check() for check in _CHECKS if check not in _OF_ROOT)]


def _without_root() -> Check:
    return Check(
        "user",
        None,
        "not root: passthrough, private tmpfs, hugepages, noswap, out of memory and open files do not apply "
        "to a mount of yours, and were not checked",
        f"it is slower, never wrong: the daemon moves the bytes, and {memory.without_a_tmpfs()}",
        "nothing, if that will do; for the speed of memory mount as root, and try it with: sudo kvfs doctor",
    )
