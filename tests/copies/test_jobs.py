"""Who waits for a disk can give up; the thread keeps what it needs, and no more of them pile up than may."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path

import pytest
import trio

from kvfs.copies.direct import DirectCopier
from kvfs.copies.jobs import Job, Jobs
from kvfs.errors import TimedOut
from kvfs.interleaved import finish
from tests.copies.conftest import NoDescriptors
from tests.copies.disks import frozen
from tests.copies.files import in_memory, on_disk
from tests.pool.files import wait_until

pytestmark = pytest.mark.usefixtures("descriptors")


async def wait_for(job: Job[int], seconds: float) -> int:
    """As whoever opens a page waits."""
    try:
        with trio.fail_after(seconds):
            return await trio.to_thread.run_sync(job.run, abandon_on_cancel=True)
    finally:
        job.abandon()


def size_of(fd: int) -> int:
    return os.fstat(fd).st_size


class Stuck:
    """Calls that do not return before they are let go."""

    def __init__(self) -> None:
        self.fds: list[int] = []
        self.released = threading.Event()
        self.returned = threading.Semaphore(0)

    def __call__(self, fd: int) -> int:
        self.fds.append(fd)
        self.released.wait(30)
        self.returned.release()
        return size_of(fd)


def test_the_work_has_descriptors_of_its_own() -> None:
    with in_memory(b"page") as fd:
        job = Jobs(1).new(size_of, fd)
    assert trio.run(wait_for, job, 5) == 4


def test_what_the_call_raises_is_raised() -> None:
    def fail(fd: int) -> int:
        raise OSError(5, "cannot be read")

    with in_memory(b"") as fd:
        job = Jobs(1).new(fail, fd)
    with pytest.raises(OSError, match="cannot be read"):
        trio.run(wait_for, job, 5)


def test_a_call_that_hangs_is_left_behind() -> None:
    jobs, stuck = Jobs(2), Stuck()

    async def main() -> None:
        with in_memory(b"page") as fd:
            job = jobs.new(stuck, fd)
            with pytest.raises(trio.TooSlowError):
                await wait_for(job, 0.05)
        assert jobs.abandoned == 1
        assert size_of(stuck.fds[0]) == 4, "it is still open for the thread"
        stuck.released.set()
        await wait_until(lambda: not jobs.abandoned)

    trio.run(main)


def test_only_so_many_are_left_behind() -> None:
    jobs, stuck = Jobs(2), Stuck()

    async def main() -> None:
        with in_memory(b"page") as fd:
            for _ in range(2):
                with pytest.raises(trio.TooSlowError):
                    await wait_for(jobs.new(stuck, fd), 0.05)
            with pytest.raises(TimedOut, match="2 calls to the disk have not come back"):
                jobs.new(stuck, fd)
            stuck.released.set()
            await wait_until(lambda: not jobs.abandoned)
            assert await wait_for(jobs.new(size_of, fd), 5) == 4

    trio.run(main)


def test_one_that_no_thread_has_begun_is_never_done() -> None:
    called: list[int] = []
    with in_memory(b"page") as fd:
        jobs = Jobs(1)
        job = jobs.new(called.append, fd)
        job.abandon()
        job.abandon()
        with pytest.raises(TimedOut, match="nobody waits"):
            job.run()
    assert not called
    assert jobs.abandoned == 0


def test_giving_up_one_that_is_over_is_nothing() -> None:
    with in_memory(b"page") as fd:
        jobs = Jobs(1)
        job = jobs.new(size_of, fd)
        assert job.run() == 4
        job.abandon()
    assert jobs.abandoned == 0


def test_no_descriptors_left(no_descriptors: NoDescriptors) -> None:
    """Not even a part of what was wanted stays open."""
    with in_memory(b"") as fd:
        jobs = Jobs(1)
        with no_descriptors(1), pytest.raises(OSError, match="Too many open files"):
            jobs.new(size_of, fd, fd)
        assert jobs.new(size_of, fd).run() == 0


def test_a_disk_that_hangs(disk: Path) -> None:
    """The real thing: a frozen filesystem, which no signal gets a writer out of."""
    jobs = Jobs(1)
    content = os.urandom(5 << 20)

    async def main() -> None:
        with in_memory(content) as source, on_disk(disk) as target:
            write = partial(DirectCopier().write, size=len(content))
            with frozen(disk):
                with pytest.raises(trio.TooSlowError):
                    await wait_for(jobs.new(lambda *fds: finish(write(*fds)).size, source, target), 0.1)
                assert jobs.abandoned == 1
            await wait_until(lambda: not jobs.abandoned)
            assert os.fstat(target).st_size == len(content)

    trio.run(main)
