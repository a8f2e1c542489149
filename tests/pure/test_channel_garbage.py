"""Messages that no kernel and no libfuse sends."""

from __future__ import annotations

import errno
import os
import random
import socket
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.pure import fuse
from tests.pure.fuse import BACKING, DATA, DRAFT, PAGE, UNKNOWN, PublishedFiles, Wire


def drain(wire: Wire, sentinel: int) -> tuple[Counter[int], Counter[int]]:
    """Everything up to the reply to ``sentinel``: replies and passed-on requests, by their number."""
    replies: Counter[int] = Counter()
    while (reply := wire.reply()).unique != sentinel:
        replies[reply.unique] += 1
    passed_on: Counter[int] = Counter()
    wire.libfuse.setblocking(False)
    try:
        while True:
            passed_on[wire.forwarded().unique] += 1
    except BlockingIOError:
        pass
    wire.libfuse.settimeout(10)
    return replies, passed_on


@pytest.mark.parametrize("seed", range(3))
def test_messages_of_every_kind_and_length_are_answered_at_most_once(
    wire: Wire, files: PublishedFiles, seed: int
) -> None:
    choices = random.Random(seed)
    wire.channel.set_limits(1 << 20, -1)
    files.publish_page(backing_id=BACKING)
    for opcode in range(fuse.LAST_OPCODE + 1):
        sent = {}
        for length in range(129):
            node = choices.choice((0, 1, 2, PAGE, DRAFT, UNKNOWN, 4095, 4096, choices.getrandbits(64)))
            body = bytes(length) if length % 5 == 0 else choices.randbytes(length)
            sent[wire.send(opcode, node, body)] = length
        if opcode == fuse.FLUSH:
            time.sleep(0.3)  # those of drafts are answered by a thread of their own
        # A sentinel that the channel answers whatever happened to the table: no page has such an attribute.
        sentinel = wire.send(fuse.GETXATTR, 1, fuse.getxattr_in(b"security.capability"))
        replies, passed_on = drain(wire, sentinel)
        expected = 0 if opcode in (fuse.INTERRUPT, fuse.FORGET, fuse.BATCH_FORGET) else 1
        for unique, length in sent.items():
            times = replies[unique] + passed_on[unique]
            assert times == expected, f"opcode {opcode}, {length} bytes: {times} times"
        assert set(replies) | set(passed_on) <= set(sent)
    assert not wire.has_ended()
    assert os.pread(files.page, 1 << 20, 0) == DATA
    assert wire.channel.statistics()["reply_errors"] == 0


@pytest.mark.parametrize("length", [1, 16, 39])
def test_a_message_shorter_than_its_header_ends_the_channel(tmp_path: Path, length: int) -> None:
    tier = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    with fuse.wire(tier) as wire:
        wire.kernel.send(bytes(length))
        deadline = time.monotonic() + 5
        while not wire.has_ended():
            assert time.monotonic() < deadline
            time.sleep(0.001)
    os.close(tier)


def test_garbage_from_libfuse_goes_to_the_kernel_which_knows_better(
    wire: Wire, files: PublishedFiles
) -> None:
    choices = random.Random(3)
    files.publish_page(backing_id=BACKING)
    for _ in range(2000):
        unique = wire.send(choices.choice((fuse.OPEN, fuse.CREATE)), UNKNOWN, bytes(choices.randrange(8, 40)))
        request = wire.forwarded()
        assert request.unique == unique
        payload = choices.randbytes(choices.choice((0, 1, 15, 16, 17, 143, 144, 145, 300)))
        reply = wire.answer(request, payload, error=choices.choice((0, 0, -5)))
        assert len(reply.payload) == len(payload)


def test_a_request_that_finds_no_memory_is_refused_and_not_the_end(wire: Wire, files: PublishedFiles) -> None:
    wire.outer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # as little as there can be
    big = bytes(8) + b"user.name\0" + bytes(60_000)
    assert wire.ask(fuse.SETXATTR, PAGE, big).error == -errno.ENOMEM
    assert wire.pass_on(fuse.SETXATTR, PAGE, big[:1000]).body == big[:1000]
    assert not wire.has_ended()
