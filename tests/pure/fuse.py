"""The kernel's and libfuse's sides of a channel, without a kernel: FUSE messages over socket pairs."""

from __future__ import annotations

import os
import random
import select
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvfs.fs._channel import Channel

LOOKUP, FORGET, GETATTR, SETATTR, SYMLINK = 1, 2, 3, 4, 6
MKNOD, MKDIR, RENAME, LINK, RENAME2 = 8, 9, 12, 13, 45
OPEN, READ, WRITE, STATFS, RELEASE = 14, 15, 16, 17, 18
SETXATTR, GETXATTR, FLUSH, INIT, OPENDIR = 21, 22, 25, 26, 27
CREATE, INTERRUPT, BATCH_FORGET, FALLOCATE, READDIRPLUS, LSEEK = 35, 36, 42, 43, 44, 46
LAST_OPCODE = 55

NATIVE_HANDLE, KILLED_HANDLE, UNFLUSHED_HANDLE = 1 << 63, 1 << 62, 1 << 61
FOPEN_KEEP_CACHE, FOPEN_NOFLUSH, FOPEN_PASSTHROUGH = 1 << 1, 1 << 5, 1 << 7

IN_HEADER = struct.Struct("<IIQQIIIHH")
OUT_HEADER = struct.Struct("<IiQ")
ENTRY_OUT = struct.Struct("<QQQQII88x")
ATTR_OUT = struct.Struct("<QII6Q3IIIIIII4x")
OPEN_OUT = struct.Struct("<QIi")
WRITE_OUT = struct.Struct("<I4x")
LSEEK_OUT = struct.Struct("<Q")
STATFS_OUT = struct.Struct("<5Q3I28x")
INIT_IN = struct.Struct("<IIIII44x")
INIT_OUT = struct.Struct("<IIIIHHIIHHII24x")


class Reply(NamedTuple):
    """What the kernel reads from the device's other side."""

    error: int
    unique: int
    payload: bytes


class Request(NamedTuple):
    """What libfuse reads."""

    opcode: int
    unique: int
    node: int
    body: bytes


def open_in(flags: int) -> bytes:
    return struct.pack("<II", flags, 0)


def create_in(flags: int, name: bytes) -> bytes:
    return struct.pack("<IIII", flags, 0o644, 0, 0) + name + b"\0"


def release_in(handle: int) -> bytes:
    return struct.pack("<QIIQ", handle, 0, 0, 0)


def forget_in(lookups: int) -> bytes:
    return struct.pack("<Q", lookups)


def batch_forget_in(*nodes: tuple[int, int]) -> bytes:
    """Of nodes, each with how many look-ups."""
    return struct.pack("<II", len(nodes), 0) + b"".join(struct.pack("<QQ", *node) for node in nodes)


def flush_in(handle: int) -> bytes:
    return struct.pack("<QIIQ", handle, 0, 0, 0)


def read_in(offset: int, size: int, handle: int = 0) -> bytes:
    return struct.pack("<QQIIQII", handle, offset, size, 0, 0, 0, 0)


def write_in(offset: int, data: bytes, size: int | None = None) -> bytes:
    return struct.pack("<QQIIQII", 0, offset, len(data) if size is None else size, 0, 0, 0, 0) + data


def lseek_in(offset: int, whence: int) -> bytes:
    return struct.pack("<QQII", 0, offset, whence, 0)


def fallocate_in(offset: int, length: int, mode: int = 0) -> bytes:
    return struct.pack("<QQQII", 0, offset, length, mode, 0)


def getxattr_in(name: bytes) -> bytes:
    return struct.pack("<II", 100, 0) + name + b"\0"


@dataclass
class Wire:
    """A running channel and both of its ends."""

    channel: Channel
    kernel: socket.socket
    libfuse: socket.socket
    outer: socket.socket
    """The channel's own end of the pair that libfuse reads."""
    unique: int = 0

    def send(self, opcode: int, node: int = 1, body: bytes = b"", pid: int = 0) -> int:
        """Sends a request as the kernel would; returns its number."""
        self.unique += 2
        header = IN_HEADER.pack(
            IN_HEADER.size + len(body), opcode, self.unique, node, 1000, 1000, pid or os.getpid(), 0, 0
        )
        self.kernel.send(header + body)
        return self.unique

    def reply(self) -> Reply:
        """The next reply that reaches the kernel."""
        message = self.kernel.recv(2 << 20)
        length, error, unique = OUT_HEADER.unpack_from(message)
        assert length == len(message)
        return Reply(error, unique, message[OUT_HEADER.size :])

    def forwarded(self) -> Request:
        """The next request that reaches libfuse."""
        message = self.libfuse.recv(2 << 20)
        length, opcode, unique, node, *_ = IN_HEADER.unpack_from(message)
        assert length == len(message)
        return Request(opcode, unique, node, message[IN_HEADER.size :])

    def answer(self, request: Request, payload: bytes = b"", error: int = 0) -> Reply:
        """libfuse answers; what the kernel gets of it."""
        self.libfuse.send(OUT_HEADER.pack(OUT_HEADER.size + len(payload), error, request.unique) + payload)
        reply = self.reply()
        assert reply.unique == request.unique
        return reply

    def ask(self, opcode: int, node: int = 1, body: bytes = b"", pid: int = 0) -> Reply:
        """A request that the channel must answer by itself."""
        unique = self.send(opcode, node, body, pid)
        reply = self.reply()
        assert reply.unique == unique
        return reply

    def pass_on(self, opcode: int, node: int = 1, body: bytes = b"", pid: int = 0) -> Request:
        """A request that the channel must pass on."""
        unique = self.send(opcode, node, body, pid)
        request = self.forwarded()
        assert (request.opcode, request.unique, request.node) == (opcode, unique, node)
        return request

    def has_ended(self) -> bool:
        return bool(select.select([self.channel.ended_fd], [], [], 0)[0])


def is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:  # that of the listing itself
        return False


@contextmanager
def wire(
    tier: int, *, passthrough: bool = True, statfs: bool = True, table_size: int = 4096
) -> Iterator[Wire]:
    """A running channel; it is stopped at the end, once the kernel's side has ended."""
    kernel, device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (kernel, device):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    before = set(os.listdir("/proc/self/fd"))
    channel = Channel(
        device=device.detach(), tier=tier, passthrough=passthrough, statfs=statfs, table_size=table_size
    )
    known = before | {str(channel.session_fd), str(channel.ended_fd)}
    (outer_fd,) = (int(fd) for fd in os.listdir("/proc/self/fd") if fd not in known and is_socket(int(fd)))
    libfuse, outer = (socket.socket(fileno=os.dup(fd)) for fd in (channel.session_fd, outer_fd))
    kernel.settimeout(10)
    libfuse.settimeout(10)
    channel.start()
    try:
        yield Wire(channel, kernel, libfuse, outer)
    finally:
        kernel.close()
        channel.stop()
        libfuse.close()
        outer.close()


DATA = random.Random(5).randbytes(100_000)
MODE, UID, GID = stat.S_IFREG | 0o640, 1001, 1002
PAGE, DRAFT, UNKNOWN = 20, 21, 22
BACKING = 77


class PublishedFiles:
    """A page and a draft on a real filesystem, published under their numbers."""

    def __init__(self, directory: Path, channel: Channel) -> None:
        self.channel = channel
        for name in ("page", "draft"):
            (directory / name).write_bytes(DATA)
        self.page = os.open(directory / "page", os.O_RDONLY)
        self.draft = os.open(directory / "draft", os.O_RDONLY)
        self.draft_writable = os.open(directory / "draft", os.O_RDWR)
        self.publish_page()
        self.publish_draft()

    def publish_page(self, *, backing_id: int = 0, sealed: bool = True) -> None:
        self.channel.publish(PAGE, self.page, -1, backing_id, sealed, MODE, UID, GID, 0)

    def publish_draft(self, backing_id: int = 0) -> None:
        self.channel.publish(DRAFT, self.draft, self.draft_writable, backing_id, False, MODE, UID, GID, 0)

    def content(self) -> bytes:
        return os.pread(self.draft, 1 << 20, 0)

    def close(self) -> None:
        for fd in (self.page, self.draft, self.draft_writable):
            os.close(fd)
