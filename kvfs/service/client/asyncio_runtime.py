"""Waiting in asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kvfs.service.client.runtime import Event, Received

Result = TypeVar("Result")


class Asyncio:
    """Waits as a task of asyncio; each client belongs to one event loop."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def guard(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def event(self) -> asyncio.Event:
        return asyncio.Event()

    async def wait(self, event: Event, seconds: float) -> None:
        assert isinstance(event, asyncio.Event)
        async with asyncio.timeout(seconds):
            await event.wait()

    def adopt(self, connected: socket.socket, seconds: float) -> None:
        connected.setblocking(False)
        self._seconds = seconds

    async def send(self, connected: socket.socket, message: bytes) -> None:
        async with asyncio.timeout(self._seconds):
            await asyncio.get_running_loop().sock_sendall(connected, message)

    async def receive(self, connected: socket.socket, size: int, ancillary: int) -> Received:
        async with asyncio.timeout(self._seconds):
            while True:
                with contextlib.suppress(BlockingIOError):
                    return connected.recvmsg(size, ancillary, socket.MSG_CMSG_CLOEXEC)
                await _readable(connected)

    async def call(self, function: Callable[[], Result]) -> Result:
        # A thread that fills somebody's memory is waited for, also by a task that is cancelled.
        return await _to_its_end(asyncio.get_running_loop().run_in_executor(None, function))

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def shield(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return await _to_its_end(asyncio.ensure_future(coroutine))


async def _to_its_end(future: asyncio.Future[Result]) -> Result:
    """The result of a future, which goes on where the task is cancelled; then it is waited for first."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        future.exception()  # or else it would be reported as never looked at
        raise cancelled
    return future.result()


async def _readable(connected: socket.socket) -> None:
    """Until there is something to receive; only one task may wait for a socket."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(connected, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connected)
