"""Random operations, from a seed: few names and few descriptors, so that they meet often."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable, Iterator

from tests.mounted import libc
from tests.mounted.operations import ROOT, USER, USER_ID, Operation

DIRECTORIES = ["d", "d/e", "g", "s"]
NAMES = ["a", "b", "c", "é\n\udcff", "n" * 255]
ODD_PATHS = ["n" * 256, "d/../a", "a/", "d/", "d/.", "missing/a", "a/b", "s/a", "."]
FILES = [*NAMES, "d/a", "d/b", "d/e/a", "g/a", "g/" + "m" * 255]
SIZES = [0, 1, 17, 4095, 4096, 4097, 10_000, 65_536, 100_003]
BIG = 2_600_000
OFFSETS = [0, 1, 100, 4096, 65_536, 1 << 40]
# Set-id bits have a test of their own: writes take them away on a tmpfs and leave them on the mount.
MODES = [0o666, 0o644, 0o600, 0o777, 0o755, 0o000, 0o1777]
TIMES = [0, 1, 981_173_106_123_456_789, 86_400_000_000_000]
ATTRIBUTES = ["user.a", "user.a", "user.a", "user.b", "user.kvfsless", "user." + "l" * 100]


class Generator:
    """An endless stream of operations that a seed determines."""

    def __init__(self, seed: int, *, users: bool, attributes: bool) -> None:
        self.random = random.Random(seed)
        self.users = users
        weights: dict[Callable[[], Operation], int] = {
            self.open: 30, self.close: 7, self.read: 10, self.write: 16, self.seek: 4, self.resize: 8,
            self.fallocate: 4, self.descriptor_metadata: 8, self.mapping: 8, self.copy: 4, self.rename: 12,
            self.link: 6, self.symlink: 4, self.unlink: 8, self.directory: 10, self.node: 3,
            self.path_metadata: 10, self.look: 14,
        }  # fmt: skip
        if attributes:
            weights[self.attribute] = 8
        self.makers = list(weights)
        self.weights = list(weights.values())

    def __iter__(self) -> Iterator[Operation]:
        while True:
            (maker,) = self.random.choices(self.makers, self.weights)
            who = USER if self.users and self.random.random() < 0.25 else ROOT
            yield who, *maker()

    def slot(self) -> int:
        return self.random.randrange(5)

    def path(self) -> str:
        kind = self.random.random()
        if kind < 0.06:
            return self.random.choice(ODD_PATHS)
        return self.random.choice(DIRECTORIES if kind < 0.22 else FILES)

    def size(self) -> int:
        return BIG if self.random.random() < 0.03 else self.random.choice(SIZES)

    def seed(self) -> int:
        return self.random.randrange(4093)

    def mode(self) -> int:
        return self.random.choice(MODES)

    def open(self) -> Operation:
        flags = self.random.choice([os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDWR])
        if self.random.random() < 0.6:
            flags |= os.O_CREAT
        for flag, chance in (
            (os.O_EXCL, 0.15), (os.O_TRUNC, 0.2), (os.O_APPEND, 0.2), (os.O_DIRECTORY, 0.03),
            (os.O_NOFOLLOW, 0.1), (os.O_SYNC, 0.05), (os.O_PATH, 0.03),
        ):  # fmt: skip
            if self.random.random() < chance:
                flags |= flag
        return "open", self.slot(), self.path(), flags, self.mode()

    def close(self) -> Operation:
        return "close", self.slot()

    def read(self) -> Operation:
        if self.random.random() < 0.5:
            return "read", self.slot(), self.size()
        return "pread", self.slot(), self.size(), self.random.choice(OFFSETS)

    def write(self) -> Operation:
        if self.random.random() < 0.6:
            return "write", self.slot(), self.seed(), self.size()
        return "pwrite", self.slot(), self.seed(), self.size(), self.random.choice(OFFSETS)

    def seek(self) -> Operation:
        if self.random.random() < 0.6:
            whence = self.random.choice([os.SEEK_SET, os.SEEK_CUR, os.SEEK_END])
            return "seek", self.slot(), self.random.choice([-1, 0, 1, 4096, 100_000]), whence
        whence = self.random.choice([os.SEEK_DATA, os.SEEK_HOLE])
        return "seek_data", self.slot(), self.random.choice([0, 1, 4096, 65_536, BIG]), whence

    def resize(self) -> Operation:
        size = self.random.choice([-1, self.size(), self.size(), self.size()])
        if self.random.random() < 0.5:
            return "ftruncate", self.slot(), size
        return "truncate", self.path(), size

    def fallocate(self) -> Operation:
        punch = libc.FALLOC_PUNCH_HOLE | libc.FALLOC_KEEP_SIZE
        mode = self.random.choice([0, 0, libc.FALLOC_KEEP_SIZE, punch, libc.FALLOC_ZERO_RANGE])
        return "fallocate", self.slot(), mode, self.random.choice([0, 1, 4096, 65_536]), self.size()

    def descriptor_metadata(self) -> Operation:
        slot = self.slot()
        return self.random.choice([
            ("fstat", slot), ("fstat", slot), ("fsync", slot), ("fchmod", slot, self.mode()),
            ("fchown", slot, *self.owner()), ("futime", slot, self.random.choice(TIMES)),
            ("same", slot, self.path()),
        ])  # fmt: skip

    def owner(self) -> tuple[int, int]:
        return self.random.choice([-1, 0, 1000, USER_ID]), self.random.choice([-1, 0, 1000, USER_ID])

    def mapping(self) -> Operation:
        private = self.random.random() < 0.3
        if self.random.random() < 0.5:
            return "map_read", self.slot(), private
        return "map_write", self.slot(), self.seed(), self.size(), self.random.choice(TIMES), private

    def copy(self) -> Operation:
        return "copy", self.slot(), self.slot(), self.size()

    def rename(self) -> Operation:
        if self.random.random() < 0.6:
            return "rename", self.path(), self.path()
        flags = self.random.choice([libc.RENAME_NOREPLACE, libc.RENAME_EXCHANGE])
        return "renameat2", self.path(), self.path(), flags

    def link(self) -> Operation:
        return "link", self.path(), self.path()

    def symlink(self) -> Operation:
        if self.random.random() < 0.4:
            return "readlink", self.path()
        text = self.random.choice(["a", "b", "d", "d/a", "nowhere", "s", "x" * 3000, ""])
        return "symlink", text, self.random.choice(["s", "c", "d/b", "g/a", "a"])

    def unlink(self) -> Operation:
        return "unlink", self.path()

    def directory(self) -> Operation:
        path = self.random.choice(DIRECTORIES) if self.random.random() < 0.8 else self.path()
        if self.random.random() < 0.35:
            return "rmdir", path
        return "mkdir", path, self.random.choice([0o777, 0o777, 0o755, 0o1777, 0o2775, 0o700])

    def node(self) -> Operation:
        kind = self.random.choice([stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFREG])
        return "mknod", self.path(), kind | self.mode() & 0o777

    def path_metadata(self) -> Operation:
        follow = self.random.random() < 0.6
        return self.random.choice([
            ("chmod", self.path(), self.mode()), ("chown", self.path(), *self.owner(), follow),
            ("utime", self.path(), self.random.choice(TIMES), follow),
        ])  # fmt: skip

    def look(self) -> Operation:
        path = self.path()
        access = self.random.choice([os.F_OK, os.R_OK, os.W_OK, os.X_OK, os.R_OK | os.W_OK])
        listed = self.random.choice([*DIRECTORIES, "."])
        return self.random.choice([
            ("stat", path), ("lstat", path), ("access", path, access), ("list", listed),
        ])  # fmt: skip

    def attribute(self) -> Operation:
        path, name = self.random.choice(["a", "a", "d", self.path()]), self.random.choice(ATTRIBUTES)
        value = self.random.choice([b"", b"value", b"\x00\xff", b"v" * 3000])
        flags = self.random.choice([0, 0, os.XATTR_CREATE, os.XATTR_REPLACE])
        return self.random.choice([
            ("setxattr", path, name, value, flags), ("setxattr", path, name, value, flags),
            ("getxattr", path, name), ("listxattr", path), ("removexattr", path, name),
        ])  # fmt: skip
