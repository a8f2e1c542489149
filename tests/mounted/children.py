"""Functions run in processes of their own: to be killed, to be someone else, to be many at once."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mounted.operations import USER_ID
from tests.mounted.running import REPOSITORY


def start(work: Callable[[], object], *, user: int | None = None) -> int:
    """Run ``work`` in a child, as ``user`` for good; the child's process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        if user is not None:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def wait(child: int) -> int:
    """How a child ended: its exit code, or the negative number of the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def skip_unless_users_can_run_kvfs() -> None:
    """Skip a test that runs kvfs as an ordinary user where it is out of their reach."""
    needed = [REPOSITORY, Path(sys.executable), Path(sys.executable).resolve()]
    for path in {parent for one in needed for parent in (one, *one.parents)}:
        if path.stat().st_mode & 0o001 == 0:
            pytest.skip(f"an ordinary user cannot run kvfs from here: {path} is closed to others")


def together(count: int, work: Callable[[int], object]) -> None:
    """Run ``work(0)`` to ``work(count - 1)`` at the same time; all must succeed."""
    children = [start(lambda number=number: work(number)) for number in range(count)]  # type: ignore[misc]
    ended = [wait(child) for child in children]
    assert not any(ended), f"exit codes of the processes: {ended}"


def as_user(work: Callable[[], object]) -> None:
    """Run ``work`` as an ordinary user; it must succeed."""
    assert wait(start(work, user=USER_ID)) == 0


def errno_as_user(work: Callable[[], object]) -> int:
    """The errno that an ordinary user gets; 0 when the call succeeds."""

    def attempt() -> None:
        try:
            work()
        except OSError as error:
            os._exit(error.errno or 255)

    return wait(start(attempt, user=USER_ID))
