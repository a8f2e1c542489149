"""How the client waits: the one thing in which a thread, trio and asyncio differ.

Everything else is written once, as coroutines that wait through a ``Runtime`` only. That of threads waits by
blocking, so its coroutines never suspend: ``finish`` runs one to its end within the call.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")
Received = tuple[bytes, list[tuple[int, int, bytes]], int, Any]
"""What ``socket.recvmsg`` returns."""


class Event(Protocol):
    """Something that happens once."""

    def set(self) -> None: ...


class Runtime(Protocol):
    """What the client needs of whatever runs it."""

    def guard(self) -> AbstractContextManager[Any]:
        """A lock for state that is changed without waiting in between; one event loop needs none."""

    def event(self) -> Event: ...

    async def wait(self, event: Event, seconds: float) -> None:
        """Until the event has happened. Raises TimeoutError after ``seconds``."""

    def adopt(self, connected: socket.socket, seconds: float) -> None:
        """Makes a socket one that ``send`` and ``receive`` wait for, for at most ``seconds``."""

    async def send(self, connected: socket.socket, message: bytes) -> None: ...

    async def receive(self, connected: socket.socket, size: int, ancillary: int) -> Received:
        """One message, with what came beside it. Raises TimeoutError."""

    async def call(self, function: Callable[[], Result]) -> Result:
        """A call that waits for a filesystem or moves many bytes: an event loop gives it to a thread."""

    async def sleep(self, seconds: float) -> None: ...

    async def shield(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Runs it to its end, also where the task is cancelled."""


def finish(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        result: Result = ended.value
        return result
    coroutine.close()
    raise AssertionError("a coroutine of the client waited by other means than the runtime of threads")


class Threads:
    """Waits by blocking the calling thread."""

    def __init__(self) -> None:
        self._guard = threading.Lock()

    def guard(self) -> threading.Lock:
        return self._guard

    def event(self) -> threading.Event:
        return threading.Event()

    async def wait(self, event: Event, seconds: float) -> None:
        assert isinstance(event, threading.Event)
        if not event.wait(seconds):
            raise TimeoutError

    def adopt(self, connected: socket.socket, seconds: float) -> None:
        # Python's own time-outs ask the kernel twice for each message.
        connected.setblocking(True)
        whole = int(seconds)
        interval = struct.pack("@ll", whole, int((seconds - whole) * 1e6))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)

    async def send(self, connected: socket.socket, message: bytes) -> None:
        try:
            connected.send(message)
        except BlockingIOError:
            raise TimeoutError from None

    async def receive(self, connected: socket.socket, size: int, ancillary: int) -> Received:
        try:
            return connected.recvmsg(size, ancillary, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            raise TimeoutError from None

    async def call(self, function: Callable[[], Result]) -> Result:
        return function()

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - the caller has no event loop

    async def shield(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return await coroutine
