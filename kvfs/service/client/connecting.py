"""From a path to a client."""

from __future__ import annotations

import os
from pathlib import Path

from kvfs import mounts
from kvfs.errors import NotMounted, NotPermitted, means_forbidden, means_no_daemon
from kvfs.service.client.asynchronous import AsyncClient
from kvfs.service.client.client import Client
from kvfs.service.client.core import Core
from kvfs.service.client.runtime import Threads


def require_mount(path: str | os.PathLike[str]) -> Path:
    """The mountpoint that a path names. Raises NotMounted where no live kvfs is mounted there, NotPermitted
    where it cannot be looked into, and UsageError for an empty path."""
    mountpoint = mounts.resolve_mountpoint(path)
    entries = mounts.find(mountpoint)
    if not entries or entries[-1].fstype != mounts.FSTYPE:
        what = f"{entries[-1].fstype} is mounted" if entries else "nothing is mounted"
        raise NotMounted(
            f"{what} at {mountpoint}: name the directory that kvfs mount was given; kvfs status lists them"
        )
    try:
        os.stat(mountpoint / ".kvfs")
    except OSError as error:
        if means_no_daemon(error):
            raise NotMounted(
                f"the daemon of {mountpoint} is gone: kvfs mount serves its pages again"
            ) from None
        if means_forbidden(error):
            raise NotPermitted(
                f"{mountpoint} cannot be entered by you: mount it with --owner or --mode for the user who "
                "runs this"
            ) from None
        raise
    return mountpoint


def connect(path: str | os.PathLike[str]) -> Client:
    """A client of the kvfs that is mounted at ``path``, for threads. Errors as ``require_mount``."""
    return Client(Core(require_mount(path), Threads()))


def connect_trio(path: str | os.PathLike[str]) -> AsyncClient:
    """The same for the tasks of one run of trio. It looks at the mount before it returns."""
    from kvfs.service.client.trio_runtime import Trio

    return AsyncClient(require_mount(path), Trio())


def connect_asyncio(path: str | os.PathLike[str]) -> AsyncClient:
    """The same for the tasks of one event loop of asyncio."""
    from kvfs.service.client.asyncio_runtime import Asyncio

    return AsyncClient(require_mount(path), Asyncio())
