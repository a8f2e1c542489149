"""Locks between processes: flock, POSIX record locks and OFD locks."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mounted.children import start, together, wait

F_OFD_SETLK = 37
OFD_LOCK = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def flock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def record_lock(descriptor: int) -> None:
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def ofd_lock(descriptor: int) -> None:
    fcntl.fcntl(descriptor, F_OFD_SETLK, OFD_LOCK)


@pytest.mark.parametrize("lock", [flock, record_lock, ofd_lock])
def test_a_lock_keeps_others_out_until_it_is_let_go(directory: Path, lock: Callable[[int], None]) -> None:
    path = directory / "lock"
    path.touch()

    def attempt() -> int:
        def work() -> None:
            descriptor = os.open(path, os.O_RDWR)
            try:
                lock(descriptor)
            except OSError as error:
                os._exit(error.errno or 255)

        return wait(start(work))

    descriptor = os.open(path, os.O_RDWR)
    lock(descriptor)
    assert attempt() in (errno.EAGAIN, errno.EACCES)
    os.close(descriptor)
    assert attempt() == 0


def test_a_counter_under_a_lock_loses_nothing(directory: Path) -> None:
    path = directory / "counter"
    path.write_text("0")

    def work(number: int) -> None:
        for _ in range(100):
            with open(path, "r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                value = int(file.read())
                file.seek(0)
                file.write(str(value + 1))
                file.flush()

    together(4, work)
    assert path.read_text() == "400"
