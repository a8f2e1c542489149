"""One connection that many share, against a server of the test's own."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from kvfs.errors import ConnectionLost, DaemonFailed
from kvfs.service.client.asyncio_runtime import Asyncio
from kvfs.service.client.connection import Connection
from kvfs.service.client.exchange import Exchange
from kvfs.service.client.runtime import Runtime, Threads, finish
from kvfs.service.client.trio_runtime import Trio

LARGEST = 1 << 16


def message(number: int, payload: bytes) -> bytes:
    return struct.pack("<q", number) + payload


def parsed(content: bytes) -> tuple[int, bytes]:
    return struct.unpack_from("<q", content)[0], content[8:]


class Server:
    """Answers each request with its own payload, ``at_once`` of them together in any order. The payload
    "files N" is answered with N descriptors, "end" by closing, "wait" after what comes next."""

    def __init__(self, at_once: int = 1) -> None:
        self.client, self._socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._at_once = at_once
        self._random = random.Random(at_once)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        waiting: list[bytes] = []
        with self._socket:
            while True:
                try:
                    request = self._socket.recv(LARGEST)
                except TimeoutError:
                    is_enough = True  # nobody else asks any more
                else:
                    payload = parsed(request)[1] if request else b"end"
                    if payload == b"end":
                        return
                    waiting.append(request)
                    is_enough = len(waiting) >= self._at_once and payload != b"wait"
                if is_enough:
                    self._random.shuffle(waiting)
                    while waiting:
                        self._answer(waiting.pop())
                is_held = bool(waiting) and parsed(waiting[-1])[1] == b"wait"
                self._socket.settimeout(None if is_held or not waiting else 0.02)

    def _answer(self, request: bytes) -> None:
        payload = parsed(request)[1]
        count = int(payload.split()[1]) if payload.startswith(b"files") else 0
        socket.send_fds(self._socket, [request], [0] * count)

    def close(self) -> None:
        self.client.close()
        self._thread.join()


@pytest.fixture
def served() -> Iterator[Callable[[int], Server]]:
    servers: list[Server] = []

    def serve(at_once: int) -> Server:
        servers.append(Server(at_once))
        return servers[-1]

    yield serve
    for server in servers:
        server.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def echo(connection: Connection[bytes], payload: bytes) -> list[int]:
    answer, files = await connection.ask(lambda number: message(number, payload))
    assert answer == payload
    return files


Serve = Callable[[int], Server]


@pytest.mark.parametrize("at_once", [1, 2, 8])
def test_threads_get_their_own_answers(served: Serve, at_once: int) -> None:
    connection = Connection(Threads(), served(at_once).client, parsed, LARGEST, 8)
    failures: list[BaseException] = []

    def work(name: int) -> None:
        try:
            for turn in range(200):
                assert not finish(echo(connection, b"%d of %d" % (turn, name)))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("at_once", [1, 2, 8])
def test_tasks_of_trio_get_their_own_answers(served: Serve, at_once: int) -> None:
    async def main() -> None:
        connection = Connection(Trio(), served(at_once).client, parsed, LARGEST, 8)

        async def work(name: int) -> None:
            for turn in range(100):
                assert not await echo(connection, b"%d of %d" % (turn, name))

        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                for name in range(8):
                    nursery.start_soon(work, name)

    trio.run(main)


@pytest.mark.parametrize("at_once", [1, 2, 8])
def test_tasks_of_asyncio_get_their_own_answers(served: Serve, at_once: int) -> None:
    async def main() -> None:
        connection = Connection(Asyncio(), served(at_once).client, parsed, LARGEST, 8)

        async def work(name: int) -> None:
            for turn in range(100):
                assert not await echo(connection, b"%d of %d" % (turn, name))

        async with asyncio.timeout(20):
            await asyncio.gather(*map(work, range(8)))

    asyncio.run(main())


def test_descriptors_come_with_their_answer(served: Serve) -> None:
    connection = Connection(Threads(), served(1).client, parsed, LARGEST, 8)
    before = descriptors()
    files = finish(echo(connection, b"files 5"))
    assert len(files) == 5
    assert descriptors() == before + 5
    for file in files:
        assert not os.get_inheritable(file)
        os.close(file)
    assert not finish(echo(connection, b"files 0"))


def test_what_a_cancelled_task_would_have_got_is_closed(served: Serve) -> None:
    async def main() -> None:
        connection = Connection(Trio(), served(1).client, parsed, LARGEST, 8)
        before = descriptors()
        for payload in (b"wait", b"wait"):
            with trio.move_on_after(0.05) as scope:
                await echo(connection, payload)
            assert scope.cancelled_caught

        async def cancelled() -> None:
            with trio.move_on_after(0.05):
                await echo(connection, b"wait")

        # One that receives for others is cancelled while they wait; the next takes its turn.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancelled)
            await trio.sleep(0.01)
            nursery.start_soon(cancelled)
            await trio.sleep(0.01)
            for file in await echo(connection, b"files 3"):
                os.close(file)
        with trio.CancelScope() as scope:
            scope.cancel()
            await connection.ask(lambda number: message(number, b"files 4"))
        assert not await echo(connection, b"after")
        assert descriptors() == before

    trio.run(main)


def test_a_connection_that_ends_is_lost_for_all(served: Serve) -> None:
    connection = Connection(Threads(), served(1).client, parsed, LARGEST, 8)
    lost: list[str] = []

    def work() -> None:
        try:
            finish(echo(connection, b"wait"))
        except ConnectionLost as error:
            lost.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    with pytest.raises(ConnectionLost):
        finish(echo(connection, b"end"))
    for thread in threads:
        thread.join(10)
    assert len(lost) == 4
    with pytest.raises(ConnectionLost):
        finish(echo(connection, b"again"))


@pytest.mark.parametrize(
    ("runtime", "run"),
    [(Threads, finish), (Trio, lambda asked: trio.run(lambda: asked)), (Asyncio, asyncio.run)],
    ids=["threads", "trio", "asyncio"],
)
def test_a_daemon_that_hangs_is_told(
    served: Serve, runtime: Callable[[], Runtime], run: Callable[[Coroutine[Any, Any, list[int]]], list[int]]
) -> None:
    connection = Connection(runtime(), served(1).client, parsed, LARGEST, 8, answer_seconds=0.1)
    asked = echo(connection, b"wait")
    with pytest.raises(DaemonFailed, match=r"0\.1 s"):
        run(asked)


@given(st.data())
def test_answers_in_any_order_find_their_requests(data: st.DataObject) -> None:
    exchange: Exchange[bytes] = Exchange()
    waiting = [exchange.begin() for _ in range(data.draw(st.integers(1, 20)))]
    given_up = data.draw(st.sets(st.sampled_from(waiting).map(lambda one: one.number)))
    for one in waiting:
        if one.number in given_up:
            exchange.give_up(one)
    for one in data.draw(st.permutations(waiting)):
        if data.draw(st.booleans()):
            exchange.settle(one.number, b"%d" % one.number, [])
            exchange.settle(one.number, b"twice", [])
    exchange.fail(ConnectionLost("gone"))
    for one in waiting:
        if one.number in given_up:
            assert not one.is_done
        else:
            assert one.answer == b"%d" % one.number or isinstance(one.error, ConnectionLost)
    assert exchange.begin().number not in [one.number for one in waiting]
