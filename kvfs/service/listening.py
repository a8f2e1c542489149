"""The socket `.kvfs/socket`: bound through the mount, so that whoever sees the mount can connect, also from
a container.

A bound socket keeps the mount through which it was bound busy. So it is bound through a copy of the mount
that is on no path, and the mount can be unmounted as any other. The copy then keeps the filesystem alive:
when the mount has left the list of mounts the service has to end. Where copying is not permitted, the socket
is in the state directory and `.kvfs/socket` a symlink to it.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from kvfs import from_outside, mounts, syscalls
from kvfs.service.messages import SOCKET

if TYPE_CHECKING:
    from kvfs.service.server import Service

BACKLOG = 128
IN_THE_STATE = "batch"
"""The name of the socket in the state directory, where it is there."""


async def _bind(directory_fd: int, name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        listener.setblocking(False)
        await from_outside.bind(listener, directory_fd, name)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


async def listen_through(mountpoint: Path) -> socket.socket:
    """A listening socket below the mount. PermissionError where mounts may not be copied."""
    directory = os.open(mountpoint, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        copy = syscalls.clone_mount(directory)
    finally:
        os.close(directory)
    try:
        return await _bind(copy, SOCKET)
    finally:
        os.close(copy)


async def listen_in(directory: Path) -> socket.socket:
    """A listening socket in the state directory; that of an earlier daemon goes."""
    with suppress(FileNotFoundError):
        (directory / IN_THE_STATE).unlink()
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return await _bind(fd, IN_THE_STATE)
    finally:
        os.close(fd)


async def wait_unmounted(device: str) -> None:
    """Until the filesystem with this device ("major:minor") is on no path any more that this process sees."""
    with ExitStack() as stack:
        watched = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, watched)
        changes = stack.enter_context(select.epoll())
        changes.register(watched, select.EPOLLPRI)
        while any(entry.device == device for entry in mounts.read_mountinfo()):
            await trio.lowlevel.wait_readable(changes.fileno())
            changes.poll(0)


class BatchSocket:
    """The socket of a mount, from the time at which that answers to its end."""

    def __init__(self, service: Service, mountpoint: Path, state: Path) -> None:
        self._service = service
        self._mountpoint = mountpoint
        self._state = state
        self._listener: socket.socket | None = None
        self.missing = "it is not open yet"
        """Why there is none; empty while there is one."""

    async def open(self, link: Callable[[bytes], None]) -> None:
        """``link`` is told of a path to which `.kvfs/socket` is to lead."""
        try:
            try:
                self._listener = await listen_through(self._mountpoint)
            except PermissionError:
                self._listener = await listen_in(self._state)
                link(os.fsencode(self._state / IN_THE_STATE))
        except OSError as error:
            self.missing = error.strerror or str(error)
        else:
            self.missing = ""

    async def serve(self, device: str) -> None:
        """Until the mount with this device has left every path: a connection keeps its filesystem alive."""
        if self._listener is None:
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._service.run, self._listener)
            await wait_unmounted(device)
            nursery.cancel_scope.cancel()
        self.missing = "the mount has ended"

    def degraded(self) -> list[str]:
        """What is off, each with its reason."""
        if self.missing:
            return [f"the batch socket is off: {self.missing}; clients go through the mount"]
        return self._service.degraded()

    def statistics(self) -> dict[str, Any]:
        """For status."""
        return {"active": not self.missing, "reason": self.missing, **self._service.statistics()}

    def close(self) -> None:
        """Nothing is served any more."""
        if self._listener is not None:
            self._listener.close()
        self._service.close()
