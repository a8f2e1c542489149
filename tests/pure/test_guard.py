"""Whatever a handler raises, the program that made the call gets an errno, and the next call works."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyfuse3
import pytest
import trio
from pyfuse3 import FUSEError

from kvfs import errors
from kvfs.counters import LimitedLog
from kvfs.errors import KvfsError
from kvfs.fs import control, guard
from kvfs.fs.control import ControlFiles
from kvfs.fs.files import Files
from kvfs.fs.guard import HANDLERS, guard_handler
from kvfs.fs.operations import Operations
from kvfs.pool import Pool
from tests.conftest import LogGuard
from tests.pure.plain import plain_pool

ROOT = pyfuse3.ROOT_INODE
CONTEXT: Any = SimpleNamespace(uid=1000, gid=1000, pid=1, umask=0o022)
UPDATES = ("size", "mode", "uid", "gid", "atime", "mtime", "ctime")
PARTS = ("_pool", "_files", "_control", "_attributes", "_listings", "_entry", "_directory", "_changing")


class Exploding:
    """Raises its error however it is used."""

    def __init__(self, error: BaseException) -> None:
        object.__setattr__(self, "error", error)

    def _explode(self, *_arguments: object, **_keywords: object) -> Any:
        raise object.__getattribute__(self, "error")

    __getattribute__ = __setattr__ = __call__ = __getitem__ = __setitem__ = __delitem__ = _explode
    __contains__ = __iter__ = __len__ = _explode


def fields(*updated: str) -> Any:
    return SimpleNamespace(**{f"update_{name}": name in updated for name in UPDATES})


def attributes(size: int = 0, mode: int = 0) -> pyfuse3.EntryAttributes:
    wanted = pyfuse3.EntryAttributes()
    wanted.st_size = size
    wanted.st_mode = pyfuse3.ModeT(mode)
    return wanted


class Mounted:
    """Operations on a real pool, and a valid call of each handler."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.files = Files(pool)
        self.operations: Any = Operations(
            pool, self.files, ControlFiles({b"status": lambda: b"fine\n"}, (0, 0))
        )
        self._serial = 0

    def name(self) -> bytes:
        self._serial += 1
        return b"name %d" % self._serial

    async def new_file(self) -> tuple[bytes, int]:
        """A file that was made and closed: its name and number."""
        name = self.name()
        info, reply = await self.operations.create(ROOT, name, 0o644, os.O_WRONLY, CONTEXT)
        await self.operations.release(info.fh)
        return name, reply.st_ino

    async def arguments(self, handler: str) -> tuple[Any, ...]:
        """What a call of the handler may be given now."""
        name, number = await self.new_file()
        match handler:
            case "lookup":
                return ROOT, name, CONTEXT
            case "forget":
                return ([(number, 1)],)
            case "getattr" | "statfs" | "readlink" | "opendir" | "listxattr":
                return await self._arguments_of_number(handler, number)
            case "setattr":
                return number, attributes(size=100), fields("size"), None, CONTEXT
            case "getxattr":
                return number, b"user.kvfs.tier", CONTEXT
            case "setxattr":
                return number, b"user.mine", b"value", CONTEXT
            case "removexattr":
                await self.operations.setxattr(number, b"user.mine", b"value", CONTEXT)
                return number, b"user.mine", CONTEXT
            case "create":
                return ROOT, self.name(), 0o644, os.O_RDWR, CONTEXT
            case "mknod":
                return ROOT, self.name(), stat.S_IFREG | 0o644, 0, CONTEXT
            case "mkdir":
                return ROOT, self.name(), stat.S_IFDIR | 0o755, CONTEXT
            case "symlink":
                return ROOT, self.name(), b"target", CONTEXT
            case "link":
                return number, ROOT, self.name(), CONTEXT
            case "unlink":
                return ROOT, name, CONTEXT
            case "rmdir":
                directory = self.name()
                await self.operations.mkdir(ROOT, directory, stat.S_IFDIR | 0o755, CONTEXT)
                return ROOT, directory, CONTEXT
            case "rename":
                return ROOT, name, ROOT, self.name(), 0, CONTEXT
            case "open":
                return number, os.O_RDONLY, CONTEXT
            case "read":
                info = await self.operations.open(control.FIRST_FILE_NUMBER, os.O_RDONLY, CONTEXT)
                return info.fh, 0, 100
            case "release":
                return ((await self.operations.open(number, os.O_RDONLY, CONTEXT)).fh,)
            case "readdir":
                return await self.operations.opendir(ROOT, CONTEXT), 0, None
            case "releasedir":
                return (await self.operations.opendir(ROOT, CONTEXT),)
            case "fsync" | "fsyncdir":
                return 1, False
        raise AssertionError(f"a handler that this test does not know: {handler}")

    async def _arguments_of_number(self, handler: str, number: int) -> tuple[Any, ...]:
        if handler == "statfs":
            return (CONTEXT,)
        if handler == "readlink":
            number = (await self.operations.symlink(ROOT, self.name(), b"target", CONTEXT)).st_ino
        return (ROOT if handler == "opendir" else number), CONTEXT

    async def call(self, handler: str) -> Any:
        return await getattr(self.operations, handler)(*await self.arguments(handler))

    async def call_broken(self, handler: str, error: BaseException) -> int:
        """A call in which everything that the handler touches raises: its errno, or 0."""
        arguments = await self.arguments(handler)
        parts = {part: getattr(self.operations, part) for part in PARTS}
        for part in PARTS:
            setattr(self.operations, part, Exploding(error))
        try:
            await getattr(self.operations, handler)(*arguments)
        except FUSEError as answer:
            return answer.errno
        finally:
            for part, whole in parts.items():
                setattr(self.operations, part, whole)
        return 0


@pytest.fixture(autouse=True)
def _readdir_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyfuse3, "readdir_reply", lambda *_arguments: True)


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Pool]:
    pool = plain_pool(tmp_path)
    yield pool
    pool.tier.close(keep=False)


@asynccontextmanager
async def mounted(pool: Pool) -> AsyncIterator[Mounted]:
    async with trio.open_nursery() as nursery:
        pool.start(nursery)
        yield Mounted(pool)
        await trio.sleep(0.01)  # drafts are let go of
        nursery.cancel_scope.cancel()


def run(pool: Pool, test: Callable[[Mounted], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(20):
            async with mounted(pool) as operations:
                await test(operations)

    trio.run(main)


OURS = sorted(name for name in HANDLERS if name in vars(Operations))
UNABLE_TO_FAIL = {"fsync", "fsyncdir"}
FAILING = [name for name in OURS if name not in UNABLE_TO_FAIL]


def test_every_handler_of_pyfuse3_is_guarded_or_inherited() -> None:
    known = {name for name in dir(pyfuse3.Operations) if not name.startswith("_")}
    settings = {"supports_dot_lookup", "enable_writeback_cache", "enable_acl"}
    answered_by_pyfuse3 = {"init", "poll", "stacktrace"}
    assert known - settings - HANDLERS <= answered_by_pyfuse3
    for name in OURS:
        assert hasattr(getattr(Operations, name), "__wrapped__"), f"{name} is not guarded"
    public = {name for name, value in vars(Operations).items() if callable(value) and name[0] != "_"}
    assert public == set(OURS)


@pytest.mark.parametrize("handler", FAILING)
def test_a_bug_in_a_handler_is_eio_and_one_trace(
    handler: str, plain: Pool, caplog: pytest.LogCaptureFixture, expect_log: LogGuard
) -> None:
    expect_log(f"{handler} failed: the caller gets EIO")
    expect_log(f"{handler} failed again: ZeroDivisionError")

    async def test(mounted: Mounted) -> None:
        for _ in range(3):
            code = await mounted.call_broken(handler, ZeroDivisionError("of a test"))
            assert code == (0 if handler == "forget" else errno.EIO)
            await mounted.call(handler)

    run(plain, test)
    traces = [record for record in caplog.records if record.exc_info]
    assert len(traces) == 1
    assert traces[0].levelno == logging.ERROR
    assert "ZeroDivisionError" in str(traces[0].exc_info)


@pytest.mark.parametrize("kind", [RecursionError, MemoryError, AssertionError, KeyError, ExceptionGroup])
def test_any_exception_is_eio(kind: type[Exception], plain: Pool, expect_log: LogGuard) -> None:
    expect_log("getattr failed: the caller gets EIO")
    error = ExceptionGroup("several", [OSError(errno.ENOENT, "inside")]) if kind is ExceptionGroup else kind()

    async def test(mounted: Mounted) -> None:
        assert await mounted.call_broken("getattr", error) == errno.EIO
        await mounted.call("getattr")

    run(plain, test)


def all_errors() -> list[type[KvfsError]]:
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, KvfsError)]


@pytest.mark.parametrize("handler", FAILING)
def test_errors_of_the_pool_and_of_the_tier_are_answers(
    handler: str, plain: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent:
        def warning(self, *_arguments: object) -> None: ...

    monkeypatch.setattr(guard, "_full_log", Silent())

    async def test(mounted: Mounted) -> None:
        cases: list[tuple[Exception, int]] = [(kind("of a test"), kind.errno) for kind in all_errors()]
        cases += [(OSError(number, os.strerror(number)), number) for number in (errno.EMFILE, errno.ENOSPC)]
        cases += [(OSError("without a number"), errno.EIO), (FUSEError(errno.EXDEV), errno.EXDEV)]
        for error, number in cases:
            if handler == "forget" and isinstance(error, FUSEError):
                continue
            code = await mounted.call_broken(handler, error)
            assert code == (0 if handler == "forget" else number), error
        await mounted.call(handler)

    run(plain, test)


def test_want_of_room_is_told_once_a_second(
    plain: Pool, caplog: pytest.LogCaptureFixture, expect_log: LogGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_full_log", LimitedLog(guard.log))
    expect_log("create: no room")

    async def test(mounted: Mounted) -> None:
        for _ in range(1000):
            with pytest.raises(FUSEError) as answer:
                await refuse()
            assert answer.value.errno == errno.ENOSPC

    async def create() -> None:
        raise OSError(errno.ENOSPC, "full")

    refuse = guard_handler(create)
    run(plain, test)
    assert 1 <= len(caplog.messages) <= 3


def test_a_bug_elsewhere_in_the_same_handler_has_its_own_trace(
    caplog: pytest.LogCaptureFixture, expect_log: LogGuard
) -> None:
    expect_log("fickle failed")

    async def fickle(place: int) -> None:
        if place == 1:
            raise ValueError("at one line")
        raise ValueError("at another")

    guarded = guard_handler(fickle)

    async def main() -> None:
        for place in (1, 2, 1, 2):
            with pytest.raises(FUSEError):
                await guarded(place)

    trio.run(main)
    assert [record.exc_info is not None for record in caplog.records] == [True, True, False, False]


def test_the_end_of_the_mount_is_not_swallowed() -> None:
    async def waiting() -> None:
        await trio.sleep_forever()

    async def main() -> bool:
        with trio.move_on_after(0.01) as scope:
            await guard_handler(waiting)()
        return scope.cancelled_caught

    assert trio.run(main)
