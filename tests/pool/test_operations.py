"""The filesystem's handlers on a pool in process: what no program on a mount could bring about at will."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pyfuse3
import pytest
from pyfuse3 import FUSEError

from kvfs.fs.channel import KILLED_HANDLE, NATIVE_HANDLE, UNFLUSHED_HANDLE
from kvfs.fs.control import ControlFiles
from kvfs.fs.files import Files
from kvfs.fs.operations import Operations
from kvfs.index import SEALED
from kvfs.pool import Pool
from tests.conftest import LogGuard
from tests.pool import files
from tests.pool.checks import check_pool
from tests.pool.faces import KernelFace
from tests.pool.files import MIB, find, page, pattern, settled

ROOT = pyfuse3.ROOT_INODE
CONTEXT: Any = SimpleNamespace(uid=1000, gid=1000, pid=1, umask=0o022)
UPDATES = ("size", "mode", "uid", "gid", "atime", "mtime", "ctime")
DATA = pattern(100_000)
DIRECTORY_MODE = stat.S_IFDIR | 0o755


@pytest.fixture
def given(pool: Pool) -> Files:
    return Files(pool)


@pytest.fixture
def operations(pool: Pool, given: Files) -> Any:
    return Operations(pool, given, ControlFiles({b"status": lambda: b"fine\n"}, (0, 0)))


def fields(*updated: str) -> Any:
    return SimpleNamespace(**{f"update_{name}": name in updated for name in UPDATES})


def attributes(**values: int) -> pyfuse3.EntryAttributes:
    wanted = pyfuse3.EntryAttributes()
    for name, value in values.items():
        setattr(wanted, name, value)
    return wanted


async def refused(call: Any) -> int:
    with pytest.raises(FUSEError) as answer:
        await call
    number: int = answer.value.errno
    return number


class Listing:
    """Takes what readdir gives, a few names at a time as the kernel does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
        self.at_once = at_once
        self.room = 0
        self.given: list[tuple[bytes, int]] = []
        monkeypatch.setattr(pyfuse3, "readdir_reply", self.reply)

    def reply(self, _token: object, name: bytes, _attributes: pyfuse3.EntryAttributes, next_id: int) -> bool:
        if not self.room:
            return False
        self.room -= 1
        self.given.append((name, next_id))
        return True

    async def read(
        self, operations: Any, handle: int, meanwhile: Callable[[int], object] = bool
    ) -> list[bytes]:
        self.given = []
        place, rounds = 0, 0
        while True:
            before = len(self.given)
            self.room = self.at_once
            await operations.readdir(handle, place, None)
            if len(self.given) == before:
                return [name for name, _ in self.given]
            place = self.given[-1][1]
            rounds += 1
            meanwhile(rounds)


async def test_a_listing_leaves_out_what_vanished(
    pool: Pool, operations: Any, monkeypatch: pytest.MonkeyPatch, expect_log: LogGuard
) -> None:
    expect_log("gone from the tier behind our back")
    pool.idle.limit = 0
    for number in range(50):
        await page(pool, b"%02d" % number, b"bytes")
    for number in range(0, 50, 2):
        pool.tier.unlink(b"%02d" % number)
    listing = Listing(monkeypatch, at_once=7)
    handle = await operations.opendir(ROOT, CONTEXT)
    assert await listing.read(operations, handle) == [b"%02d" % number for number in range(1, 50, 2)]
    await operations.releasedir(handle)
    assert len(pool.index) == 26


async def test_a_listing_while_names_come_and_go(
    pool: Pool, operations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        await page(pool, b"%02d" % number, b"bytes")
    listing = Listing(monkeypatch, at_once=5)
    handle = await operations.opendir(ROOT, CONTEXT)

    def change(rounds: int) -> None:
        if rounds <= 5:
            os.close(pool.names.unlink(pool.index.root, b"%02d" % (25 + rounds - 1)))
            files.mkdir(pool, b"new %d" % rounds)

    given = await listing.read(operations, handle, change)
    assert len(given) == len(set(given))
    assert set(given) >= {b"%02d" % number for number in range(25)}
    assert [entry.lookups for entry in pool.index.root.children.values() if not entry.is_directory] == [
        1
    ] * 25
    given = await listing.read(operations, handle)
    assert set(given) == set(pool.index.root.children), "a listing that is rewound is a new one"
    await operations.releasedir(handle)


async def test_a_removed_entry_is_not_taken_for_its_namesake(pool: Pool, operations: Any) -> None:
    """What has no name any more is never looked for by the name that it had."""
    directory = (await operations.mkdir(ROOT, b"d", DIRECTORY_MODE, CONTEXT)).st_ino
    symlink = (await operations.symlink(directory, b"name", b"of the removed", CONTEXT)).st_ino
    inner = (await operations.mkdir(directory, b"inner", DIRECTORY_MODE, CONTEXT)).st_ino
    await operations.symlink(ROOT, b"name", b"of the namesake", CONTEXT)
    namesake = (await operations.mkdir(ROOT, b"inner", stat.S_IFDIR | 0o711, CONTEXT)).st_ino
    await operations.setxattr(namesake, b"user.secret", b"value", CONTEXT)
    await operations.unlink(directory, b"name", CONTEXT)
    await operations.rmdir(directory, b"inner", CONTEXT)
    assert (await operations.getattr(symlink, CONTEXT)).st_nlink == 0
    for call in (
        operations.readlink(symlink, CONTEXT),
        operations.getxattr(inner, b"user.secret", CONTEXT),
        operations.setxattr(inner, b"user.secret", b"other", CONTEXT),
        operations.listxattr(inner, CONTEXT),
        operations.removexattr(inner, b"user.secret", CONTEXT),
        operations.setattr(inner, attributes(st_atime_ns=1, st_mtime_ns=1), fields("atime"), None, CONTEXT),
    ):
        assert await refused(call) == errno.ESTALE
    assert await operations.getxattr(namesake, b"user.secret", CONTEXT) == b"value"
    assert stat.S_IMODE((await operations.getattr(namesake, CONTEXT)).st_mode) == 0o711
    for call in (
        operations.mkdir(inner, b"new", DIRECTORY_MODE, CONTEXT),
        operations.create(inner, b"new", 0o644, os.O_WRONLY, CONTEXT),
        operations.symlink(inner, b"new", b"target", CONTEXT),
    ):
        assert await refused(call) == errno.ENOENT
    for call in (
        operations.unlink(inner, b"secret", CONTEXT),
        operations.rename(inner, b"secret", ROOT, b"new", 0, CONTEXT),
    ):
        assert await refused(call) in (errno.ENOENT, errno.ESTALE)


async def test_the_mode_of_a_removed_directory_can_be_changed(operations: Any) -> None:
    number = (await operations.mkdir(ROOT, b"d", DIRECTORY_MODE, CONTEXT)).st_ino
    await operations.rmdir(ROOT, b"d", CONTEXT)
    reply = await operations.setattr(number, attributes(st_mode=0o700), fields("mode"), None, CONTEXT)
    assert stat.S_IMODE(reply.st_mode) == 0o700


async def test_numbers_that_mean_nothing_are_stale(operations: Any) -> None:
    for number in (15, 16, 99, 1 << 63):
        assert await refused(operations.getattr(number, CONTEXT)) == errno.ESTALE
        assert await refused(operations.open(number, os.O_RDONLY, CONTEXT)) == errno.ESTALE
        assert await refused(operations.lookup(number, b"name", CONTEXT)) == errno.ESTALE
        await operations.forget([(number, 1)])


async def test_a_file_that_somebody_else_made_first_is_opened(
    pool: Pool, operations: Any, given: Files
) -> None:
    entry = await page(pool, b"page", DATA)
    info, reply = await operations.create(ROOT, b"page", 0o644, os.O_WRONLY | os.O_CREAT, CONTEXT)
    assert reply.st_ino == entry.number
    assert entry.lookups == 1
    assert await refused(operations.create(ROOT, b"page", 0o644, os.O_EXCL, CONTEXT)) == errno.EEXIST
    await operations.release(info.fh)
    await settled(pool)
    assert files.is_intact(pool, b"page", DATA)
    assert len(given) == 0


@pytest.mark.parametrize(
    ("flag", "data", "stays"),
    [
        (0, b"bytes", True),
        (0, b"", True),
        (KILLED_HANDLE, b"bytes", False),
        (KILLED_HANDLE, b"", False),
        (UNFLUSHED_HANDLE, b"bytes", True),
        (UNFLUSHED_HANDLE, b"", False),
    ],
)
async def test_how_a_release_tells_of_the_end_of_a_writer(
    pool: Pool, operations: Any, expect_log: LogGuard, flag: int, data: bytes, stays: bool
) -> None:
    if not stays:
        expect_log("name is dropped: its writer was ended by a signal")
    info, reply = await operations.create(ROOT, b"name", 0o644, os.O_WRONLY, CONTEXT)
    entry = find(pool, b"name")
    if data:
        files.put(entry, data)
    await operations.release(info.fh | flag)
    await settled(pool)
    assert (pool.index.find(b"name") is entry) == stays
    assert (entry.state == SEALED) == (stays and data != b"")
    await operations.forget([(reply.st_ino, 1)])


async def test_a_reader_that_is_killed_takes_nothing_along(pool: Pool, operations: Any) -> None:
    entry = await page(pool, b"page", DATA)
    info = await operations.open(entry.number, os.O_RDONLY, CONTEXT)
    await operations.release(info.fh | KILLED_HANDLE)
    info = await operations.open(entry.number, os.O_RDONLY, CONTEXT)
    await operations.release(info.fh | UNFLUSHED_HANDLE)
    assert files.is_intact(pool, b"page", DATA)


async def test_a_release_that_was_withdrawn_ends_a_removed_page(
    pool: Pool, operations: Any, face: KernelFace
) -> None:
    entry = await page(pool, b"page", DATA)
    assert (await operations.lookup(ROOT, b"page", CONTEXT)).st_ino == entry.number
    fd = face.open_natively(entry)
    await operations.unlink(ROOT, b"page", CONTEXT)
    os.close(fd)
    face.records[entry.number].opens = 0
    await operations.release(NATIVE_HANDLE | entry.number)
    assert entry.holding is None
    assert pool.tier.room().used_bytes == 0
    await operations.release(NATIVE_HANDLE | 12345)  # of what is forgotten
    await operations.forget([(entry.number, 1)])
    check_pool(pool, face)


async def test_control_files_are_read_only_and_not_listed(
    operations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = (await operations.lookup(ROOT, b".kvfs", CONTEXT)).st_ino
    number = (await operations.lookup(directory, b"status", CONTEXT)).st_ino
    assert (await operations.getattr(number, CONTEXT)).st_size == 5
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC):
        assert await refused(operations.open(number, flags, CONTEXT)) == errno.EACCES
    info = await operations.open(number, os.O_RDONLY, CONTEXT)
    assert await operations.read(info.fh, 1, 3) == b"ine"
    await operations.release(info.fh)
    listing = Listing(monkeypatch, at_once=100)
    for parent, names in ((ROOT, []), (directory, [b"status"])):
        handle = await operations.opendir(parent, CONTEXT)
        assert await listing.read(operations, handle) == names
        await operations.releasedir(handle)
    for call in (
        operations.unlink(directory, b"status", CONTEXT),
        operations.rmdir(ROOT, b".kvfs", CONTEXT),
        operations.mkdir(directory, b"new", DIRECTORY_MODE, CONTEXT),
        operations.rename(directory, b"status", ROOT, b"new", 0, CONTEXT),
        operations.setattr(number, attributes(st_size=0), fields("size"), None, CONTEXT),
        operations.setxattr(number, b"user.mine", b"value", CONTEXT),
    ):
        assert await refused(call) == errno.EPERM
    assert await refused(operations.lookup(directory, b"missing", CONTEXT)) == errno.ENOENT


@pytest.mark.parametrize("tier", [16 * MIB], indirect=True)
async def test_a_size_beyond_half_of_the_pool_is_refused(pool: Pool, operations: Any) -> None:
    info, reply = await operations.create(ROOT, b"file", 0o644, os.O_WRONLY, CONTEXT)

    async def resize(size: int) -> Any:
        return await operations.setattr(
            reply.st_ino, attributes(st_size=size), fields("size"), info.fh, CONTEXT
        )

    assert await refused(resize(8 * MIB + 1)) == errno.EFBIG
    assert (await resize(8 * MIB)).st_size == 8 * MIB
    await operations.release(info.fh)
    await operations.forget([(reply.st_ino, 1)])
