"""Filesystem operations that can be written down, performed on any directory, and compared by their results.

An operation is a tuple: who performs it (``ROOT`` or ``USER``), its name, and its arguments, all literals, so
that a printed log can be performed again. Descriptors are numbered slots, paths are relative. The result is a
value, or the name of the errno.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.mounted import libc
from tests.mounted.tree import stat_fields, user_attributes

Operation = tuple[Any, ...]
ROOT, USER = "root", "user"
#: The ordinary user of the tests, and the group.
USER_ID = 65534

_PATTERN = b"".join(hashlib.sha256(bytes([number])).digest() for number in range(256)) * 512


def pattern(seed: int, size: int) -> bytes:
    """Bytes that depend on ``seed`` and do not repeat with the page size."""
    return _PATTERN[seed % 4093 : seed % 4093 + size]


@contextlib.contextmanager
def acting_as(who: str) -> Iterator[None]:
    """Effective user and group of an operation; only root can be anyone else."""
    if who == ROOT:
        yield
        return
    os.setegid(USER_ID)
    os.seteuid(USER_ID)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


class Side:
    """One of the directories that are compared, with its open descriptors."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.slots: dict[int, int] = {}

    def perform(self, operation: Operation) -> object:
        """The result of an operation, or the name of its errno."""
        who, name, *arguments = operation
        try:
            with acting_as(who):
                return getattr(self, name)(*arguments)
        except OSError as error:
            return errno.errorcode[error.errno or 0]
        except KeyError:
            return "no descriptor in this slot"

    def at(self, path: str) -> str:
        return f"{self.root}/{path}"

    def close_all(self) -> None:
        for descriptor in self.slots.values():
            os.close(descriptor)
        self.slots.clear()

    def readers_of(self, path: str) -> list[int]:
        """The slots that hold the file behind ``path`` open for reading only."""
        try:
            found = os.stat(self.at(path))
        except OSError:
            return []
        return [
            slot
            for slot, descriptor in self.slots.items()
            if is_reader(descriptor) and os.path.samestat(os.fstat(descriptor), found)
        ]

    def _size(self, slot: int) -> int:
        return os.fstat(self.slots[slot]).st_size

    # Descriptors

    def open(self, slot: int, path: str, flags: int, mode: int) -> None:
        opened = os.open(self.at(path), flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
        if slot in self.slots:
            os.close(self.slots.pop(slot))
        self.slots[slot] = opened

    def close(self, slot: int) -> None:
        os.close(self.slots.pop(slot))

    def read(self, slot: int, count: int) -> tuple[int, str]:
        return summary(os.read(self.slots[slot], count))

    def pread(self, slot: int, count: int, offset: int) -> tuple[int, str]:
        return summary(os.pread(self.slots[slot], count, offset))

    def write(self, slot: int, seed: int, count: int) -> int:
        descriptor = self.slots[slot]
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            position = os.lseek(descriptor, 0, os.SEEK_CUR)
            os.lseek(descriptor, min(position, self._size(slot)), os.SEEK_SET)
        return os.write(descriptor, pattern(seed, count))

    def pwrite(self, slot: int, seed: int, count: int, offset: int) -> int:
        return os.pwrite(self.slots[slot], pattern(seed, count), min(offset, self._size(slot)))

    def seek(self, slot: int, offset: int, whence: int) -> int | str:
        if stat.S_ISDIR(os.fstat(self.slots[slot]).st_mode):
            return "a position in a directory has no meaning of its own"
        return os.lseek(self.slots[slot], offset, whence)

    def seek_data(self, slot: int, offset: int, whence: int) -> str:
        """SEEK_DATA and SEEK_HOLE: where holes are is the filesystem's business, the end of a file is not."""
        if stat.S_ISDIR(os.fstat(self.slots[slot]).st_mode):
            return "a directory has no holes"
        size = self._size(slot)
        try:
            found = os.lseek(self.slots[slot], offset, whence)
        except OSError as error:
            if error.errno != errno.ENXIO or offset >= size:
                raise
            found = size
        os.lseek(self.slots[slot], 0, os.SEEK_SET)
        return "inside" if offset <= found <= size else f"outside: {found}"

    def ftruncate(self, slot: int, size: int) -> None:
        os.ftruncate(self.slots[slot], size)

    def fallocate(self, slot: int, mode: int, offset: int, length: int) -> None:
        libc.fallocate(self.slots[slot], mode, offset, length)

    def fsync(self, slot: int) -> None:
        os.fsync(self.slots[slot])

    def fstat(self, slot: int) -> tuple[object, ...]:
        return stat_fields(os.fstat(self.slots[slot]))

    def fchmod(self, slot: int, mode: int) -> None:
        os.fchmod(self.slots[slot], mode)

    def fchown(self, slot: int, user: int, group: int) -> None:
        os.fchown(self.slots[slot], user, group)

    def futime(self, slot: int, when: int) -> None:
        os.utime(self.slots[slot], ns=(when, when + 1))

    def same(self, slot: int, path: str) -> bool:
        """Whether a path leads to the file of a descriptor."""
        return os.path.samestat(os.fstat(self.slots[slot]), os.stat(self.at(path)))

    def copy(self, source: int, target: int, count: int) -> int | str:
        if not all(stat.S_ISREG(os.fstat(self.slots[slot]).st_mode) for slot in (source, target)):
            return "only files are copied"
        size = min(self._size(source), count)
        start = self._size(target)
        done = 0
        while done < size:
            moved = os.copy_file_range(
                self.slots[source], self.slots[target], size - done, done, start + done
            )
            if moved == 0:
                break
            done += moved
        return done

    def map_read(self, slot: int, private: bool) -> object:
        if not self._size(slot) or not stat.S_ISREG(os.fstat(self.slots[slot]).st_mode):
            return "nothing to map"
        flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        with mmap.mmap(self.slots[slot], 0, flags=flags, prot=mmap.PROT_READ) as mapping:
            return summary(mapping[:])

    def map_write(self, slot: int, seed: int, count: int, when: int, private: bool) -> object:
        """Write through a mapping, then set the time: POSIX leaves open when a mapping changes it."""
        size = self._size(slot)
        if not size or not stat.S_ISREG(os.fstat(self.slots[slot]).st_mode):
            return "nothing to map"
        flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        count = min(count, size)
        with mmap.mmap(self.slots[slot], 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapping:
            mapping[size - count :] = pattern(seed, count)
            seen = summary(mapping[:])
            if not private:
                mapping.flush()
        os.utime(self.slots[slot], ns=(when, when + 1))
        return seen

    # Paths

    def truncate(self, path: str, size: int) -> None:
        os.truncate(self.at(path), size)

    def rename(self, source: str, target: str) -> None:
        os.rename(self.at(source), self.at(target))

    def renameat2(self, source: str, target: str, flags: int) -> None:
        libc.renameat2(self.at(source), self.at(target), flags)

    def link(self, source: str, target: str) -> None:
        os.link(self.at(source), self.at(target))

    def symlink(self, text: str, path: str) -> None:
        os.symlink(text, self.at(path))

    def readlink(self, path: str) -> str:
        return os.readlink(self.at(path))

    def unlink(self, path: str) -> None:
        os.unlink(self.at(path))

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self.at(path), mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self.at(path))

    def mknod(self, path: str, mode: int) -> None:
        os.mknod(self.at(path), mode)

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self.at(path), mode)

    def chown(self, path: str, user: int, group: int, follow: bool) -> None:
        os.chown(self.at(path), user, group, follow_symlinks=follow)

    def utime(self, path: str, when: int, follow: bool) -> None:
        os.utime(self.at(path), ns=(when, when + 1), follow_symlinks=follow)

    def stat(self, path: str) -> tuple[object, ...]:
        return stat_fields(os.stat(self.at(path)))

    def lstat(self, path: str) -> tuple[object, ...]:
        return stat_fields(os.lstat(self.at(path)))

    def access(self, path: str, mode: int) -> bool:
        return os.access(self.at(path), mode, effective_ids=True)

    def list(self, path: str) -> list[tuple[str, bool, bool]]:
        with os.scandir(self.at(path)) as entries:
            return sorted(
                (entry.name, entry.is_dir(follow_symlinks=False), entry.is_symlink()) for entry in entries
            )

    def setxattr(self, path: str, name: str, value: bytes, flags: int) -> None:
        os.setxattr(self.at(path), name, value, flags)

    def getxattr(self, path: str, name: str) -> bytes:
        return os.getxattr(self.at(path), name)

    def listxattr(self, path: str) -> dict[str, bytes]:
        return user_attributes(self.at(path))

    def removexattr(self, path: str, name: str) -> None:
        os.removexattr(self.at(path), name)


def summary(data: bytes) -> tuple[int, str]:
    """How many bytes, and which."""
    return len(data), hashlib.md5(data).hexdigest()[:12]


def is_reader(descriptor: int) -> bool:
    """Whether a descriptor is open for reading only, and not merely as a path."""
    text = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
    flags = int(text.split("flags:")[1].split()[0], 8)
    return flags & os.O_ACCMODE == os.O_RDONLY and not flags & os.O_PATH
