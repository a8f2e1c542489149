"""Look-ups: which names the channel knows, and of what it tells the kernel by itself."""

from __future__ import annotations

import os
import random
import sys

import pytest

from tests.pure import fuse
from tests.pure.fuse import (
    ATTR_OUT,
    DATA,
    DRAFT,
    ENTRY_OUT,
    GID,
    MODE,
    PAGE,
    UID,
    UNKNOWN,
    PublishedFiles,
    Wire,
)


def exists(wire: Wire, parent: int, name: bytes) -> bool:
    """Whether libfuse is asked for the name; if not, the kernel is told that there is none."""
    wire.send(fuse.LOOKUP, parent, name + b"\0")
    wire.send(fuse.LOOKUP, 5, b"end\0")  # always passed on
    request = wire.forwarded()
    if request.node == 5:
        reply = wire.reply()
        assert reply.error == 0
        assert ENTRY_OUT.unpack(reply.payload) == (0, 0, 3600, 0, 0, 0)
        return False
    assert (request.node, request.body) == (parent, name + b"\0")
    assert wire.forwarded().node == 5
    return True


def test_only_names_that_exist_are_passed_on(wire: Wire) -> None:
    assert not exists(wire, 1, b"name")
    wire.channel.name_add(1, b"name", UNKNOWN)
    assert exists(wire, 1, b"name")
    assert not exists(wire, 16, b"name")
    assert not exists(wire, 1, b"nam")
    assert not exists(wire, 1, b"name2")
    wire.channel.name_remove(1, b"name")
    assert not exists(wire, 1, b"name")
    wire.channel.name_remove(1, b"name")
    wire.channel.name_remove(1, b"never there")


def test_control_names_and_those_too_long_are_always_passed_on(wire: Wire) -> None:
    assert exists(wire, 1, b".kvfs")
    assert not exists(wire, 16, b".kvfs")
    assert exists(wire, 2, b"status")
    assert exists(wire, 1, b"n" * 256)
    assert not exists(wire, 1, b"n" * 255)


def test_where_names_are_not_all_known_each_is_asked_for(wire: Wire) -> None:
    wire.channel.set_names_complete(False)
    assert exists(wire, 1, b"name")
    wire.channel.set_names_complete(True)
    assert not exists(wire, 1, b"name")


def test_many_names_come_and_go(wire: Wire) -> None:
    """Against a dictionary: the map grows several times, and gaps close behind what is removed."""
    choices = random.Random(11)
    model: dict[tuple[int, bytes], int] = {}
    pool = [(choices.choice((1, 16, 17, 1 << 20)), b"name %d" % number) for number in range(6000)]
    for _ in range(40_000):
        key = choices.choice(pool)
        if choices.random() < (0.8 if len(model) < 4000 else 0.4):
            wire.channel.name_add(*key, UNKNOWN)
            model[key] = UNKNOWN
        elif key in model:
            wire.channel.name_remove(*key)
            del model[key]
    for key in choices.sample(pool, 1500):
        assert exists(wire, *key) == (key in model)
    for key in model:
        wire.channel.name_remove(*key)
    for key in choices.sample(pool, 500):
        assert not exists(wire, *key)


def test_a_name_is_kept_alive_for_as_long_as_it_is_there(wire: Wire) -> None:
    name = b"a name that nobody else has: %d" % random.getrandbits(64)
    before = sys.getrefcount(name)
    wire.channel.name_add(1, name, UNKNOWN)
    assert sys.getrefcount(name) == before + 1
    wire.channel.name_add(1, bytes(bytearray(name)), UNKNOWN)
    assert sys.getrefcount(name) == before, "an equal name replaces it"
    wire.channel.name_add(1, name, UNKNOWN)
    wire.channel.name_remove(1, bytes(bytearray(name)))
    assert sys.getrefcount(name) == before
    with pytest.raises(IndexError):
        wire.channel.name_add(1, name, 1 << 40)
    assert sys.getrefcount(name) == before


@pytest.mark.parametrize(("node", "seconds"), [(PAGE, 3600), (DRAFT, 0)])
def test_a_name_of_what_is_held_is_told_with_its_attributes(
    wire: Wire, files: PublishedFiles, node: int, seconds: int
) -> None:
    wire.channel.name_add(1, b"name", node)
    for count in (1, 2):
        payload = wire.ask(fuse.LOOKUP, 1, b"name\0").payload
        assert ENTRY_OUT.unpack(payload) == (node, 0, 3600, seconds, 0, 0)
        attributes = wire.ask(fuse.GETATTR, node, bytes(16)).payload
        assert payload[40:] == attributes[16:], "the same as GETATTR tells"
        assert count == 1 or wire.channel.take_lookups(node) == count
    assert wire.channel.take_lookups(node) == 0
    wire.ask(fuse.LOOKUP, 1, b"name\0")
    assert wire.channel.forget(node) == 1
    assert exists(wire, 1, b"name"), "what is not held any more is asked of libfuse"


def describe(wire: Wire, descriptor: int) -> os.stat_result:
    status = os.fstat(descriptor)
    wire.channel.describe(
        PAGE,
        status.st_size,
        status.st_blocks,
        status.st_nlink,
        status.st_blksize,
        status.st_atime_ns,
        status.st_mtime_ns,
    )
    return status


def test_a_page_without_a_descriptor_is_told_of_by_its_description(wire: Wire, files: PublishedFiles) -> None:
    wire.channel.name_add(1, b"name", PAGE)
    os.utime(files.page, ns=(-1_500_000_000, 1_234_567_890_123_456_789))
    by_descriptor = wire.ask(fuse.GETATTR, PAGE, bytes(16)).payload
    wire.channel.publish(PAGE, -1, -1, 77, True, MODE, UID, GID, 0)
    wire.pass_on(fuse.GETATTR, PAGE, bytes(16))
    wire.pass_on(fuse.LOOKUP, 1, b"name\0")
    describe(wire, files.page)
    assert wire.ask(fuse.GETATTR, PAGE, bytes(16)).payload == by_descriptor
    assert ATTR_OUT.unpack(by_descriptor)[4] == len(DATA)
    assert wire.ask(fuse.LOOKUP, 1, b"name\0").payload[40:] == by_descriptor[16:]
    wire.channel.publish(PAGE, -1, -1, 77, True, MODE, UID, GID + 1, 0)
    assert wire.ask(fuse.LOOKUP, 1, b"name\0").error == 0, "a change of owner is none of the file"
    files.publish_page()
    os.utime(files.page, ns=(5, 7))
    assert wire.ask(fuse.GETATTR, PAGE, bytes(16)).payload != by_descriptor, "the descriptor is asked again"
    wire.channel.publish(PAGE, -1, -1, 77, True, MODE, UID, GID, 0)
    wire.pass_on(fuse.GETATTR, PAGE, bytes(16))
