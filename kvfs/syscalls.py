"""The system calls that the standard library does not offer. The only module that uses ctypes.

Every function raises OSError with the kernel's errno, and lets other threads run while the kernel works.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Mapping
from typing import Any

PathLike = str | bytes | os.PathLike[str] | os.PathLike[bytes]

RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2

FALLOC_FL_KEEP_SIZE = 0x01
FALLOC_FL_PUNCH_HOLE = 0x02
FALLOC_FL_COLLAPSE_RANGE = 0x08
FALLOC_FL_ZERO_RANGE = 0x10
FALLOC_FL_INSERT_RANGE = 0x20

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_NOSYMFOLLOW = 0x100
MS_REMOUNT = 0x20
MS_NOATIME = 0x400
MS_STRICTATIME = 1 << 24
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 1 << 18

IOPRIO_NONE = 0
"""As the scheduler of the processor would have it."""
IOPRIO_IDLE = 3 << 13

MNT_FORCE = 1
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8

MADV_COLLAPSE = 25
_HUGEPAGE = 2 << 20

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_OPENAT2 = 437
_FSOPEN = 430
_FSCONFIG = 431
_FSMOUNT = 432
_OPEN_TREE = 428
_MOUNT_SETATTR = 442
_OPEN_TREE_CLONE = 1
_AT_EMPTY_PATH = 0x1000
_MOUNT_ATTR_RDONLY = 1
_FSOPEN_CLOEXEC = 1
_FSMOUNT_CLOEXEC = 1
_FSCONFIG_SET_FLAG = 0
_FSCONFIG_SET_STRING = 1
_FSCONFIG_CMD_CREATE = 6
_IOPRIO_WHO_PROCESS = 1
_PROT_NONE = 0
_PROT_READ = 1
_PROT_WRITE = 2
_MAP_SHARED = 0x01
_MAP_PRIVATE = 0x02
_MAP_FIXED = 0x10
_MAP_ANONYMOUS = 0x20
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_renameat2 = _libc.renameat2
_renameat2.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
_fallocate = _libc.fallocate64 if hasattr(_libc, "fallocate64") else _libc.fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_syncfs = _libc.syncfs
_syncfs.argtypes = (ctypes.c_int,)
_mount = _libc.mount
_mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
_umount2 = _libc.umount2
_umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
_mmap = _libc.mmap64 if hasattr(_libc, "mmap64") else _libc.mmap
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)
_mmap.restype = ctypes.c_void_p
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def _failure(path: PathLike | None = None, other: PathLike | None = None) -> OSError:
    number = ctypes.get_errno()
    if path is None:
        return OSError(number, os.strerror(number))
    if other is None:
        return OSError(number, os.strerror(number), os.fspath(path))
    return OSError(number, os.strerror(number), os.fspath(path), None, os.fspath(other))


def _uninterrupted(call: Callable[..., int], *arguments: Any) -> int:
    """Repeats a call that a signal cut short; between two attempts Python runs its own signal handlers."""
    while True:
        result = call(*arguments)
        if result >= 0 or ctypes.get_errno() != errno.EINTR:
            return result


def openat2(
    dir_fd: int,
    path: bytes,
    flags: int,
    mode: int = 0,
    resolve: int = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS,
) -> int:
    """Opens ``path`` from ``dir_fd`` without ever leaving that directory; returns a close-on-exec descriptor.

    ELOOP where a symlink is met, EXDEV where the path would climb out.
    """
    how = _OpenHow(flags | os.O_CLOEXEC, mode, resolve)
    fd = _uninterrupted(
        _syscall,
        ctypes.c_long(_OPENAT2),
        dir_fd,
        path,
        ctypes.byref(how),
        ctypes.c_size_t(ctypes.sizeof(how)),
    )
    if fd < 0:
        raise _failure(path)
    return fd


def renameat2(old_dir_fd: int, old: bytes, new_dir_fd: int, new: bytes, flags: int) -> None:
    """rename(2) with RENAME_NOREPLACE or RENAME_EXCHANGE."""
    if _renameat2(old_dir_fd, old, new_dir_fd, new, flags) < 0:
        raise _failure(old, new)


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """Allocates, punches out or zeroes ``length`` bytes at ``offset``; ``mode`` is made of FALLOC_FL_*."""
    if _uninterrupted(_fallocate, fd, mode, offset, length) < 0:
        raise _failure()


def syncfs(fd: int) -> None:
    """Waits until everything written to the filesystem of ``fd`` is on its disk."""
    if _uninterrupted(_syncfs, fd) < 0:
        raise _failure()


def set_io_priority(priority: int) -> None:
    """The calling thread's priority at disks from now on, IOPRIO_*. Nothing happens on processors that we do
    not know the number of the system call of."""
    number = _IOPRIO_SET.get(os.uname().machine)
    arguments = ctypes.c_int(_IOPRIO_WHO_PROCESS), ctypes.c_int(0), ctypes.c_int(priority)
    if number is not None and _syscall(ctypes.c_long(number), *arguments) < 0:
        raise _failure()


def mount(source: PathLike | None, target: PathLike, fstype: str | None, flags: int, data: str = "") -> None:
    """mount(2). ``data`` is the filesystem's own comma-separated options."""
    result = _mount(
        None if source is None else os.fsencode(source),
        os.fsencode(target),
        None if fstype is None else fstype.encode(),
        flags,
        data.encode() or None,
    )
    if result < 0:
        raise _failure(target)


def umount2(target: PathLike, flags: int = 0) -> None:
    """umount2(2), with MNT_DETACH, MNT_FORCE or UMOUNT_NOFOLLOW."""
    if _umount2(os.fsencode(target), flags) < 0:
        raise _failure(target)


def make_filesystem(fstype: str, options: Mapping[str, str | None]) -> int:
    """Makes a filesystem that is mounted nowhere; it vanishes when the descriptor that is returned is closed.

    An option without a value has the value None. Raises OSError when the kernel refuses one; its text is the
    kernel's own where it gives one.
    """
    context = int(_syscall(ctypes.c_long(_FSOPEN), fstype.encode(), ctypes.c_uint(_FSOPEN_CLOEXEC)))
    if context < 0:
        raise _failure()
    try:
        for option, value in options.items():
            if value is None:
                _configure(context, _FSCONFIG_SET_FLAG, option.encode(), None)
            else:
                _configure(context, _FSCONFIG_SET_STRING, option.encode(), value.encode())
        _configure(context, _FSCONFIG_CMD_CREATE, None, None)
    except BaseException:
        os.close(context)
        raise
    return context


def mount_detached(filesystem: int) -> int:
    """The root directory of what ``make_filesystem`` made, to open files from; it is on no path at all."""
    arguments = (ctypes.c_uint(_FSMOUNT_CLOEXEC), ctypes.c_uint(0))
    fd = int(_syscall(ctypes.c_long(_FSMOUNT), ctypes.c_int(filesystem), *arguments))
    if fd < 0:
        raise _failure()
    return fd


def clone_mount(dir_fd: int, *, read_only: bool = False) -> int:
    """The directory of a descriptor once more, as the root of a mount that is on no path at all; it lasts as
    long as anything that was opened from it. ``read_only``: writing through it is EROFS, whoever tries.

    Takes the right to mount, and Linux 5.2; ``read_only`` 5.12.
    """
    flags = ctypes.c_uint(_OPEN_TREE_CLONE | _AT_EMPTY_PATH | os.O_CLOEXEC)
    fd = int(_syscall(ctypes.c_long(_OPEN_TREE), ctypes.c_int(dir_fd), b"", flags))
    if fd < 0:
        raise _failure()
    if read_only:
        attributes = _MountAttributes(_MOUNT_ATTR_RDONLY)
        arguments = ctypes.byref(attributes), ctypes.c_size_t(ctypes.sizeof(attributes))
        flags = ctypes.c_uint(_AT_EMPTY_PATH)
        if _syscall(ctypes.c_long(_MOUNT_SETATTR), ctypes.c_int(fd), b"", flags, *arguments) < 0:
            error = _failure()
            os.close(fd)
            raise error
    return fd


def _configure(context: int, command: int, key: bytes | None, value: bytes | None) -> None:
    result = _syscall(
        ctypes.c_long(_FSCONFIG), ctypes.c_int(context), ctypes.c_uint(command), key, value, ctypes.c_int(0)
    )
    if result >= 0:
        return
    error = _failure()
    # The context also gives the kernel's words, one message a read: "e tmpfs: Unsupported parameter 'huge'".
    try:
        words = os.read(context, 1024).decode(errors="replace").strip()
    except OSError:
        raise error from None
    raise OSError(error.errno, words.removeprefix("e "))


def address_of(memory: mmap.mmap) -> int:
    """Where writable memory begins in the address space of this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def map_over(memory: mmap.mmap, offset: int, fd: int, length: int, *, writable: bool) -> None:
    """Puts the first ``length`` bytes of a file, shared, in the place of anonymous memory at ``offset``.

    ``memory`` must be writable, ``offset`` a multiple of the size of a page of memory. Unlike ``mmap.mmap``
    this keeps no descriptor: ``fd`` can be closed. ENOMEM where the process has as many mappings as it may.
    Python knows nothing of it: where the file is mapped for reading only, a write is SIGSEGV.
    """
    start = address_of(memory) + offset
    protection = _PROT_READ | _PROT_WRITE if writable else _PROT_READ
    if _mmap(start, length, protection, _MAP_SHARED | _MAP_FIXED, fd, 0) == _MAP_FAILED:
        raise _failure()


def collapse(fd: int, length: int) -> None:
    """Moves the first ``length`` bytes of a file, a multiple of 2 MiB, to hugepages. Takes milliseconds.

    The kernel collapses only where the address and the file's offset agree modulo 2 MiB, which an ordinary
    mmap does not promise: so room for an aligned mapping is reserved first. EINVAL where the kernel or the
    filesystem cannot; EAGAIN or ENOMEM where there is no free hugepage now.
    """
    span = length + _HUGEPAGE
    reserved = _mmap(None, span, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
    if reserved == _MAP_FAILED:
        raise _failure()
    try:
        aligned = -(-reserved // _HUGEPAGE) * _HUGEPAGE
        if _mmap(aligned, length, _PROT_READ, _MAP_SHARED | _MAP_FIXED, fd, 0) == _MAP_FAILED:
            raise _failure()
        if _uninterrupted(_madvise, aligned, length, MADV_COLLAPSE) < 0:
            raise _failure()
    finally:
        _munmap(reserved, span)
