"""What this machine can do for kvfs, and what to change where it cannot: the checks of ``kvfs doctor``."""

from __future__ import annotations

from kvfs.doctor import fuse, limits, memory
from kvfs.doctor.check import Check

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
)


def examine() -> list[Check]:
    """Makes every check, by trying where it can; takes well below a second and leaves nothing behind."""
    return [check() for check in _CHECKS]
