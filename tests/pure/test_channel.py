"""The native half of the channel, driven without a kernel."""

from __future__ import annotations

import errno
import os
import stat
import time
from pathlib import Path

import pytest

from tests.pure import fuse
from tests.pure.fuse import (
    ATTR_OUT,
    BACKING,
    DRAFT,
    ENTRY_OUT,
    FOPEN_KEEP_CACHE,
    FOPEN_NOFLUSH,
    FOPEN_PASSTHROUGH,
    GID,
    MODE,
    NATIVE_HANDLE,
    OPEN_OUT,
    PAGE,
    UID,
    UNKNOWN,
    PublishedFiles,
    Wire,
)


def opened(reply: fuse.Reply) -> tuple[int, int, int]:
    """Handle, flags and backing id."""
    assert reply.error == 0
    handle, flags, backing_id = OPEN_OUT.unpack(reply.payload)
    return handle, flags, backing_id


# Opening for reading


def test_a_page_is_opened_natively_and_counted(wire: Wire, files: PublishedFiles) -> None:
    for expected in (1, 2, 3):
        reply = wire.ask(fuse.OPEN, PAGE, fuse.open_in(os.O_RDONLY | os.O_CLOEXEC))
        assert opened(reply) == (NATIVE_HANDLE | PAGE, FOPEN_NOFLUSH | FOPEN_KEEP_CACHE, 0)
        assert wire.channel.opens(PAGE) == expected
    assert wire.channel.take_touched() == [(PAGE, 3)]
    assert wire.channel.take_touched() == []
    wire.ask(fuse.OPEN, PAGE, fuse.open_in(os.O_RDONLY))
    assert wire.channel.take_touched() == [(PAGE, 1)]
    assert wire.channel.statistics() == {"answered": 4, "forwarded": 0, "reply_errors": 0}


def test_a_page_with_a_backing_file_is_opened_in_passthrough(wire: Wire, files: PublishedFiles) -> None:
    files.publish_page(backing_id=BACKING)
    reply = wire.ask(fuse.OPEN, PAGE, fuse.open_in(os.O_RDONLY))
    assert opened(reply) == (NATIVE_HANDLE | PAGE, FOPEN_NOFLUSH | FOPEN_PASSTHROUGH, BACKING)


@pytest.mark.parametrize(
    ("node", "flags"),
    [
        (PAGE, os.O_WRONLY),
        (PAGE, os.O_RDWR),
        (PAGE, os.O_RDONLY | os.O_TRUNC),
        (DRAFT, os.O_RDONLY),
        (UNKNOWN, os.O_RDONLY),
        (4095, os.O_RDONLY),
        (4096, os.O_RDONLY),
        ((1 << 64) - 1, os.O_RDONLY),
    ],
)
def test_all_other_opens_are_passed_on(wire: Wire, files: PublishedFiles, node: int, flags: int) -> None:
    request = wire.pass_on(fuse.OPEN, node, fuse.open_in(flags))
    assert request.body == fuse.open_in(flags)
    assert wire.channel.take_touched() == []


def test_the_reply_to_an_open_that_was_passed_on_gets_the_backing_file(
    wire: Wire, files: PublishedFiles
) -> None:
    files.publish_draft(backing_id=BACKING)
    for flags, extra in ((os.O_RDONLY, FOPEN_NOFLUSH), (os.O_RDWR, 0), (os.O_WRONLY, 0)):
        request = wire.pass_on(fuse.OPEN, DRAFT, fuse.open_in(flags))
        reply = wire.answer(request, OPEN_OUT.pack(5, FOPEN_KEEP_CACHE, 0))
        assert opened(reply) == (5, FOPEN_PASSTHROUGH | extra, BACKING)


def test_without_a_backing_file_the_reply_keeps_its_flags(wire: Wire, files: PublishedFiles) -> None:
    request = wire.pass_on(fuse.OPEN, DRAFT, fuse.open_in(os.O_RDONLY))
    reply = wire.answer(request, OPEN_OUT.pack(5, FOPEN_KEEP_CACHE, 99))
    assert opened(reply) == (5, FOPEN_KEEP_CACHE | FOPEN_NOFLUSH, 0)


def test_an_error_and_the_replies_to_other_requests_pass_unchanged(wire: Wire, files: PublishedFiles) -> None:
    files.publish_draft(backing_id=BACKING)
    request = wire.pass_on(fuse.OPEN, DRAFT, fuse.open_in(os.O_RDWR))
    assert wire.answer(request, error=-errno.ESTALE) == (-errno.ESTALE, request.unique, b"")
    request = wire.pass_on(fuse.OPENDIR, DRAFT, fuse.open_in(os.O_RDONLY))
    payload = OPEN_OUT.pack(5, 0, 0)
    assert wire.answer(request, payload).payload == payload
    request = wire.pass_on(fuse.OPEN, DRAFT, fuse.open_in(os.O_RDWR))
    assert wire.answer(request, payload + b"longer").payload == payload + b"longer"


def test_a_created_file_gets_its_backing_file(wire: Wire, files: PublishedFiles) -> None:
    files.publish_draft(backing_id=BACKING)
    request = wire.pass_on(fuse.CREATE, 1, fuse.create_in(os.O_WRONLY | os.O_CREAT, b"new"))
    entry = ENTRY_OUT.pack(DRAFT, 0, 1, 2, 3, 4)
    reply = wire.answer(request, entry + OPEN_OUT.pack(6, 0, 0))
    assert reply.payload[: ENTRY_OUT.size] == entry
    assert OPEN_OUT.unpack(reply.payload[ENTRY_OUT.size :]) == (6, FOPEN_PASSTHROUGH, BACKING)
    request = wire.pass_on(fuse.CREATE, 1, fuse.create_in(os.O_WRONLY | os.O_CREAT, b"new"))
    short = OPEN_OUT.pack(6, 0, 0)
    assert wire.answer(request, short).payload == short


# Attributes


@pytest.mark.parametrize("nanoseconds", [-1, 0, 1])
def test_the_time_of_change_is_the_last_of_the_bytes_or_of_the_rest(
    wire: Wire, files: PublishedFiles, nanoseconds: int
) -> None:
    modified = 987_654_321_000_000_001
    os.utime(files.page, ns=(1, modified))
    for changed in (modified + nanoseconds, modified + nanoseconds * 10**9):
        wire.channel.publish(PAGE, files.page, -1, 0, True, MODE, UID, GID, changed)
        fields = ATTR_OUT.unpack(wire.ask(fuse.GETATTR, PAGE, bytes(16)).payload)
        assert fields[8] * 10**9 + fields[11] == max(modified, changed)


def test_the_size_of_a_directory_says_nothing(wire: Wire, tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    wire.channel.publish(UNKNOWN, fd, -1, 0, False, stat.S_IFDIR | 0o755, UID, GID, 0)
    fields = ATTR_OUT.unpack(wire.ask(fuse.GETATTR, UNKNOWN, bytes(16)).payload)
    assert fields[4] == 0
    assert fields[12] == stat.S_IFDIR | 0o755
    os.close(fd)


@pytest.mark.parametrize(("node", "valid"), [(PAGE, 3600), (DRAFT, 0)])
def test_attributes_of_what_is_held_are_those_of_the_file(
    wire: Wire, files: PublishedFiles, node: int, valid: int
) -> None:
    fd = files.page if node == PAGE else files.draft
    os.utime(fd, ns=(1_234_567_890_123_456_789, 987_654_321_987_654_321))
    status = os.fstat(fd)
    reply = wire.ask(fuse.GETATTR, node, bytes(16))
    assert ATTR_OUT.unpack(reply.payload) == (
        valid,
        0,
        0,
        node,
        status.st_size,
        status.st_blocks,
        *(
            nanoseconds // 10**9
            for nanoseconds in (status.st_atime_ns, status.st_mtime_ns, status.st_mtime_ns)
        ),
        *(
            nanoseconds % 10**9
            for nanoseconds in (status.st_atime_ns, status.st_mtime_ns, status.st_mtime_ns)
        ),
        MODE,
        1,
        UID,
        GID,
        0,
        status.st_blksize,
    )


def test_attributes_of_anything_else_are_passed_on(wire: Wire, files: PublishedFiles) -> None:
    for node in (1, UNKNOWN, 1 << 40):
        wire.pass_on(fuse.GETATTR, node, bytes(16))
    wire.channel.publish(UNKNOWN, 1 << 20, -1, 0, False, MODE, UID, GID, 0)  # a descriptor that is closed
    wire.pass_on(fuse.GETATTR, UNKNOWN, bytes(16))
    wire.channel.forget(UNKNOWN)


def test_a_change_of_owner_is_seen_at_once(wire: Wire, files: PublishedFiles) -> None:
    wire.channel.publish(PAGE, files.page, -1, 0, True, stat.S_IFREG | 0o400, 5, 6, 0)
    fields = ATTR_OUT.unpack(wire.ask(fuse.GETATTR, PAGE, bytes(16)).payload)
    assert fields[12:16] == (stat.S_IFREG | 0o400, 1, 5, 6)


@pytest.mark.parametrize("name", [b"security.capability", b"security.selinux", b"security.x"])
def test_nothing_has_security_attributes(wire: Wire, name: bytes) -> None:
    assert wire.ask(fuse.GETXATTR, PAGE, fuse.getxattr_in(name)).error == -errno.ENODATA


@pytest.mark.parametrize(
    "name", [b"user.kvfs.digest", b"security", b"securityX", b"", b"system.posix_acl_access"]
)
def test_other_attributes_are_passed_on(wire: Wire, name: bytes) -> None:
    assert wire.pass_on(fuse.GETXATTR, PAGE, fuse.getxattr_in(name)).body == fuse.getxattr_in(name)


# The whole


def test_room_is_that_of_the_tier(wire: Wire, tmp_path: Path) -> None:
    reply = wire.ask(fuse.STATFS)
    fields = fuse.STATFS_OUT.unpack(reply.payload)
    status = os.statvfs(tmp_path)
    assert fields[0] == status.f_blocks
    assert fields[3] == status.f_files
    assert fields[5:] == (status.f_bsize, status.f_namemax, status.f_frsize)


def test_room_is_asked_of_libfuse_where_it_is_not_that_of_the_tier(tmp_path: Path) -> None:
    tier = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    with fuse.wire(tier, statfs=False) as wire:
        wire.pass_on(fuse.STATFS)
    os.close(tier)


PASSTHROUGH_FLAGS2, INIT_EXT, MAX_PAGES, WRITEBACK, AUTO_INVALIDATE = (
    1 << 5,
    1 << 30,
    1 << 22,
    1 << 16,
    1 << 12,
)


def begin(wire: Wire, flags: int, flags2: int, given: int = 64) -> tuple[int, ...]:
    """INIT as kernel and libfuse exchange it: the fields that the kernel gets."""
    request = wire.pass_on(fuse.INIT, 0, fuse.INIT_IN.pack(7, 45, 1 << 20, flags, flags2))
    ours = fuse.INIT_OUT.pack(7, 38, 65536, WRITEBACK | AUTO_INVALIDATE | 1, 12, 9, 131072, 1, 32, 0, 0, 0)
    reply = wire.answer(request, ours[:given])
    assert reply.error == 0
    return fuse.INIT_OUT.unpack(reply.payload)


@pytest.mark.parametrize("given", [24, 64])
def test_passthrough_is_asked_for_where_the_kernel_offers_it(wire: Wire, given: int) -> None:
    assert not wire.channel.passthrough_active
    fields = begin(wire, INIT_EXT | MAX_PAGES | WRITEBACK, PASSTHROUGH_FLAGS2, given)
    _, _, _, flags, background, _, max_write, _, max_pages, _, flags2, depth = fields
    assert flags == INIT_EXT | MAX_PAGES | 1
    assert (background, max_write, max_pages) == (12, 1 << 20, 256)
    assert (flags2, depth) == (PASSTHROUGH_FLAGS2, 1)
    assert wire.channel.passthrough_active


@pytest.mark.parametrize(("flags", "flags2"), [(INIT_EXT, 0), (0, PASSTHROUGH_FLAGS2), (0, 0)])
def test_it_is_not_where_the_kernel_does_not(wire: Wire, flags: int, flags2: int) -> None:
    fields = begin(wire, flags | MAX_PAGES, flags2)
    assert fields[3] == MAX_PAGES | 1
    assert fields[10:] == (0, 0)
    assert not wire.channel.passthrough_active


def test_it_is_not_where_it_is_not_wanted(tmp_path: Path) -> None:
    tier = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    with fuse.wire(tier, passthrough=False) as wire:
        assert begin(wire, INIT_EXT, PASSTHROUGH_FLAGS2)[10:] == (0, 0)
        assert not wire.channel.passthrough_active
    os.close(tier)


def test_a_refused_beginning_passes_unchanged(wire: Wire) -> None:
    request = wire.pass_on(fuse.INIT, 0, fuse.INIT_IN.pack(7, 45, 0, INIT_EXT, PASSTHROUGH_FLAGS2))
    assert wire.answer(request, error=-errno.EPROTO) == (-errno.EPROTO, request.unique, b"")
    assert not wire.channel.passthrough_active


def test_listings_are_asked_for_in_pieces(wire: Wire) -> None:
    request = wire.pass_on(fuse.READDIRPLUS, 1, fuse.read_in(0, 1 << 20, handle=3))
    assert request.body == fuse.read_in(0, 65536, handle=3)
    assert wire.pass_on(fuse.READDIRPLUS, 1, fuse.read_in(9, 4096)).body == fuse.read_in(9, 4096)


def test_an_interruption_has_no_reply(wire: Wire, files: PublishedFiles) -> None:
    wire.send(fuse.INTERRUPT, 1, bytes(8))
    assert wire.ask(fuse.GETATTR, PAGE, bytes(16)).error == 0


def test_calls_that_name_a_node_beyond_the_table(wire: Wire) -> None:
    with pytest.raises(IndexError):
        wire.channel.publish(4096, 0, -1, 0, True, MODE, UID, GID, 0)
    for node in (4096, (1 << 64) - 1):
        assert wire.channel.withdraw(node) == 0
        assert wire.channel.opens(node) == 0
        assert wire.channel.take_marks(node) == (False, False)
        wire.channel.forget(node)
    with pytest.raises(OverflowError):
        wire.channel.opens(-1)
    with pytest.raises(TypeError):
        wire.channel.opens("20")  # type: ignore[arg-type]


def test_a_device_that_is_none_gives_no_backing_id(wire: Wire, files: PublishedFiles) -> None:
    for call in (lambda: wire.channel.backing_open(files.page), lambda: wire.channel.backing_close(1)):
        with pytest.raises(OSError, match=r"ioctl|Inappropriate|not supported"):
            call()


def test_notifications_reach_the_kernel(wire: Wire) -> None:
    wire.channel.invalidate_entry(17, b"a name")
    reply = wire.reply()
    assert (reply.error, reply.unique) == (3, 0)
    assert reply.payload == (17).to_bytes(8, "little") + (6).to_bytes(4, "little") + bytes(4) + b"a name\0"


def test_the_end_of_the_kernels_side_is_told(wire: Wire) -> None:
    assert not wire.has_ended()
    wire.kernel.close()
    deadline = time.monotonic() + 5
    while not wire.has_ended():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    with pytest.raises(OSError, match=r"Broken pipe|not connected"):
        wire.channel.invalidate_entry(1, b"name")


def test_an_open_that_the_kernel_does_not_take_is_not_counted(wire: Wire, files: PublishedFiles) -> None:
    """As when the program was killed: the write of the reply fails."""
    wire.send(fuse.OPEN, PAGE, fuse.open_in(os.O_RDONLY))
    wire.send(fuse.OPEN, PAGE, fuse.open_in(os.O_RDONLY))
    wire.reply()
    wire.reply()
    assert wire.channel.opens(PAGE) == 2
    for _ in range(3):
        wire.send(fuse.OPEN, PAGE, fuse.open_in(os.O_RDONLY))
    wire.kernel.close()
    deadline = time.monotonic() + 5
    while not wire.has_ended():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    taken = 5 - wire.channel.statistics()["reply_errors"]
    assert wire.channel.opens(PAGE) == taken
