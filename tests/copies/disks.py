"""Disks that fail: a filesystem in a loop-mounted file, to which something is done from below."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

from kvfs import syscalls
from tests.copies.files import MIB

_FIBMAP = 1
_FIFREEZE = 0xC0045877
_FITHAW = 0xC0045878


@contextlib.contextmanager
def mounted_image(directory: Path, image: Path, megabytes: int) -> Iterator[None]:
    """An ext4 filesystem without a journal, which would end it at the first error."""
    with image.open("wb") as file:
        file.truncate(megabytes * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-O", "^has_journal", image], check=True, timeout=60)
    directory.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop,errors=continue", image, directory], check=True, timeout=60)
    try:
        yield
    finally:
        subprocess.run(["umount", directory], check=True, timeout=60)


@contextlib.contextmanager
def unreadable_beyond(image: Path, fd: int, offset: int) -> Iterator[None]:
    """Reading a file from this offset on fails: the image ends there."""
    block_size = os.fstatvfs(fd).f_bsize
    request = struct.pack("i", offset // block_size)
    (block,) = struct.unpack("i", fcntl.ioctl(fd, _FIBMAP, request))
    length = image.stat().st_size
    os.truncate(image, block * block_size)
    try:
        yield
    finally:
        os.truncate(image, length)


@contextlib.contextmanager
def disk_that_takes(directory: Path, megabytes: int) -> Iterator[Path]:
    """A filesystem of 64 MiB on a disk that has only so many: writing more to it fails."""
    below = directory / "below"
    below.mkdir()
    syscalls.mount("kvfs-test", below, "tmpfs", 0, f"size={megabytes}m")
    try:
        with mounted_image(directory / "mounted", below / "image", 64):
            yield directory / "mounted"
    finally:
        syscalls.umount2(below)


@contextlib.contextmanager
def frozen(directory: Path) -> Iterator[None]:
    """A filesystem that lets whoever writes wait."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _FIFREEZE, 0)
        try:
            yield
        finally:
            fcntl.ioctl(fd, _FITHAW, 0)
    finally:
        os.close(fd)
