"""Connections: the hello, what is no request, and clients that behave badly."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable

import pytest
import trio

from kvfs.errors import KvfsError, UsageError, VersionMismatch
from kvfs.pool import Pool
from kvfs.service import connection
from kvfs.service.messages import (
    LARGEST_MESSAGE,
    MOST_KEYS,
    VERSION,
    Exists,
    Failed,
    Hello,
    Open,
    Welcome,
    encode,
)
from kvfs.service.server import Service
from tests.batches.asking import Asking
from tests.batches.conftest import Ask
from tests.pool.files import page

Stranger = Callable[[Asking], None]


async def _serve(service: Service, stranger: Stranger) -> None:
    """Runs a client that has not said hello yet."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def client() -> None:
        with Asking(theirs) as asking:
            stranger(asking)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(service.serve, ours)
        await trio.to_thread.run_sync(client)


def _is_closed(client: Asking) -> bool:
    try:
        client.receive()
    except (EOFError, ConnectionError):
        return True
    return False


async def test_both_have_to_speak_the_same_version(service: Service) -> None:
    def stranger(client: Asking) -> None:
        answer, _ = client.ask(Hello(7, VERSION + 1))
        assert isinstance(answer, Failed)
        assert answer.code == VersionMismatch.errno
        assert "use the same kvfs" in answer.text
        assert _is_closed(client)

    await _serve(service, stranger)


async def test_the_first_message_is_a_hello(service: Service) -> None:
    def stranger(client: Asking) -> None:
        client.send(Exists(7, [b"key"]))
        answer, _ = client.receive()
        assert isinstance(answer, Failed)
        assert (answer.number, answer.code) == (0, UsageError.errno)
        assert _is_closed(client)

    await _serve(service, stranger)


async def test_what_is_no_request_ends_the_connection(service: Service) -> None:
    source = random.Random(1)
    packets = [source.randbytes(source.randrange(1, 300)) for _ in range(50)]
    packets += [encode(Exists(1, [b"k" * 3000] * 30)), b"\x93\x01\x02"]

    for packet in packets:

        def stranger(client: Asking, packet: bytes = packet) -> None:
            assert isinstance(client.greet(), Welcome)
            client.socket.send(packet)
            answer, _ = client.receive()
            assert isinstance(answer, Failed)
            assert (answer.number, answer.code) == (0, UsageError.errno)
            assert _is_closed(client)

        await _serve(service, stranger)


async def test_a_request_above_a_limit_is_refused_and_the_connection_goes_on(ask: Ask) -> None:
    def script(client: Asking) -> None:
        failure = client.failure(Exists(client.number(), [b"k"] * (MOST_KEYS + 1)))
        assert failure.code == UsageError.errno
        assert "1024" in failure.text
        assert client.failure(Hello(client.number())).code == UsageError.errno
        assert len(client.codes(Exists(client.number(), [b"k"] * MOST_KEYS))) == MOST_KEYS
        assert len(encode(Exists(1, [b"k" * 50] * MOST_KEYS))) < LARGEST_MESSAGE

    await ask(script)


async def test_descriptors_that_a_client_sends_are_nobodys(
    ask: Ask, open_descriptors_now: Callable[[], int]
) -> None:
    def script(client: Asking) -> None:
        before = open_descriptors_now()
        packet = encode(Exists(client.number(), [b"k"]))
        socket.send_fds(client.socket, [packet], [0] * 50)
        client.receive()
        assert open_descriptors_now() == before

    await ask(script)


@pytest.fixture
def open_descriptors_now() -> Callable[[], int]:
    return lambda: len(os.listdir("/proc/self/fd"))


async def test_who_takes_no_answers_is_let_go(
    pool: Pool, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SEND_SECONDS", 0.2)
    await page(pool, b"page", b"bytes")
    sent = 0

    def stranger(client: Asking) -> None:
        client.greet()
        with pytest.raises(ConnectionError):
            flood(client)

    def flood(client: Asking) -> None:
        nonlocal sent
        while True:
            client.send(Open(client.number(), [b"page"] * 200))
            sent += 1

    await _serve(service, stranger)
    assert sent > 1


async def test_requests_under_way_are_bounded(ask: Ask, service: Service) -> None:
    many = connection.MOST_REQUESTS + 40

    def script(client: Asking) -> None:
        for _ in range(many):
            client.send(Open(client.number(), [b"never"], 0.5))
        assert sorted(client.receive()[0].number for _ in range(many)) == list(range(2, many + 2))

    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, service.waiting)
            await trio.sleep(0.005)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await ask(script)
        nursery.cancel_scope.cancel()
    assert most == connection.MOST_REQUESTS


async def test_a_bug_is_told_and_logged_and_ends_nothing(
    pool: Pool, ask: Ask, monkeypatch: pytest.MonkeyPatch, expect_log: Callable[[str], None]
) -> None:
    expect_log("a request failed")

    def broken(*arguments: object) -> None:
        raise ZeroDivisionError

    await page(pool, b"page", b"bytes")
    find = "kvfs.service.reading.Finder.find"

    def script(client: Asking) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(find, broken)
            assert client.failure(Exists(client.number(), [b"page"])).code == KvfsError.errno
        assert client.codes(Exists(client.number(), [b"page"])) == [0]

    await ask(script)
