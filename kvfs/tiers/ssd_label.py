"""Telling a file that the tier made from a copy that somebody made of it.

Programs that copy files copy the mark (``ssd_directory.MARK``) too, and some the attributes. None copies the
inode flag that keeps dump(8) from backing up a file, which every page has: chattr(1) calls it "d".
Directories do not have it, because what is made in them would inherit it.
"""

from __future__ import annotations

import fcntl
import os
import struct
from typing import Final

_GET_FLAGS: Final = 0x80086601
_SET_FLAGS: Final = 0x40086602
_NO_DUMP: Final = 0x40
_FLAGS = struct.Struct("i")


def _flags(fd: int) -> int:
    (flags,) = _FLAGS.unpack(fcntl.ioctl(fd, _GET_FLAGS, bytes(_FLAGS.size)))
    return int(flags)


def label(fd: int) -> None:
    """Labels a file. Raises OSError where the filesystem has no such flags."""
    fcntl.ioctl(fd, _SET_FLAGS, _FLAGS.pack(_flags(fd) | _NO_DUMP))


def is_labelled(fd: int) -> bool:
    """Raises OSError where the filesystem has no such flags."""
    return bool(_flags(fd) & _NO_DUMP)


def can_label(dir_fd: int, name: bytes) -> bool:
    """Tries it with a file that is there only meanwhile."""
    fd = os.open(
        name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=dir_fd
    )
    try:
        if is_labelled(fd):  # it inherits the flag, which so tells nothing
            return False
        label(fd)
        return is_labelled(fd)
    except OSError:
        return False
    finally:
        os.close(fd)
        os.unlink(name, dir_fd=dir_fd)
