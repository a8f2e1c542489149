"""Misses: names that were looked for in vain, told apart from those that a program was about to make."""

from __future__ import annotations

import struct
import time

import pytest

from tests.pure import fuse
from tests.pure.fuse import UNKNOWN, Wire

PATIENT = 0.12
"""Seconds after which a search that nothing came of is counted."""


def search(wire: Wire, name: bytes, task: int = 7, parent: int = 1) -> None:
    assert fuse.ENTRY_OUT.unpack(wire.ask(fuse.LOOKUP, parent, name + b"\0", task).payload)[0] == 0


def misses(wire: Wire) -> tuple[int, int]:
    """Names that were never there, and that were evicted."""
    time.sleep(PATIENT)
    return wire.channel.take_misses()


def test_a_name_looked_for_in_vain_is_a_miss_once_nobody_makes_it(wire: Wire) -> None:
    search(wire, b"page")
    assert wire.channel.take_misses() == (0, 0), "it may be made yet"
    assert misses(wire) == (1, 0)
    assert misses(wire) == (0, 0)
    for task in (7, 7, 7, 8, 7 + 256, 7):
        search(wire, b"page", task)
    assert misses(wire) == (3, 0), "the kernel asks twice of what it took to be there"
    search(wire, b"page")
    assert misses(wire) == (1, 0)


def made(opcode: int, name: bytes) -> bytes:
    """The body of a request by which a name is made in the directory 1."""
    if opcode == fuse.CREATE:
        return fuse.create_in(0, name)
    body = {
        fuse.MKNOD: struct.pack("<IIII", 0o644, 0, 0, 0),
        fuse.MKDIR: struct.pack("<II", 0o755, 0),
        fuse.SYMLINK: b"",
        fuse.LINK: struct.pack("<Q", UNKNOWN),
        fuse.RENAME: struct.pack("<Q", 1) + b"old\0",
        fuse.RENAME2: struct.pack("<QQ", 1, 0) + b"old\0",
    }[opcode]
    return body + name + b"\0" + (b"target\0" if opcode == fuse.SYMLINK else b"")


MAKING = [fuse.CREATE, fuse.MKNOD, fuse.MKDIR, fuse.SYMLINK, fuse.LINK, fuse.RENAME, fuse.RENAME2]


@pytest.mark.parametrize("opcode", MAKING)
def test_a_name_that_is_made_right_away_is_no_miss(wire: Wire, opcode: int) -> None:
    node = 16 if opcode in (fuse.RENAME, fuse.RENAME2) else 1  # those name the new directory in the body
    search(wire, b"page")
    wire.ask(fuse.LOOKUP, 1, b"page.tmp-123\0", 7)  # what is stored under another name first
    wire.pass_on(opcode, node, made(opcode, b"page"), 7)
    assert misses(wire) == (0, 0)


def test_a_task_may_look_for_some_names_before_it_makes_them(wire: Wire) -> None:
    """And the kernel looks once more for a name that is to be made with O_EXCL."""
    names = [b"page %d" % number for number in range(7)]
    for name in names:
        search(wire, name)
    for name in names:
        search(wire, name)
        wire.pass_on(fuse.CREATE, 1, fuse.create_in(0, name), 7)
    assert misses(wire) == (0, 0)


def test_of_many_names_that_a_task_looks_for_only_the_last_are_waited_for(wire: Wire) -> None:
    names = [b"page %d" % number for number in range(20)]
    for name in names:
        search(wire, name)
    assert wire.channel.take_misses() == (12, 0)
    for name in names:
        wire.pass_on(fuse.CREATE, 1, fuse.create_in(0, name), 7)
    assert misses(wire) == (0, 0)


@pytest.mark.parametrize("opcode", MAKING)
def test_another_name_or_another_task_or_a_late_store_leaves_the_miss(wire: Wire, opcode: int) -> None:
    search(wire, b"page")
    wire.pass_on(opcode, 1, made(opcode, b"pag"), 7)
    wire.pass_on(opcode, 1, made(opcode, b"page"), 8)
    wire.pass_on(opcode, 1, made(opcode, b"page"), 7 + 256)
    time.sleep(PATIENT)
    wire.pass_on(opcode, 1, made(opcode, b"page"), 7)
    assert misses(wire) == (1, 0)


@pytest.mark.parametrize("opcode", MAKING)
def test_requests_that_are_cut_short_make_nothing(wire: Wire, opcode: int) -> None:
    search(wire, b"page")
    whole = made(opcode, b"page")
    for length in range(whole.index(b"page") + 1):
        if opcode != fuse.CREATE or length >= len(fuse.open_in(0)):
            wire.pass_on(opcode, 1, whole[:length], 7)
    assert misses(wire) == (1, 0)


@pytest.mark.parametrize("name", [b".kvfs-probe", b".git", b"page.tmp", b"page_81f3.tmp", b"page.tmp.4711"])
def test_temporaries_are_never_missed(wire: Wire, name: bytes) -> None:
    search(wire, name)
    assert misses(wire) == (0, 0)


def test_what_was_evicted_is_missed_as_such_until_it_is_stored_again(wire: Wire) -> None:
    wire.channel.name_add(1, b"page", UNKNOWN)
    wire.channel.name_gone(1, b"page", True)
    wire.channel.name_remove(1, b"page")
    for name, task in ((b"page", 1), (b"other", 2), (b"page", 3)):
        search(wire, name, task)
    search(wire, b"page", 4, parent=16)
    assert misses(wire) == (2, 2)
    wire.channel.name_add(1, b"page", UNKNOWN)
    wire.channel.name_remove(1, b"page")
    search(wire, b"page")
    assert misses(wire) == (1, 0), "a program removed it"


def test_what_was_counted_when_it_was_found_damaged_is_not_counted_again(wire: Wire) -> None:
    wire.channel.name_gone(1, b"page", False)
    search(wire, b"page", 1)
    search(wire, b"page", 2)
    assert misses(wire) == (1, 0)


def test_what_libfuse_does_not_find_counts_as_well(wire: Wire) -> None:
    wire.channel.set_names_complete(False)
    wire.pass_on(fuse.LOOKUP, 1, b"page\0", 7)
    assert misses(wire) == (0, 0), "nobody knows yet whether it is there"
    wire.channel.name_searched(1, b"page", 7)
    wire.channel.name_searched(1, b"page.tmp", 7)
    assert misses(wire) == (1, 0)


def test_many_evicted_names_are_remembered(wire: Wire) -> None:
    names = [b"page %d" % number for number in range(5000)]
    for name in names:
        wire.channel.name_gone(1, name, True)
    for task, name in enumerate(names):
        search(wire, name, task)
    absent, evicted = misses(wire)
    assert absent + evicted == len(names)
    assert evicted > 0.97 * len(names), "only what fell on one place is forgotten"
