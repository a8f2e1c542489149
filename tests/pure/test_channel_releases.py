"""RELEASE and FLUSH: native handles are counted, and whether a writer was killed is told."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.pure import fuse
from tests.pure.fuse import (
    DRAFT,
    KILLED_HANDLE,
    NATIVE_HANDLE,
    PAGE,
    UNFLUSHED_HANDLE,
    UNKNOWN,
    PublishedFiles,
    Wire,
)


def test_native_handles_are_counted_down_and_passed_on_once_withdrawn(
    wire: Wire, files: PublishedFiles
) -> None:
    for _ in range(3):
        wire.ask(fuse.OPEN, PAGE, fuse.open_in(os.O_RDONLY))
    release = fuse.release_in(NATIVE_HANDLE | PAGE)
    assert wire.ask(fuse.RELEASE, PAGE, release) == (0, wire.unique, b"")
    assert wire.channel.withdraw(PAGE) == 2
    request = wire.pass_on(fuse.RELEASE, PAGE, release)
    assert request.body == release
    assert wire.channel.opens(PAGE) == 1
    wire.pass_on(fuse.OPEN, PAGE, fuse.open_in(os.O_RDONLY))
    files.publish_page()
    wire.ask(fuse.RELEASE, PAGE, release)
    assert wire.channel.withdraw(PAGE) == 0
    wire.pass_on(fuse.RELEASE, PAGE, release)
    assert wire.channel.opens(PAGE) == 0, "never below zero"


def test_what_is_forgotten_is_asked_of_libfuse(wire: Wire, files: PublishedFiles) -> None:
    wire.ask(fuse.OPEN, PAGE, fuse.open_in(os.O_RDONLY))
    wire.channel.forget(PAGE)
    assert wire.channel.opens(PAGE) == 0
    for opcode, body in (
        (fuse.OPEN, fuse.open_in(os.O_RDONLY)),
        (fuse.GETATTR, bytes(16)),
        (fuse.READ, fuse.read_in(0, 100)),
        (fuse.RELEASE, fuse.release_in(NATIVE_HANDLE | PAGE)),
    ):
        wire.pass_on(opcode, PAGE, body)
    assert wire.channel.take_touched() == [(0, 1)], "the hit is counted, for nobody"
    files.publish_page()
    wire.ask(fuse.OPEN, PAGE, fuse.open_in(os.O_RDONLY))
    assert wire.channel.opens(PAGE) == 1
    assert wire.channel.take_touched() == [(PAGE, 1)]


@contextmanager
def ended_process(code: str) -> Iterator[int]:
    """A process that has ended and that nobody has waited for: what is known of it is still there."""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        status = Path(f"/proc/{process.pid}/stat")
        deadline = time.monotonic() + 10
        while status.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.005)
        yield process.pid
    finally:
        process.wait()


def release(wire: Wire, node: int, handle: int) -> list[int]:
    """A RELEASE, which the kernel sees answered; what Python hears of later."""
    assert wire.ask(fuse.RELEASE, node, fuse.release_in(handle)) == (0, wire.unique, b"")
    handles, forgotten = wire.channel.take_ended()
    assert forgotten == []
    return handles


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_the_flush_of_a_killed_writer_marks_its_release(
    wire: Wire, files: PublishedFiles, number: signal.Signals
) -> None:
    with ended_process(f"import os; os.kill(os.getpid(), {int(number)})") as pid:
        assert wire.ask(fuse.FLUSH, DRAFT, fuse.flush_in(7), pid) == (0, wire.unique, b"")
    wire.ask(fuse.FLUSH, DRAFT, fuse.flush_in(8))
    assert release(wire, DRAFT, 7) == [7 | KILLED_HANDLE]
    assert release(wire, DRAFT, 8) == [8]
    again = wire.pass_on(fuse.RELEASE, DRAFT, fuse.release_in(7))
    assert again.body == fuse.release_in(7 | UNFLUSHED_HANDLE), "a mark is for one release"


@pytest.mark.parametrize("code", ["", "import os; os._exit(9)", "raise SystemExit(137)"])
def test_a_process_that_ended_by_itself_marks_nothing(wire: Wire, files: PublishedFiles, code: str) -> None:
    with ended_process(code) as pid:
        wire.ask(fuse.FLUSH, DRAFT, fuse.flush_in(7), pid)
    assert release(wire, DRAFT, 7) == [7]


def test_of_several_who_share_a_handle_the_last_one_counts(wire: Wire, files: PublishedFiles) -> None:
    with ended_process("import os; os.kill(os.getpid(), 9)") as pid:
        for pids, flag in (((pid, os.getpid()), 0), ((os.getpid(), pid, pid), KILLED_HANDLE)):
            for one in pids:
                wire.ask(fuse.FLUSH, DRAFT, fuse.flush_in(7), one)
            assert release(wire, DRAFT, 7) == [7 | flag]


def test_a_killed_reader_marks_nothing(wire: Wire, files: PublishedFiles) -> None:
    with ended_process("import os; os.kill(os.getpid(), 9)") as pid:
        wire.ask(fuse.FLUSH, PAGE, fuse.flush_in(7), pid)
        released = wire.pass_on(fuse.RELEASE, PAGE, fuse.release_in(7))
        assert not int.from_bytes(released.body[:8], "little") & KILLED_HANDLE


def test_many_killed_writers_are_all_remembered(wire: Wire, files: PublishedFiles) -> None:
    with ended_process("import os; os.kill(os.getpid(), 9)") as pid:
        for handle in range(2, 3000):
            wire.ask(fuse.FLUSH, DRAFT, fuse.flush_in(handle), pid)
    for handle in range(2, 3000):
        wire.ask(fuse.RELEASE, DRAFT, fuse.release_in(handle))
    assert wire.channel.take_ended() == ([handle | KILLED_HANDLE for handle in range(2, 3000)], [])


# Told later


def is_news(wire: Wire, seconds: float) -> bool:
    return bool(select.select([wire.channel.news_fd], [], [], seconds)[0])


def test_what_ended_is_told_soon_and_in_its_order(wire: Wire, files: PublishedFiles) -> None:
    assert not is_news(wire, 0.01)
    assert wire.channel.take_ended() == ([], [])
    for handle in (5, 3, 4):
        wire.ask(fuse.FLUSH, DRAFT, fuse.flush_in(handle))
        wire.ask(fuse.RELEASE, DRAFT, fuse.release_in(handle))
    wire.send(fuse.FORGET, DRAFT, fuse.forget_in(2))
    wire.send(fuse.BATCH_FORGET, 0, fuse.batch_forget_in((PAGE, 1), (1, 7), (UNKNOWN, 1 << 40), (DRAFT, 0)))
    wire.ask(fuse.GETATTR, PAGE, bytes(16))  # no other reply comes, and libfuse hears of none of it
    assert is_news(wire, 1)
    assert wire.channel.take_ended() == ([5, 3, 4], [(DRAFT, 2), (PAGE, 1), (UNKNOWN, (1 << 32) - 1)])
    assert wire.channel.take_ended() == ([], [])
    os.read(wire.channel.news_fd, 8)
    assert not is_news(wire, 0.01)
    wire.send(fuse.FORGET, PAGE, fuse.forget_in(1))
    assert is_news(wire, 1), "once more"


def test_more_than_can_be_told_later_is_passed_on(wire: Wire, files: PublishedFiles) -> None:
    most = 16384
    for start in range(0, most, 64):
        wire.send(
            fuse.BATCH_FORGET, 0, fuse.batch_forget_in(*((16 + n, 1) for n in range(start, start + 64)))
        )
    wire.pass_on(fuse.FORGET, PAGE, fuse.forget_in(1))
    passed_on = wire.pass_on(fuse.BATCH_FORGET, 0, fuse.batch_forget_in((PAGE, 1), (1, 2), (DRAFT, 3)))
    assert passed_on.body[:40] == fuse.batch_forget_in((PAGE, 1), (DRAFT, 3))
    wire.ask(fuse.FLUSH, DRAFT, fuse.flush_in(7))
    assert wire.pass_on(fuse.RELEASE, DRAFT, fuse.release_in(7)).body == fuse.release_in(7)
    handles, forgotten = wire.channel.take_ended()
    assert handles == []
    assert forgotten == [(16 + number, 1) for number in range(most)]
    wire.send(fuse.FORGET, PAGE, fuse.forget_in(1))
    wire.ask(fuse.GETATTR, PAGE, bytes(16))
    assert wire.channel.take_ended() == ([], [(PAGE, 1)])


def test_closing_waits_for_nobody_who_looks_at_the_program(wire: Wire, files: PublishedFiles) -> None:
    """Of a program that goes on, no more is looked at than whether it has memory."""
    begin = time.monotonic()
    for handle in range(2, 1002):
        wire.ask(fuse.FLUSH, DRAFT, fuse.flush_in(handle))
    assert time.monotonic() - begin < 1


def test_the_count_is_right_while_a_page_is_withdrawn_and_published(
    wire: Wire, files: PublishedFiles
) -> None:
    """A program opens and closes all the time; the pool changes its mind all the time."""
    stop = threading.Event()
    changes = 0

    def change() -> None:
        nonlocal changes
        while not stop.is_set():
            wire.channel.withdraw(PAGE)
            wire.channel.take_touched()
            files.publish_page()
            changes += 1

    thread = threading.Thread(target=change)
    thread.start()
    choices = random.Random(2)
    held = native = 0
    try:
        for _ in range(3000):
            if held and choices.random() < 0.5:
                unique = wire.send(fuse.RELEASE, PAGE, fuse.release_in(NATIVE_HANDLE | PAGE))
                held -= 1
            else:
                unique = wire.send(fuse.OPEN, PAGE, fuse.open_in(os.O_RDONLY))
                held += 1
            sentinel = wire.send(fuse.GETXATTR, 1, fuse.getxattr_in(b"security.capability"))
            reply = wire.reply()
            if reply.unique == unique:
                native += 1
                assert wire.reply().unique == sentinel
                continue
            request = wire.forwarded()
            if request.opcode == fuse.OPEN:  # the pool gives a handle of its own, which this test forgets
                held -= 1
    finally:
        stop.set()
        thread.join()
    assert changes
    assert native
    assert wire.channel.opens(PAGE) == held
