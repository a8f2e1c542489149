"""Whether files of a tmpfs really lie on hugepages: found out, not believed."""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection
from typing import Final

from kvfs.page import HUGEPAGE

_MAPPED: Final = ("ShmemPmdMapped:", "FilePmdMapped:")


def hugepage_mapped_bytes(fd: int) -> int:
    """How many bytes of this process's mappings of a file the processor sees as 2 MiB pages."""
    status = os.fstat(fd)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    total = 0
    ours = False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            fields = line.split()
            if fields[0][-1] != ":":  # the header of a mapping: addresses, permissions, offset, device, inode
                ours = fields[3:5] == [device, str(status.st_ino)]
            elif ours and fields[0] in _MAPPED:
                total += int(fields[1]) << 10
    return total


def probe(root_fd: int, mount_options: Collection[str]) -> str:
    """Makes a nameless file of 2 MiB and touches it: "" when it lies on a hugepage, else why it does not."""
    try:
        fd = os.open(b".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=root_fd)
    except OSError as error:
        return f"no probe file could be made: {error.strerror}"
    try:
        os.ftruncate(fd, HUGEPAGE)
        os.posix_fallocate(fd, 0, HUGEPAGE)
        with mmap.mmap(fd, HUGEPAGE) as mapping:
            mapping[0] = 1
            if hugepage_mapped_bytes(fd):
                return ""
    except OSError as error:
        return f"the probe file could not be allocated: {error.strerror}"
    finally:
        os.close(fd)
    return _explain(mount_options)


def _explain(mount_options: Collection[str]) -> str:
    try:
        with open("/sys/kernel/mm/transparent_hugepage/shmem_enabled") as setting:
            words = setting.read().split()
    except FileNotFoundError:
        return "this kernel has no transparent hugepages"
    if "[deny]" in words:
        return "/sys/kernel/mm/transparent_hugepage/shmem_enabled says deny"
    if not any(option.startswith("huge=") for option in mount_options):
        return "the tmpfs is not mounted with huge=within_size"
    return "the kernel gave small pages, though asked for large ones: free memory is scarce or fragmented"
