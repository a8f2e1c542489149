"""Reading, writing, seeking and allocating in the channel, where the kernel does not do it."""

from __future__ import annotations

import errno
import os
import random
import struct

import pytest

from tests.pure import fuse
from tests.pure.fuse import DATA, DRAFT, GID, MODE, PAGE, UID, UNKNOWN, PublishedFiles, Wire


def test_reading(wire: Wire, files: PublishedFiles) -> None:
    for node in (PAGE, DRAFT):
        for offset, size in ((0, 100), (5000, 100_000), (99_999, 1), (100_000, 10), (1 << 40, 10), (0, 0)):
            reply = wire.ask(fuse.READ, node, fuse.read_in(offset, size))
            assert reply.error == 0
            assert reply.payload == DATA[offset : offset + size]
    assert len(wire.ask(fuse.READ, PAGE, fuse.read_in(0, 0xFFFFFFFF)).payload) == len(DATA)
    assert wire.ask(fuse.READ, PAGE, fuse.read_in((1 << 64) - 1, 10)).error == -errno.EINVAL
    wire.pass_on(fuse.READ, UNKNOWN, fuse.read_in(0, 10))


def test_writing(wire: Wire, files: PublishedFiles) -> None:
    reply = wire.ask(fuse.WRITE, DRAFT, fuse.write_in(10, b"written"))
    assert fuse.WRITE_OUT.unpack(reply.payload) == (7,)
    assert files.content() == DATA[:10] + b"written" + DATA[17:]
    big = random.Random(1).randbytes(1 << 20)
    reply = wire.ask(fuse.WRITE, DRAFT, fuse.write_in(0, big))
    assert fuse.WRITE_OUT.unpack(reply.payload) == (1 << 20,)
    assert files.content() == big
    assert wire.ask(fuse.WRITE, DRAFT, fuse.write_in((1 << 64) - 1, b"x")).error < 0
    assert wire.channel.take_marks(DRAFT) == (False, False)
    wire.pass_on(fuse.WRITE, PAGE, fuse.write_in(0, b"not to a page"))
    assert os.pread(files.page, 1 << 20, 0) == DATA


def test_a_write_that_promises_more_than_it_brings_writes_what_it_brings(
    wire: Wire, files: PublishedFiles
) -> None:
    reply = wire.ask(fuse.WRITE, DRAFT, fuse.write_in(0, b"four", size=1 << 20))
    assert fuse.WRITE_OUT.unpack(reply.payload) == (4,)
    assert files.content() == b"four" + DATA[4:]


def test_growth_is_bounded_by_a_budget(wire: Wire, files: PublishedFiles) -> None:
    wire.channel.set_limits(1 << 20, 1000)
    assert wire.ask(fuse.WRITE, DRAFT, fuse.write_in(0, b"inside the file")).error == 0
    assert wire.ask(fuse.WRITE, DRAFT, fuse.write_in(len(DATA) - 5, bytes(105))).error == 0
    assert wire.channel.take_growth() == 100
    assert wire.channel.take_marks(DRAFT) == (False, False)
    assert wire.ask(fuse.WRITE, DRAFT, fuse.write_in(len(DATA), bytes(1001))).error == -errno.ENOSPC
    assert len(files.content()) == len(DATA) + 100
    assert wire.channel.take_marks(DRAFT) == (True, False)
    assert wire.channel.take_marks(DRAFT) == (False, False)
    assert wire.ask(fuse.WRITE, DRAFT, fuse.write_in(len(DATA) + 100, bytes(900))).error == 0
    assert wire.ask(fuse.WRITE, DRAFT, fuse.write_in(len(DATA) + 1000, b"1")).error == -errno.ENOSPC
    assert wire.channel.take_growth() == 900
    wire.channel.set_limits(1 << 20, -1)
    assert wire.ask(fuse.WRITE, DRAFT, fuse.write_in(len(DATA) + 1000, bytes(5000))).error == 0
    assert wire.channel.take_growth() == 0


def test_marks_outlive_a_publication(wire: Wire, files: PublishedFiles) -> None:
    wire.channel.set_limits(1 << 20, 0)
    wire.ask(fuse.WRITE, DRAFT, fuse.write_in(len(DATA), b"more"))
    files.publish_draft()
    assert wire.channel.take_marks(DRAFT) == (True, False)


def test_seeking_for_holes(wire: Wire, files: PublishedFiles) -> None:
    os.ftruncate(files.draft_writable, 0)
    os.pwrite(files.draft_writable, DATA[:4096], 1 << 20)
    for whence, offset, expected in (
        (os.SEEK_DATA, 0, os.lseek(files.draft_writable, 0, os.SEEK_DATA)),
        (os.SEEK_HOLE, 0, os.lseek(files.draft_writable, 0, os.SEEK_HOLE)),
    ):
        reply = wire.ask(fuse.LSEEK, DRAFT, fuse.lseek_in(offset, whence))
        assert fuse.LSEEK_OUT.unpack(reply.payload) == (expected,)
    assert wire.ask(fuse.LSEEK, DRAFT, fuse.lseek_in(1 << 30, os.SEEK_DATA)).error == -errno.ENXIO
    assert wire.ask(fuse.LSEEK, DRAFT, fuse.lseek_in(0, 77)).error == -errno.EINVAL
    assert wire.ask(fuse.LSEEK, UNKNOWN, fuse.lseek_in(0, os.SEEK_HOLE)).error == -errno.EINVAL


def test_seeking_in_a_page_without_a_descriptor(wire: Wire, files: PublishedFiles) -> None:
    """It has no holes. ENOSYS would have the kernel ask for no file any more."""
    wire.channel.publish(PAGE, -1, -1, 77, True, MODE, UID, GID, 0)
    wire.channel.describe(PAGE, 1000, 8, 1, 4096, 0, 0)

    def seek(offset: int, whence: int) -> int:
        reply = wire.ask(fuse.LSEEK, PAGE, fuse.lseek_in(offset, whence))
        return reply.error or int(fuse.LSEEK_OUT.unpack(reply.payload)[0])

    assert seek(0, os.SEEK_DATA) == 0
    assert seek(999, os.SEEK_DATA) == 999
    assert seek(5, os.SEEK_HOLE) == 1000
    assert seek(1000, os.SEEK_DATA) == -errno.ENXIO
    assert seek(0, 77) == -errno.EINVAL


def test_a_large_allocation_keeps_nobody_waiting(wire: Wire, files: PublishedFiles) -> None:
    size = 64 << 20
    wire.channel.set_limits(1 << 30, -1)
    first = wire.send(fuse.FALLOCATE, DRAFT, fuse.fallocate_in(0, size))
    second = wire.send(fuse.GETATTR, PAGE, bytes(16))
    replies = {reply.unique: reply for reply in (wire.reply(), wire.reply())}
    assert replies[second].error == 0
    assert replies[first].error == 0
    assert os.fstat(files.draft).st_size == size
    assert wire.channel.take_marks(DRAFT) == (False, True)
    too_many = wire.ask(fuse.FALLOCATE, DRAFT, fuse.fallocate_in(0, size, mode=0x1000))
    assert too_many.error == -errno.EOPNOTSUPP, "an error comes back from there as well"


def test_allocating(wire: Wire, files: PublishedFiles) -> None:
    wire.channel.set_limits(1 << 20, -1)
    assert wire.ask(fuse.FALLOCATE, DRAFT, fuse.fallocate_in(0, 200_000)) == (0, wire.unique, b"")
    assert len(files.content()) == 200_000
    assert wire.channel.take_marks(DRAFT) == (False, True)
    too_long = fuse.fallocate_in(1000, (1 << 20) - 999)
    assert wire.ask(fuse.FALLOCATE, DRAFT, too_long).error == -errno.EFBIG
    assert wire.channel.take_marks(DRAFT) == (False, False)
    assert wire.ask(fuse.FALLOCATE, DRAFT, fuse.fallocate_in(0, 10, mode=0x1000)).error < 0
    assert wire.ask(fuse.FALLOCATE, PAGE, fuse.fallocate_in(0, 10)).error == -errno.EOPNOTSUPP
    assert wire.ask(fuse.FALLOCATE, UNKNOWN, fuse.fallocate_in(0, 10)).error == -errno.EOPNOTSUPP
    wire.channel.set_limits(1 << 20, 100)
    keep_size = fuse.fallocate_in(0, 200_101, mode=1)
    assert wire.ask(fuse.FALLOCATE, DRAFT, keep_size).error == -errno.ENOSPC
    assert wire.channel.take_marks(DRAFT) == (True, False)


@pytest.mark.parametrize("error", [0, -errno.ENOSPC, -errno.EFBIG])
def test_an_allocation_without_room_is_asked_for_as_a_size(
    wire: Wire, files: PublishedFiles, error: int
) -> None:
    wire.channel.set_limits(1 << 20, 100)
    unique = wire.send(fuse.FALLOCATE, DRAFT, fuse.fallocate_in(0, 300_000))
    request = wire.forwarded()
    assert (request.opcode, request.unique, request.node) == (fuse.SETATTR, unique, DRAFT)
    size_is_valid = 1 << 3
    valid, _, _, size = struct.unpack_from("<IIQQ", request.body)
    assert (valid, size) == (size_is_valid, 300_000)
    attributes = b"" if error else bytes(104)
    assert wire.answer(request, attributes, error) == (error, unique, b"")
    assert wire.channel.take_marks(DRAFT) == (error == -errno.ENOSPC, error == 0)


def test_an_allocation_without_room_that_was_to_fill_holes_is_refused(
    wire: Wire, files: PublishedFiles
) -> None:
    os.ftruncate(files.draft_writable, 900_000)
    wire.channel.set_limits(1 << 20, 100)
    assert wire.ask(fuse.FALLOCATE, DRAFT, fuse.fallocate_in(0, 950_000)).error == -errno.ENOSPC
    assert wire.channel.take_marks(DRAFT) == (True, False)
