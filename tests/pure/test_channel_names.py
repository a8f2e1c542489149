"""Which names the channel passes on: a set that grows and shrinks."""

from __future__ import annotations

import random
from collections import Counter

from tests.pure import fuse
from tests.pure.fuse import ENTRY_OUT, Wire


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
    wire.channel.name_add(1, b"name")
    assert exists(wire, 1, b"name")
    assert not exists(wire, 16, b"name")
    assert not exists(wire, 1, b"nam")
    assert not exists(wire, 1, b"name2")
    wire.channel.name_remove(1, b"name")
    assert not exists(wire, 1, b"name")


def test_control_names_and_those_too_long_are_always_passed_on(wire: Wire) -> None:
    assert exists(wire, 1, b".kvfs")
    assert not exists(wire, 16, b".kvfs")
    assert exists(wire, 2, b"status")
    assert exists(wire, 1, b"n" * 256)
    assert not exists(wire, 1, b"n" * 255)


def test_a_name_that_was_added_twice_has_to_be_removed_twice(wire: Wire) -> None:
    wire.channel.name_add(1, b"name")
    wire.channel.name_add(1, b"name")
    wire.channel.name_remove(1, b"name")
    assert exists(wire, 1, b"name")
    wire.channel.name_remove(1, b"name")
    assert not exists(wire, 1, b"name")
    wire.channel.name_remove(1, b"name")
    wire.channel.name_remove(1, b"never there")


def test_many_names_come_and_go(wire: Wire) -> None:
    """Against a multiset: the set grows several times, and gaps close behind what is removed."""
    choices = random.Random(11)
    model: Counter[tuple[int, bytes]] = Counter()
    pool = [(choices.choice((1, 16, 17, 1 << 20)), b"name %d" % number) for number in range(6000)]
    for _ in range(40_000):
        key = choices.choice(pool)
        if choices.random() < (0.8 if len(model) < 4000 else 0.4):
            wire.channel.name_add(*key)
            model[key] += 1
        elif model[key]:
            wire.channel.name_remove(*key)
            model[key] -= 1
    for key in choices.sample(pool, 1500):
        assert exists(wire, *key) == (model[key] > 0)
    for key, count in model.items():
        for _ in range(count):
            wire.channel.name_remove(*key)
    for key in choices.sample(pool, 500):
        assert not exists(wire, *key)
