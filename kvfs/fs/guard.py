"""The edge at which errors become errno: no exception of a handler may end the mount."""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pyfuse3

from kvfs.counters import LimitedLog
from kvfs.errors import KvfsError

log = logging.getLogger("kvfs.fs")

HANDLERS = frozenset(
    {
        "access",
        "create",
        "flush",
        "forget",
        "fsync",
        "fsyncdir",
        "getattr",
        "getxattr",
        "link",
        "listxattr",
        "lookup",
        "mkdir",
        "mknod",
        "open",
        "opendir",
        "read",
        "readdir",
        "readlink",
        "release",
        "releasedir",
        "removexattr",
        "rename",
        "rmdir",
        "setattr",
        "setxattr",
        "statfs",
        "symlink",
        "unlink",
        "write",
    }
)
"""The coroutines that pyfuse3 calls."""

Handler = Callable[..., Awaitable[Any]]

_full_log = LimitedLog(log)


def guard_handler(handler: Handler, replies: bool = True) -> Handler:
    """The handler, with every exception turned into an errno for the program that made the call.

    Errors of the pool and of the tier are answers. Anything else is a bug: EIO, and a trace in the log the
    first time it is met in this handler.
    """
    seen: set[str] = set()

    @functools.wraps(handler)
    async def guarded(*arguments: Any, **keywords: Any) -> Any:
        try:
            return await handler(*arguments, **keywords)
        except pyfuse3.FUSEError:
            raise
        except KvfsError as error:
            code = error.errno
        except OSError as error:
            code = error.errno or errno.EIO
        except Exception as error:
            _report(handler.__name__, error, seen)
            code = errno.EIO
        if code == errno.ENOSPC:
            _full_log.warning("full", f"{handler.__name__}: no room: the pool is full of what is in use")
        if not replies:
            return None
        raise pyfuse3.FUSEError(code)

    return guarded


def _report(name: str, error: Exception, seen: set[str]) -> None:
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    kind = f"{type(error).__name__} at line {place.tb_lineno if place else 0}"
    if kind in seen:
        log.error("%s failed again: %s", name, kind)
    else:
        seen.add(kind)
        log.error("%s failed: the caller gets EIO", name, exc_info=error)


def guard(kind: type[pyfuse3.Operations]) -> type[pyfuse3.Operations]:
    """Class decorator: guards every handler, inherited ones of ours included."""
    for name in HANDLERS:
        handler = getattr(kind, name)
        if getattr(pyfuse3.Operations, name, None) is not handler:
            setattr(kind, name, guard_handler(handler, replies=name != "forget"))
    return kind
