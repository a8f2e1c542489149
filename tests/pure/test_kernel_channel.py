"""The Python half of the channel: what it tells the native half of entries."""

from __future__ import annotations

import errno
import os
import resource
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvfs.fs.channel import KernelChannel, raise_descriptor_limit
from kvfs.holding import Holding
from kvfs.index import DRAFT, SEALED, Entry, Index
from kvfs.page import Owner
from tests.conftest import LogGuard
from tests.pure import fuse
from tests.pure.fuse import INIT_IN, INIT_OUT, NATIVE_HANDLE, OPEN_OUT, Wire

DIRECTORY = Owner(stat.S_IFDIR | 0o755, 0, 0)
OWNER = Owner(stat.S_IFREG | 0o600, 7, 8)


@dataclass
class Connected:
    """A running channel, and one page that it may be told of."""

    channel: KernelChannel
    wire: Wire
    index: Index
    page: Entry


@pytest.fixture(params=[""])
def connected(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connected]:
    before = set(os.listdir("/proc/self/fd"))
    tier = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    kernel, device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = KernelChannel(device.detach(), tier, passthrough_off=request.param, statfs=True)
    libfuse = socket.socket(fileno=os.dup(channel.session_fd))
    for end in (kernel, libfuse):
        end.settimeout(10)
    (tmp_path / "page").write_bytes(b"bytes of the page")
    index = Index(DIRECTORY)
    page = index.add(index.root, b"page", OWNER, SEALED)
    page.holding = Holding(os.open(tmp_path / "page", os.O_RDONLY))
    channel.start()
    yield Connected(channel, Wire(channel._native, kernel, libfuse, libfuse), index, page)
    if page.holding is not None:
        os.close(page.holding.read_fd)
    kernel.close()
    channel.stop()
    libfuse.close()
    os.close(tier)
    assert set(os.listdir("/proc/self/fd")) == before


def begin(connected: Connected) -> None:
    """The kernel offers passthrough."""
    wire = connected.wire
    request = wire.pass_on(fuse.INIT, 0, INIT_IN.pack(7, 45, 0, 1 << 30, 1 << 5))
    wire.answer(request, INIT_OUT.pack(7, 38, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0))


def test_a_page_is_answered_for_from_its_publication_to_its_release(connected: Connected) -> None:
    channel, wire, page = connected.channel, connected.wire, connected.page
    channel.publish(page)
    opened = wire.ask(fuse.OPEN, page.number, fuse.open_in(os.O_RDONLY))
    assert OPEN_OUT.unpack(opened.payload)[0] == NATIVE_HANDLE | page.number
    assert wire.ask(fuse.READ, page.number, fuse.read_in(0, 100)).payload == b"bytes of the page"
    assert channel.opens(page) == 1
    assert channel.take_touched() == [(page.number, 1)]
    assert channel.withdraw(page) == 1
    wire.pass_on(fuse.OPEN, page.number, fuse.open_in(os.O_RDONLY))
    channel.release(page, page.holding.backing_id if page.holding else 0)
    assert channel.opens(page) == 0
    wire.pass_on(fuse.GETATTR, page.number, bytes(16))


def test_a_draft_is_not_opened_natively(connected: Connected) -> None:
    connected.page.state = DRAFT
    connected.channel.publish(connected.page)
    connected.wire.pass_on(fuse.OPEN, connected.page.number, fuse.open_in(os.O_RDONLY))
    assert connected.wire.ask(fuse.GETATTR, connected.page.number, bytes(16)).error == 0


def test_the_last_close_of_a_removed_page_is_told(connected: Connected) -> None:
    """Whatever was published of it meanwhile: its memory goes with that close."""
    channel, wire, page = connected.channel, connected.wire, connected.page
    channel.publish(page)
    wire.ask(fuse.OPEN, page.number, fuse.open_in(os.O_RDONLY))
    connected.index.remove(connected.index.root, b"page")
    assert channel.withdraw(page) == 1
    page.owner = Owner(stat.S_IFREG | 0o400, 7, 8)  # fchmod of the open file
    channel.publish(page)
    wire.pass_on(fuse.RELEASE, page.number, fuse.release_in(NATIVE_HANDLE | page.number))
    assert channel.opens(page) == 0


def test_passthrough_that_is_not_offered_is_said_to_be_off(connected: Connected) -> None:
    assert not connected.channel.passthrough_active
    assert "Linux 6.9" in connected.channel.passthrough_reason


@pytest.mark.parametrize("connected", ["switched off"], indirect=True)
def test_passthrough_that_is_switched_off_says_so(connected: Connected) -> None:
    begin(connected)
    assert not connected.channel.passthrough_active
    assert connected.channel.passthrough_reason == "switched off"


def test_a_refused_file_switches_passthrough_off_and_is_logged_once(
    connected: Connected, expect_log: LogGuard, caplog: pytest.LogCaptureFixture
) -> None:
    expect_log("passthrough is off: the kernel refused a file")
    channel, wire, page = connected.channel, connected.wire, connected.page
    begin(connected)
    for _ in range(3):
        channel.publish(page)  # no socket gives a backing id
    assert page.holding is not None
    assert page.holding.backing_id == -1, "what was refused once is not tried again"
    assert not channel.passthrough_active
    assert "refused" in channel.passthrough_reason
    opened = wire.ask(fuse.OPEN, page.number, fuse.open_in(os.O_RDONLY))
    assert OPEN_OUT.unpack(opened.payload)[2] == 0
    channel.release(page, page.holding.backing_id if page.holding else 0)
    assert len(caplog.messages) == 1


class Ids:
    """Hands out backing ids, as /dev/fuse does; ``open`` are those in use."""

    def __init__(self, error: int = 0) -> None:
        self.open: set[int] = set()
        self.error = error
        self._next = 1

    def backing_open(self, _fd: int) -> int:
        self.open.add(self._next)
        self._next += 1
        return self._next - 1

    def backing_close(self, backing_id: int) -> None:
        self.open.remove(backing_id)
        if self.error:
            raise OSError(self.error, os.strerror(self.error))


class Native:
    """The native half, with backing ids from elsewhere."""

    def __init__(self, channel: KernelChannel, ids: Ids) -> None:
        self._native = channel._native
        self.backing_open, self.backing_close = ids.backing_open, ids.backing_close

    def __getattr__(self, name: str) -> object:
        return getattr(self._native, name)


@pytest.mark.parametrize("number", [0, errno.ENODEV, errno.ENOTCONN, errno.EPERM])
def test_a_file_has_one_backing_id_from_publication_to_release(
    connected: Connected, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    begin(connected)
    ids = Ids(number)
    monkeypatch.setattr(connected.channel, "_native", Native(connected.channel, ids))
    channel, wire, page = connected.channel, connected.wire, connected.page
    for expected in (1, 2):
        for _ in range(3):
            channel.publish(page)
        assert ids.open == {expected}
        opened = wire.ask(fuse.OPEN, page.number, fuse.open_in(os.O_RDONLY))
        assert OPEN_OUT.unpack(opened.payload)[2] == expected
        assert page.holding is not None
        channel.release(page, page.holding.backing_id)
        assert ids.open == set()
        page.holding.backing_id = 0


def test_a_page_without_a_descriptor_is_opened_by_its_id(
    connected: Connected, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(connected)
    monkeypatch.setattr(connected.channel, "_native", Native(connected.channel, Ids()))
    channel, wire, page = connected.channel, connected.wire, connected.page
    channel.publish(page)
    holding, page.holding = page.holding, None
    assert holding is not None
    page.ready_id = holding.backing_id
    channel.publish(page)
    os.close(holding.read_fd)
    opened = wire.ask(fuse.OPEN, page.number, fuse.open_in(os.O_RDONLY))
    assert OPEN_OUT.unpack(opened.payload)[2] == page.ready_id
    wire.pass_on(fuse.GETATTR, page.number, bytes(16))
    wire.ask(fuse.RELEASE, page.number, fuse.release_in(NATIVE_HANDLE | page.number))
    channel.release(page, page.ready_id)


def test_the_descriptor_limit_is_raised_and_stays_raised() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        first = raise_descriptor_limit()
        assert first >= before[0]
        assert raise_descriptor_limit() == first
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
