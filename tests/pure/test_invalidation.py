from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import trio
import trio.testing

from kvfs.fs import invalidation
from kvfs.fs.invalidation import Invalidations
from tests.conftest import LogGuard


class BusyKernel:
    """Takes what it is told, each only once ``go`` is set; ``entered`` counts who waits or has waited."""

    def __init__(self) -> None:
        self.told: list[tuple[int, bytes]] = []
        self.go = threading.Event()
        self.entered = 0
        self.error: OSError | None = None

    def tell(self, parent: int, name: bytes) -> None:
        self.entered += 1
        assert self.go.wait(10)
        self.told.append((parent, name))
        if self.error is not None:
            raise self.error


@pytest.fixture
def kernel() -> Iterator[BusyKernel]:
    kernel = BusyKernel()
    yield kernel
    kernel.go.set()


@pytest.fixture
def queue(kernel: BusyKernel) -> Iterator[Invalidations]:
    queue = Invalidations(kernel.tell)
    queue.start()
    yield queue
    kernel.go.set()
    queue.stop()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_every_name_is_told_in_order(kernel: BusyKernel, queue: Invalidations) -> None:
    kernel.go.set()
    names = [(parent, b"%d" % number) for parent in (1, 17) for number in range(500)]
    for parent, name in names:
        queue.add(parent, name)
    wait_until(lambda: len(kernel.told) == len(names))
    assert kernel.told == names
    assert len(queue) == 0


def test_a_name_that_waits_is_told_once(kernel: BusyKernel, queue: Invalidations) -> None:
    queue.add(1, b"first")
    wait_until(lambda: kernel.entered == 1)
    for _ in range(1000):
        queue.add(1, b"again")
        queue.add(2, b"again")
    assert len(queue) == 2
    kernel.go.set()
    wait_until(lambda: len(kernel.told) == 3)
    assert kernel.told == [(1, b"first"), (1, b"again"), (2, b"again")]


def test_a_name_that_changes_while_it_is_told_is_told_again(kernel: BusyKernel, queue: Invalidations) -> None:
    queue.add(1, b"page")
    wait_until(lambda: kernel.entered == 1)
    queue.add(1, b"page")
    kernel.go.set()
    wait_until(lambda: len(kernel.told) == 2)


def test_a_kernel_that_does_not_listen_makes_nobody_wait_and_fills_nothing(
    kernel: BusyKernel, queue: Invalidations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invalidation, "QUEUE_LIMIT", 100)
    queue.add(1, b"first")
    wait_until(lambda: kernel.entered == 1)
    start = time.monotonic()
    for number in range(1000):
        queue.add(1, b"%d" % number)
    assert time.monotonic() - start < 1
    assert len(queue) == 100
    assert queue.dropped == 900
    for _ in range(10):
        queue.add(1, b"0")
    assert queue.dropped == 900, "a name that waits already is not lost"
    kernel.go.set()
    wait_until(lambda: len(kernel.told) == 101)
    queue.add(1, b"999")
    wait_until(lambda: kernel.told[-1] == (1, b"999"))


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENOTCONN])
def test_what_the_kernel_does_not_know_is_no_news(
    kernel: BusyKernel, queue: Invalidations, number: int
) -> None:
    kernel.error = OSError(number, os.strerror(number))
    kernel.go.set()
    queue.add(1, b"one")
    queue.add(1, b"two")
    wait_until(lambda: len(kernel.told) == 2)


def test_a_refusal_is_logged_and_the_next_name_told(
    kernel: BusyKernel, queue: Invalidations, expect_log: LogGuard
) -> None:
    expect_log("could not be told of a changed name: Permission denied")
    kernel.error = OSError(errno.EACCES, os.strerror(errno.EACCES))
    kernel.go.set()
    queue.add(1, b"one")
    queue.add(1, b"two")
    wait_until(lambda: len(kernel.told) == 2)
    wait_until(lambda: len(queue) == 0)


def test_stopping_waits_for_the_name_that_is_being_told_and_leaves_the_rest(kernel: BusyKernel) -> None:
    queue = Invalidations(kernel.tell)
    queue.start()
    for number in range(10):
        queue.add(1, b"%d" % number)
    wait_until(lambda: kernel.entered == 1)
    threading.Timer(0.05, kernel.go.set).start()
    queue.stop()
    assert kernel.told == [(1, b"0")]
    assert not any(thread.name == "kvfs-invalidation" for thread in threading.enumerate())
    queue.add(1, b"late")  # harmless


def test_a_queue_that_was_never_started_can_be_stopped(kernel: BusyKernel) -> None:
    queue = Invalidations(kernel.tell)
    queue.add(1, b"name")
    queue.stop()
    assert kernel.told == []


def test_who_waits_goes_on_when_the_kernel_knows_all_that_was_added_before(
    kernel: BusyKernel, queue: Invalidations
) -> None:
    async def main() -> None:
        with trio.fail_after(10):
            await queue.told()  # of nothing
            for number in range(3):
                queue.add(1, b"%d" % number)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                await trio.testing.wait_all_tasks_blocked()
                assert seen == []
                kernel.go.set()
        assert len(seen) == 3

    async def wait() -> None:
        await queue.told()
        seen.extend(kernel.told)

    seen: list[tuple[int, bytes]] = []
    trio.run(main)


def test_nobody_waits_long_for_a_busy_directory(
    kernel: BusyKernel, queue: Invalidations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invalidation, "LONGEST_WAIT", 0.05)
    queue.add(1, b"busy")
    trio.run(queue.told)
    assert kernel.told == []
