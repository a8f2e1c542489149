"""A disk that hangs, fails or turns read-only below a mount: only who needs it hears so, and in time."""

from __future__ import annotations

import errno
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.faults.disks import Sickness, sick_disk, small_disk
from tests.faults.small_mounts import IO_TIMEOUT, SIZE, Mount, data, evicts, reads, serving
from tests.mounted.running import wait_sealed, wait_until

pytestmark = [pytest.mark.as_root, pytest.mark.deadline(120)]

AT_ONCE = 0.1


@pytest.fixture
def sick(base: Path) -> Iterator[tuple[Mount, Sickness]]:
    with sick_disk(base) as (disk, sickness), serving(base, disk) as mount:
        yield mount, sickness


class Question(threading.Thread):
    """A program that reads a file: ``error`` is the errno that it got, 0 for none, after ``seconds``."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self.error = 0
        self.seconds = 0.0
        self.content = b""
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        try:
            self.content = self._path.read_bytes()
        except OSError as error:
            self.error = error.errno or -1
        self.seconds = time.monotonic() - began


def time_answers(mount: Mount, warm: Path, cold: Path, number: int) -> dict[str, float]:
    """The seconds that each thing takes which needs no answer of the disk."""
    asks: dict[str, Callable[[], object]] = {
        "ls": lambda: os.listdir(mount.path),
        "df": lambda: os.statvfs(mount.path),
        "stat": cold.stat,
        "status": mount.status,
        "read of DRAM": warm.read_bytes,
        "new file": lambda: (mount.path / f"new-{number}").write_bytes(b"new" * 1000),
        "miss": (mount.path / "absent").exists,
    }
    taken = {}
    for name, ask in asks.items():
        began = time.monotonic()
        ask()
        taken[name] = time.monotonic() - began
    return taken


def test_a_disk_that_hangs_lets_only_those_wait_who_read_from_it(sick: tuple[Mount, Sickness]) -> None:
    """ETIMEDOUT for them at the deadline; ls, df, stat and status answer meanwhile as always."""
    mount, sickness = sick
    cold, warm = mount.store_cold("cold", 1), mount.store("warm", 2)
    with sickness.during("hangs"):
        question = Question(cold)
        rounds: list[dict[str, float]] = []
        while question.is_alive():
            rounds.append(time_answers(mount, warm, cold, len(rounds)))
        assert len(rounds) > 3
        for name in rounds[0]:
            taken = [answers[name] for answers in rounds]
            assert statistics.median(taken) < AT_ONCE, (name, taken)
            assert max(taken) < IO_TIMEOUT / 2, (name, taken)
        assert question.error == errno.ETIMEDOUT
        assert question.seconds < IO_TIMEOUT + 1
        assert mount.is_troubled()
        wait_until(lambda: fails_at_once(cold), 10, "it is known to fail: nobody waits for it again")
        assert warm.read_bytes() == data(2)
    wait_until(lambda: reads(cold, 1), 40, "it is tried again, and works")
    mount.wait_recovered()
    assert "corrupt" not in mount.status()["misses"]


def test_a_disk_that_hangs_is_asked_less_and_less(sick: tuple[Mount, Sickness]) -> None:
    """Whoever reads meanwhile hears at once; one in a while is let through, after ever longer pauses."""
    mount, sickness = sick
    cold = mount.store_cold("cold", 1)
    began, tried = time.monotonic(), []
    with sickness.during("hangs"):
        while time.monotonic() < began + 12:
            question = Question(cold)
            question.join()
            assert question.error in (errno.EIO, errno.ETIMEDOUT)
            if question.seconds > IO_TIMEOUT / 2:
                tried.append(time.monotonic() - began)
            time.sleep(0.05)
    assert 2 <= len(tried) <= 5, tried
    pauses = [later - earlier for earlier, later in pairwise(tried)]
    assert pauses == sorted(pauses), tried
    wait_until(lambda: reads(cold, 1), 40, "it works again")


def test_writers_hardly_notice_a_disk_that_hangs(sick: tuple[Mount, Sickness]) -> None:
    """More than DRAM holds is written while nothing can go down; it leaves as without an SSD."""
    mount, sickness = sick
    cold = mount.store_cold("cold", 1)
    with sickness.during("hangs"):
        slowest = 0.0
        for number in range(60):
            began = time.monotonic()
            (mount.path / f"{number:02}").write_bytes(data(number))
            slowest = max(slowest, time.monotonic() - began)
        assert slowest < 2 * IO_TIMEOUT + 1, f"{slowest:.1f} s"
        assert (mount.path / "59").read_bytes() == data(59)
        assert mount.is_troubled()
    wait_until(lambda: reads(cold, 1), 40, "it works again")
    mount.wait_recovered()
    mount.store("after", 3)


def test_a_disk_that_fails_to_read_is_an_error_and_no_miss(sick: tuple[Mount, Sickness]) -> None:
    """EIO; the name stays, nothing is quarantined, and the page is there when the disk is well again."""
    mount, sickness = sick
    cold, warm = mount.store_cold("cold", 1), mount.store("warm", 2)
    with sickness.during("fails"):
        for _ in range(3):
            with pytest.raises(OSError) as caught:  # noqa: PT011
                cold.read_bytes()
            assert caught.value.errno == errno.EIO
        assert cold.stat().st_size == SIZE
        assert warm.read_bytes() == data(2)
        assert mount.is_troubled()
    wait_until(lambda: reads(cold, 1), 40, "it is tried again, and works")
    mount.wait_recovered()
    assert mount.tier("ssd")["damaged"] == {}


def test_a_disk_that_fails_to_write_keeps_pages_in_dram(sick: tuple[Mount, Sickness]) -> None:
    """What it cannot take stays above; what it has is served; later it takes what is new."""
    mount, sickness = sick
    cold = mount.store_cold("cold", 1)
    with sickness.during("fails-to-write"):
        paths = [mount.path / f"{number:02}" for number in range(8)]
        for number, path in enumerate(paths):
            path.write_bytes(data(number))
        wait_sealed(*paths)
        wait_until(mount.is_troubled, 10, "the SSD is shown to fail")
        with pytest.raises(OSError) as caught:  # noqa: PT011
            os.setxattr(paths[0], "user.kvfs.evict", b"1")
        assert caught.value.errno == errno.EIO
        for number, path in enumerate(paths):
            assert path.read_bytes() == data(number)
    wait_until(lambda: reads(cold, 1), 40, "the disk is tried again")
    for number, path in enumerate(paths):
        wait_until(lambda path=path: evicts(path), 40, "the SSD takes it now")  # type: ignore[misc]
        assert path.read_bytes() == data(number)


def test_a_disk_that_turns_read_only_serves_what_it_has(base: Path) -> None:
    """A page that is renamed meanwhile fails at once, and is there when the disk can be written again."""
    with small_disk(base, "ext4", 256) as disk, serving(base, disk) as mount:
        cold, moved = mount.store_cold("cold", 1), mount.store_cold("moved", 2)
        hold_read_only(disk)
        try:
            new = mount.path / "new"
            new.write_bytes(data(3))
            wait_sealed(new)
            wait_until(mount.is_troubled, 10, "the SSD is shown to fail")
            moved.rename(mount.path / "elsewhere")
            for name, number in (("cold", 1), ("new", 3)):
                question = Question(mount.path / name)
                question.join()
                assert (question.error, question.content) == (0, data(number))
            wait_until(lambda: fails_at_once(mount.path / "elsewhere"), 10, "it is said what cannot be done")
        finally:
            remount(disk, "rw")
        wait_until(lambda: not mount.tier("ssd")["waiting_changes"], 40, "the SSD follows")
        assert (disk / "kvfs/elsewhere").exists()
        assert not (disk / "kvfs/moved").exists()
        wait_until(lambda: evicts(new), 40, "the SSD takes pages again")
        assert new.read_bytes() == data(3)
        assert cold.read_bytes() == data(1)
        assert (mount.path / "elsewhere").read_bytes() == data(2)


def test_unmounting_says_what_a_read_only_disk_did_not_take(base: Path) -> None:
    with small_disk(base, "ext4", 256) as disk:
        with Mount(base, disk) as mount:
            mount.store("written-anew", 1)
            mount.store("moved", 2)
            hold_read_only(disk)
            try:
                (mount.path / "written-anew").write_bytes(data(3))
                (mount.path / "moved").rename(mount.path / "elsewhere")
                wait_sealed(mount.path / "written-anew")
                ended = mount.try_umount()
            finally:
                remount(disk, "rw")
        assert ended.returncode == 0, ended.stderr
        assert ended.stderr == (
            "kvfs: warning: 2 changes and 1 new page did not reach the SSD (Read-only file system): "
            "the next mount finds there what it had before\n"
        )
        with serving(base, disk, number=2) as mount:
            assert reads(mount.path / "written-anew", 1)
            assert reads(mount.path / "moved", 2)


def fails_at_once(path: Path) -> bool:
    question = Question(path)
    question.join()
    assert not question.content
    return question.error == errno.EIO and question.seconds < AT_ONCE


def remount(disk: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", str(disk)], check=True, timeout=60)


def hold_read_only(disk: Path) -> None:
    """It cannot be done while somebody writes."""

    def attempt() -> bool:
        try:
            remount(disk, "ro")
        except subprocess.CalledProcessError:
            return False
        return True

    wait_until(attempt, 20, "the disk is read-only")
