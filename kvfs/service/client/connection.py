"""One connection to the daemon of a mount, shared by all that ask.

Nobody but those who wait for an answer receives: the first of them receives for all, and when it has its own
answer, the next one goes on. So a lone request costs one send and one receive, and no other thread or task.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Generic, TypeVar

from kvfs.errors import ConnectionLost, DaemonFailed
from kvfs.service.client.exchange import Exchange, Waiting, close_all, descriptors_in
from kvfs.service.client.runtime import Runtime

Answer = TypeVar("Answer")

ANSWER_SECONDS: Final = 60.0
"""How long an answer may take before the daemon is said to hang."""


class Connection(Generic[Answer]):
    """``decode`` gives the number of the request that a message answers, and the answer.

    ``largest`` is the length of the longest message in bytes, ``most_descriptors`` how many come with one.
    """

    def __init__(
        self,
        runtime: Runtime,
        connected: socket.socket,
        decode: Callable[[bytes], tuple[int, Answer]],
        largest: int,
        most_descriptors: int,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self._runtime = runtime
        self._socket = connected
        self._decode = decode
        self._largest = largest
        self._ancillary = socket.CMSG_SPACE(4 * most_descriptors)
        self._seconds = answer_seconds
        self._exchange: Exchange[Answer] = Exchange()
        runtime.adopt(connected, answer_seconds)

    async def ask(self, encode: Callable[[int], bytes]) -> tuple[Answer, list[int]]:
        """The answer to one request, with the descriptors that came with it: fewer than it speaks of where
        this process may open no more. ``encode`` gives the message, for the number of the request.

        Raises ConnectionLost, and DaemonFailed where no answer comes in time.
        """
        with self._runtime.guard():
            waiting = self._exchange.begin()
        try:
            await self._runtime.send(self._socket, encode(waiting.number))
            while not waiting.is_done:
                await self._turn(waiting)
        except TimeoutError:
            raise DaemonFailed(f"the daemon does not answer within {self._seconds:g} s: it hangs") from None
        except OSError as error:
            self._lose(error)
        finally:
            with self._runtime.guard():
                if not waiting.is_done:
                    self._exchange.give_up(waiting)
                if not self._exchange.is_received:
                    self._exchange.pass_on()
        if waiting.error is not None:
            raise waiting.error
        assert waiting.answer is not None
        return waiting.answer, waiting.descriptors

    async def _turn(self, waiting: Waiting[Answer]) -> None:
        """Receives until this answer is there; or waits, for that or for the turn to receive."""
        with self._runtime.guard():
            if waiting.is_done:
                return
            waiting.woken = self._runtime.event() if self._exchange.is_received else None
            self._exchange.is_received = True
        if waiting.woken is not None:
            await self._runtime.wait(waiting.woken, self._seconds)
            return
        try:
            while not waiting.is_done:
                await self._receive()
        finally:
            with self._runtime.guard():
                self._exchange.pass_on()

    async def _receive(self) -> None:
        message, ancillary, _, _ = await self._runtime.receive(self._socket, self._largest, self._ancillary)
        descriptors = descriptors_in(ancillary)
        if not message:
            close_all(descriptors)
            self._lose(None)
            return
        try:
            number, answer = self._decode(message)
        except BaseException:
            close_all(descriptors)
            raise
        with self._runtime.guard():
            self._exchange.settle(number, answer, descriptors)

    def _lose(self, error: OSError | None) -> None:
        reason = "it has ended" if error is None else error.strerror or str(error)
        with self._runtime.guard():
            self._exchange.fail(ConnectionLost(f"the daemon was asked and did not answer: {reason}"))

    def close(self) -> None:
        """Whoever still waits gets ConnectionLost."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._lose(None)
        self._socket.close()

    def leave(self) -> None:
        """Closes what a forked child has of it; the parent's goes on."""
        self._socket.close()
