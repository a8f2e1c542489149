"""What may happen to the files of pages behind the pool's back."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from kvfs.pool import Pool
from kvfs.storage.storage import Storage
from tests.pool.files import pattern

DATA, OTHER = pattern(100_000), pattern(100_000, 2)
AT_FDCWD = -100
Damage = Callable[[int], None]


def flip(fd: int) -> None:
    """One bit of one byte."""
    os.pwrite(fd, bytes([os.pread(fd, 1, 5000)[0] ^ 1]), 5000)


def shorten(fd: int) -> None:
    os.ftruncate(fd, 5000)


def lengthen(fd: int) -> None:
    os.ftruncate(fd, 200_000)


def forget(fd: int) -> None:
    """Drops everything that is known of it."""
    for name in os.listxattr(fd):
        os.removexattr(fd, name)


DAMAGES = [(flip, "bytes"), (shorten, "size"), (lengthen, "size"), (forget, "attributes")]
damages = pytest.mark.parametrize(("damage", "reason"), DAMAGES)


def harm_dram(pool: Pool, path: bytes, damage: Damage = flip) -> None:
    with os.fdopen(pool.tier.open(path, os.O_RDWR), "r+b") as file:
        damage(file.fileno())


def harm_ssd(storage: Storage, path: bytes, damage: Damage = flip) -> None:
    with os.fdopen(storage.tier.open(path, os.O_RDWR), "r+b") as file:
        damage(file.fileno())


def remove_dram(pool: Pool, path: bytes) -> None:
    os.unlink(b"/proc/self/fd/%d/" % pool.tier.root_fd + path)


def remove_ssd(storage: Storage, path: bytes) -> None:
    os.unlink(storage.tier.directory / os.fsdecode(path))
