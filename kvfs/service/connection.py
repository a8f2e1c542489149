"""One client: its requests come in, and each is answered at once or by a task of its own."""

from __future__ import annotations

import array
import socket
from typing import TYPE_CHECKING

import trio

from kvfs.errors import ConnectionLost, UsageError, VersionMismatch
from kvfs.service.messages import (
    LARGEST_MESSAGE,
    VERSION,
    Hello,
    Request,
    Welcome,
    decode_request,
    encode,
)
from kvfs.service.peers import Peer
from kvfs.service.replies import Reply

if TYPE_CHECKING:
    from kvfs.service.server import Service

MOST_REQUESTS = 64
"""Requests of one connection under way at once; what comes beyond waits in the socket."""
SEND_SECONDS = 60.0
"""How long a client may leave an answer in the socket."""
TURN = 16
"""Requests of one connection that are answered before others have their turn."""

_buffer = bytearray(LARGEST_MESSAGE + 1)
"""For all connections: nobody else runs between a packet's arrival and its end."""


class Connection:
    """Belongs to the event loop, and owns the session of its client."""

    def __init__(self, service: Service, connected: socket.socket) -> None:
        self._service = service
        self._socket = connected
        self._session = service.begin(Peer.of(connected))
        self._sending = trio.Lock()
        self._under_way = trio.Semaphore(MOST_REQUESTS)

    async def run(self) -> None:
        """Until the client has gone. What it had under way ends then, and its drafts go."""
        try:
            async with trio.open_nursery() as nursery:
                if await self._greet():
                    await self._answer_all(nursery)
                nursery.cancel_scope.cancel()
        finally:
            self._service.ended(self._session)

    async def _receive(self) -> Request | None:
        """The next request; None at the end, and after a message that is none."""
        while True:
            try:
                length = self._socket.recv_into(_buffer)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._socket)
                continue
            except ConnectionError:
                return None
            if not length:
                return None
            try:
                if length > LARGEST_MESSAGE:
                    raise UsageError(f"a message has at most {LARGEST_MESSAGE} bytes")
                return decode_request(memoryview(_buffer)[:length])
            except UsageError as error:
                await self._send(self._service.failed(0, error))
                return None

    async def _greet(self) -> bool:
        """The hello. Says whether both speak the same version."""
        request = await self._receive()
        if request is None:
            return False
        if not isinstance(request, Hello):
            await self._send(self._service.failed(0, UsageError("the first message is to be a hello")))
            return False
        if request.version != VERSION:
            error = VersionMismatch(
                f"the client speaks version {request.version} of the protocol and the daemon {VERSION}: use "
                "the same kvfs for both, and mount anew after an upgrade"
            )
            await self._send(self._service.failed(request.number, error))
            return False
        await self._send(Reply(Welcome(request.number, VERSION, self._service.is_read_only)))
        return True

    async def _answer_all(self, nursery: trio.Nursery) -> None:
        count = 0
        while (request := await self._receive()) is not None:
            reply = self._service.answer_now(request, self._session)
            if reply is not None:
                await self._send(reply)
            else:
                await self._under_way.acquire()
                nursery.start_soon(self._answer, request)
            count += 1
            if count % TURN == 0:
                await trio.lowlevel.checkpoint()

    async def _answer(self, request: Request) -> None:
        try:
            await self._send(await self._service.answer(request, self._session))
        finally:
            self._under_way.release()

    async def _send(self, reply: Reply) -> None:
        """Raises ConnectionLost where the client has gone, or does not take its answers."""
        try:
            packet = encode(reply.answer)
            try:
                self._try_to_send(packet, reply.descriptors)
            except BlockingIOError:
                await self._send_later(packet, reply.descriptors)
        except OSError as error:
            raise ConnectionLost(f"an answer could not be sent: {error.strerror}") from None
        finally:
            reply.close()
        self._service.sent(reply, self._session)

    def _try_to_send(self, packet: bytes, descriptors: list[int]) -> None:
        if descriptors:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
            self._socket.sendmsg([packet], [rights], socket.MSG_NOSIGNAL)
        else:
            self._socket.send(packet, socket.MSG_NOSIGNAL)

    async def _send_later(self, packet: bytes, descriptors: list[int]) -> None:
        async with self._sending:
            with trio.move_on_after(SEND_SECONDS):
                while True:
                    await trio.lowlevel.wait_writable(self._socket)
                    try:
                        self._try_to_send(packet, descriptors)
                    except BlockingIOError:
                        continue
                    return
        raise ConnectionLost(f"the client takes no answer within {SEND_SECONDS:g} s")
