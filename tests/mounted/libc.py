"""Two system calls that the standard library does not have."""

from __future__ import annotations

import ctypes
import os

_LIBC = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
RENAME_WHITEOUT = 4
FALLOC_KEEP_SIZE = 1
FALLOC_PUNCH_HOLE = 2
FALLOC_ZERO_RANGE = 16


def _check(result: int, path: str | None = None) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)


def renameat2(source: str, target: str, flags: int) -> None:
    """Rename with RENAME_* flags."""
    _check(_LIBC.renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags), source)


def fallocate(descriptor: int, mode: int, offset: int, length: int) -> None:
    """fallocate(2) itself; the C library's posix_fallocate would write zeros where it is refused."""
    _check(_LIBC.fallocate(descriptor, mode, ctypes.c_long(offset), ctypes.c_long(length)))


def map_shared(descriptor: int, size: int) -> int:
    """A shared writable mapping that, unlike the standard library's, keeps no descriptor; its address."""
    _LIBC.mmap.restype = ctypes.c_void_p
    protection, shared = 3, 1
    address: int = _LIBC.mmap(None, ctypes.c_size_t(size), protection, shared, descriptor, ctypes.c_long(0))
    _check(int(address == ctypes.c_void_p(-1).value))
    return address


def store(address: int, data: bytes) -> None:
    """Write to mapped memory."""
    ctypes.memmove(address, data, len(data))


def unmap(address: int, size: int) -> None:
    _check(_LIBC.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size)))
