"""Waiting in trio."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import trio

from kvfs.service.client.runtime import Event, Received

Result = TypeVar("Result")


class Trio:
    """Waits as a task of trio; each client belongs to one run of it."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def guard(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def event(self) -> trio.Event:
        return trio.Event()

    async def wait(self, event: Event, seconds: float) -> None:
        assert isinstance(event, trio.Event)
        with _limit(seconds):
            await event.wait()

    def adopt(self, connected: socket.socket, seconds: float) -> None:
        connected.setblocking(False)
        self._seconds = seconds

    async def send(self, connected: socket.socket, message: bytes) -> None:
        with _limit(self._seconds):
            while True:
                try:
                    connected.send(message)
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(connected)
                else:
                    return

    async def receive(self, connected: socket.socket, size: int, ancillary: int) -> Received:
        with _limit(self._seconds):
            await trio.lowlevel.wait_readable(connected)
        return connected.recvmsg(size, ancillary, socket.MSG_CMSG_CLOEXEC)  # nobody else receives

    async def call(self, function: Callable[[], Result]) -> Result:
        return await trio.to_thread.run_sync(function)

    async def sleep(self, seconds: float) -> None:
        await trio.sleep(seconds)

    async def shield(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        with trio.CancelScope(shield=True):
            result = await coroutine
        return result  # noqa: RET504 - mypy thinks that a scope may swallow what is raised in it


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """TimeoutError after so long, as all runtimes have it."""
    try:
        with trio.fail_after(seconds):
            yield
    except trio.TooSlowError:
        raise TimeoutError from None
