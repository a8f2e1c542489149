"""What a directory must be to become an SSD tier, found out before anything in it is changed."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from pathlib import Path

from kvfs import mounts, syscalls
from kvfs.errors import NotPermitted, TierUnusable, UsageError, means_unsupported
from kvfs.page import shown
from kvfs.sizes import format_size
from kvfs.tiers import tmpfs
from kvfs.tiers.attributes import choose_attributes
from kvfs.tiers.ssd_attributes import RECORD, RecordAttributes
from kvfs.tiers.ssd_names import OWNER_FILE, is_reserved

ALIGNMENT = 4096
"""Bytes: what offsets, lengths and addresses of O_DIRECT are multiples of. Every disk of today takes it."""

MARK = stat.S_ISVTX
"""The sticky bit, which means nothing on a file: what carries it was made by us. It stays when attributes are
lost, and tells a damaged page from a file of somebody else."""

_ORDERED = frozenset(("ext4", "xfs"))


def refuse_overlap(directory: Path, mountpoint: Path, dram: Path, states: Path) -> None:
    """Raises UsageError where the tier would lie in its own mount, its DRAM or the state of mounts, or
    they in it; and where it would lie in another tier, whose pages it would take for its own."""
    for other, name in ((mountpoint, "the mount"), (dram, "its DRAM tier"), (states, "the state directory")):
        if directory == other:
            raise UsageError(f"--ssd {directory}: that is {name} itself; give a directory on a disk")
        if other in directory.parents:
            raise UsageError(f"--ssd {directory}: that lies in {name} {other}; give a directory on a disk")
        if directory in other.parents:
            raise UsageError(f"--ssd {directory}: {name} {other} lies in it; give a directory of its own")
    for parent in directory.parents:
        if os.path.lexists(parent / os.fsdecode(OWNER_FILE)):
            raise UsageError(
                f"--ssd {directory}: that lies in {parent}, an SSD directory of kvfs; give one of its own"
            )


def refuse_filesystem(directory: Path, capacity_bytes: int) -> None:
    """Raises UsageError where the directory, which may be missing, is or would be on a filesystem that cannot
    hold the tier. What else may be wrong with the path, ``open_directory`` says."""
    try:
        fd = _open_nearest(directory)
    except OSError:
        return
    try:
        entry, status = mounts.filesystem_with(os.fstat(fd).st_dev), os.fstatvfs(fd)
    finally:
        os.close(fd)
    if entry is not None and (entry.fstype == mounts.FSTYPE or entry.source == tmpfs.SOURCE):
        raise UsageError(f"--ssd {directory}: that is on a mount of kvfs; give a directory on a disk")
    size = status.f_blocks * status.f_frsize
    if not size:
        raise UsageError(f"--ssd {directory}: its filesystem has no room to give; name a directory on a disk")
    if capacity_bytes > size:
        raise UsageError(
            f"--ssd-capacity {format_size(capacity_bytes)} is more than {directory} can hold: its filesystem "
            f"has {format_size(size)}"
        )


def _open_nearest(directory: Path) -> int:
    """A descriptor of the directory, or of the one that it would be made in."""
    try:
        return os.open(directory, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return os.open(directory.parent, os.O_PATH | os.O_CLOEXEC)


def open_directory(directory: Path) -> tuple[int, bool]:
    """A descriptor of the directory, and whether it was made now, for its owner alone.

    Raises UsageError where the path is wrong, NotPermitted where the directory is not the caller's, and
    TierUnusable where it cannot be made.
    """
    made = False
    try:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
            made = True
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise UsageError(
            f"--ssd {directory}: {directory.parent} does not exist: is the disk mounted?"
        ) from None
    except NotADirectoryError:
        raise UsageError(f"--ssd {directory}: this path, or a part of it, is not a directory") from None
    except PermissionError:
        raise NotPermitted(f"{directory} is closed to you: use sudo, or a directory of your own") from None
    except OSError as error:
        raise TierUnusable(f"{directory} cannot be an SSD tier: {error.strerror}") from None
    if os.fstat(fd).st_uid != os.geteuid():
        os.close(fd)
        raise NotPermitted(f"{directory} belongs to somebody else, who could change what is in it: chown it")
    return fd, made


def filesystem_of(fd: int) -> str:
    """The type of the filesystem, "ext4" or "xfs"; "" where the list of mounts does not say."""
    entry = mounts.filesystem_with(os.fstat(fd).st_dev)
    return "" if entry is None else entry.fstype


def is_ordered(filesystem: str) -> bool:
    """Whether what was written past the cache is on the disk before any later change of a name is.

    ext4 and XFS write the bytes when O_DIRECT is given, note names in a journal, and have the disk empty its
    own cache before each commit of the journal. So a name implies its bytes, without an fsync for each page.
    """
    return filesystem in _ORDERED


def refuse_part(directory: Path, root_fd: int) -> None:
    """Raises TierUnusable for a directory without an owner that carries the record of one within a tier: it
    was moved out of its tier, or is mounted at another place too."""
    if any(name.endswith(f".kvfs.{RECORD}") for name in os.listxattr(root_fd)):
        raise TierUnusable(f"{directory} is a part of an SSD directory of kvfs: give an empty directory")


def attributes_with(directory: Path, root_fd: int, prefix: str) -> RecordAttributes:
    """Attributes with a prefix that was used before, or the best that there is where it is "".

    Raises TierUnusable where the filesystem has none, NotPermitted where we may not use those from before.
    """
    if prefix:
        try:
            os.setxattr(root_fd, prefix + "probe", b"")
            os.removexattr(root_fd, prefix + "probe")
        except PermissionError:
            raise NotPermitted(
                f"{directory} was filled by root, and only root can read what is known of its pages: use sudo"
            ) from None
        return RecordAttributes(prefix)
    best = choose_attributes(root_fd).prefix
    if not best:
        raise TierUnusable(
            f"{directory}: its filesystem ({filesystem_of(root_fd) or 'unknown'}) has no extended attributes "
            "for us, in which the digests are kept: use ext4 or XFS"
        )
    return RecordAttributes(best)


def refuse_foreign(directory: Path, root_fd: int) -> None:
    """Raises TierUnusable where there is a file or directory that is not ours."""
    foreign = _first_foreign(root_fd)
    if foreign is None:
        return
    name = shown(foreign)
    if os.path.lexists(os.path.join(os.fsencode(directory), foreign, OWNER_FILE)):
        raise TierUnusable(f"{directory} holds an SSD directory of kvfs, {name}: give one of its own")
    raise TierUnusable(f"{directory} holds something that is not ours, {name}: give an empty directory")


def _first_foreign(root_fd: int) -> bytes | None:
    """The path of the first file or directory found that is not ours; None when all are."""
    for path, directories, files, dir_fd in os.fwalk(b".", dir_fd=root_fd):
        if path == b".":
            directories[:] = [name for name in directories if not is_reserved(name)]
            files = [name for name in files if not is_reserved(name)]
        for name in (*directories, *files):
            with contextlib.suppress(FileNotFoundError):
                if not is_ours(os.stat(name, dir_fd=dir_fd, follow_symlinks=False)):
                    return os.path.normpath(os.path.join(path, name))
    return None


def is_ours(status: os.stat_result) -> bool:
    """Whether the tier made this file or directory."""
    mode = status.st_mode
    return bool(mode & MARK) and (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def probe_direct(dir_fd: int, name: bytes) -> str:
    """Writes, past the cache, a file of one block and reads it again: "" when that works, else why it does
    not.

    Leaves nothing. Raises OSError where not even an ordinary file can be written.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        try:
            fd = os.open(name, flags | os.O_DIRECT, 0o600, dir_fd=dir_fd)
        except OSError as error:
            if not means_unsupported(error):
                raise
            return f"open refuses O_DIRECT: {error.strerror}"
        try:
            return _try_direct(fd)
        finally:
            os.close(fd)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=dir_fd)


def _try_direct(fd: int) -> str:
    pattern = os.urandom(64) * (ALIGNMENT // 64)
    with mmap.mmap(-1, ALIGNMENT) as buffer:  # a mapping begins at a page of memory, and so is aligned
        buffer[:] = pattern
        try:
            written = os.pwritev(fd, [buffer], 0)
            buffer[:] = bytes(ALIGNMENT)
            read = os.preadv(fd, [buffer], 0)
        except OSError as error:
            if not means_unsupported(error):
                raise
            return f"open takes O_DIRECT, but reading or writing does not: {error.strerror}"
        if (written, read) != (ALIGNMENT, ALIGNMENT) or buffer[:] != pattern:
            return "what was written with O_DIRECT is not what was read"
    return ""


def allocate(fd: int, size: int) -> None:
    """Claims the blocks of a file before its bytes are moved, so that a full disk is noticed at once. Nothing
    happens where the filesystem cannot."""
    try:
        syscalls.fallocate(fd, 0, 0, size)
    except OSError as error:
        if not means_unsupported(error):
            raise
