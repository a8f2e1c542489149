"""A mount in the foreground, under a service manager that the test plays."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.mounted.conftest import MakeMount
from tests.mounted.operations import pattern
from tests.mounted.running import (
    MIB,
    KvfsMount,
    environment_for_kvfs,
    is_alive,
    mountinfo,
    wait_sealed,
    wait_until,
)

DATA = pattern(23, MIB)


class Manager:
    """Starts ``kvfs mount -f`` as systemd does, and hears what it says."""

    def __init__(self, mount: KvfsMount, *arguments: str, watchdog: float = 0.0) -> None:
        self.mount = mount
        self.arguments = arguments
        self.watchdog = watchdog
        self.processes: list[subprocess.Popen[bytes]] = []
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(mount.state_base.parent / "notify"))
        self.socket.settimeout(20)

    def start(self) -> subprocess.Popen[bytes]:
        variables = {"NOTIFY_SOCKET": str(self.socket.getsockname())}
        if self.watchdog:
            variables["WATCHDOG_USEC"] = str(int(self.watchdog * 1e6))
        words = ["mount", "-f", self.mount.path, "--pool", self.mount.pool_bytes]
        words += ["--state-dir", self.mount.state_base, *self.arguments]
        with open(self.mount.state_base.parent / "journal", "ab") as journal:
            status = os.fstat(journal.fileno())
            variables["JOURNAL_STREAM"] = f"{status.st_dev}:{status.st_ino}"
            process = subprocess.Popen(
                [sys.executable, "-m", "kvfs", *map(str, words)],
                env=environment_for_kvfs(variables),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=journal,
                stderr=journal,
            )
        self.mount.daemon_pid = process.pid
        self.mount.pids.append(process.pid)
        self.processes.append(process)
        return process

    def hear(self) -> dict[str, str]:
        lines = self.socket.recv(4096).decode().split("\n")
        return dict(line.split("=", 1) for line in lines)

    def hears_nothing_more(self) -> None:
        """Until half a second is quiet; what was under way may still come."""
        self.socket.settimeout(0.5)
        try:
            while True:
                self.hear()
        except TimeoutError:
            self.socket.settimeout(20)

    def hear_until(self, variable: str) -> dict[str, str]:
        while variable not in (message := self.hear()):
            pass
        return message

    @property
    def journal(self) -> str:
        return (self.mount.state_base.parent / "journal").read_text()


@contextmanager
def managed(mount: KvfsMount, *arguments: str, watchdog: float = 0.0) -> Iterator[Manager]:
    manager = Manager(mount, *arguments, watchdog=watchdog)
    try:
        yield manager
    finally:
        manager.socket.close()
        for process in manager.processes:
            process.kill()
            process.wait()
    assert "Traceback" not in manager.journal, manager.journal


def test_ready_means_that_it_serves(make_mount: MakeMount) -> None:
    mount = make_mount()
    with managed(mount) as manager:
        process = manager.start()
        message = manager.hear()
        assert message["READY"] == "1"
        assert "of 256.0 MiB of DRAM used" in message["STATUS"]
        (mount.path / "page").write_bytes(DATA)
        assert (mount.path / "page").read_bytes() == DATA
        process.send_signal(signal.SIGTERM)
        message = manager.hear()
        assert message["STOPPING"] == "1"
        assert int(message["EXTEND_TIMEOUT_USEC"]) == 60_000_000
        assert process.wait(20) == 0
        first = manager.journal.splitlines()[0]
        assert first == f"INFO kvfs.daemon: serving {mount.path}", "the journal notes the time itself"
    assert mountinfo(mount.path) == []
    assert list(mount.state_base.iterdir()) == []


def test_signs_of_life_come_as_often_as_they_must(make_mount: MakeMount) -> None:
    mount = make_mount()
    with managed(mount, watchdog=1.5) as manager:
        process = manager.start()
        manager.hear_until("READY")
        begun = time.monotonic()
        for _ in range(4):
            assert manager.hear()["WATCHDOG"] == "1"
        assert time.monotonic() - begun < 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_a_daemon_that_hangs_gives_no_sign_of_life(make_mount: MakeMount) -> None:
    """The manager kills it then, and starts another, which finds every page."""
    mount = make_mount()
    with managed(mount, watchdog=0.6) as manager:
        process = manager.start()
        manager.hear_until("WATCHDOG")
        (mount.path / "page").write_bytes(DATA)
        wait_sealed(mount.path / "page")
        process.send_signal(signal.SIGSTOP)
        manager.hears_nothing_more()
        process.kill()
        assert process.wait(20) == -signal.SIGKILL
        process = manager.start()
        manager.hear_until("READY")
        assert len(mountinfo(mount.path)) == 1
        assert (mount.path / "page").read_bytes() == DATA
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


@pytest.mark.as_root
@pytest.mark.parametrize("is_open", [False, True])
def test_a_restart_keeps_the_pages(make_mount: MakeMount, is_open: bool) -> None:
    """SIGUSR1 is the unit's RestartKillSignal; programs that have pages open are no hindrance."""
    mount = make_mount()
    with managed(mount) as manager:
        process = manager.start()
        manager.hear_until("READY")
        (mount.path / "page").write_bytes(DATA)
        wait_sealed(mount.path / "page")
        held = os.open(mount.path / "page", os.O_RDONLY) if is_open else None
        process.send_signal(signal.SIGUSR1)
        manager.hear_until("STOPPING")
        assert process.wait(20) == 0
        assert mountinfo(mount.path) == []
        assert mountinfo(mount.dram)
        if held is not None:
            os.close(held)
        process = manager.start()
        manager.hear_until("READY")
        assert (mount.path / "page").read_bytes() == DATA
        assert mount.status()["adopted"]["pages"] == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert list(mount.state_base.iterdir()) == []


def unmount_while_it_copies(mount: KvfsMount, disk: Path) -> None:
    """Leaves the daemon with pages that the SSD has not: it is slow, and has all the time it wants."""
    for number in range(8):
        (mount.path / f"page-{number}").write_bytes(DATA * 8)
    wait_sealed(*(mount.path / f"page-{number}" for number in range(8)))
    subprocess.run(["umount", str(mount.path)], check=True)


@pytest.mark.as_root
def test_being_told_to_end_after_an_unmount_changes_nothing(make_mount: MakeMount, tmp_path: Path) -> None:
    """systemd unmounts at a shutdown and stops the service: the SSD gets everything all the same."""
    disk = tmp_path / "disk"
    mount = make_mount()
    with managed(mount, "--ssd", str(disk), "--settle", "1h", "--flush-timeout", "50s") as manager:
        process = manager.start()
        manager.hear_until("READY")
        unmount_while_it_copies(mount, disk)
        message = manager.hear_until("STOPPING")
        assert int(message["EXTEND_TIMEOUT_USEC"]) == 110_000_000
        for _ in range(3):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                time.sleep(0.01)
        assert process.wait(50) == 0
        assert (disk / "page-7").stat().st_size == len(DATA) * 8
    assert not is_alive(process.pid)


@pytest.mark.as_root
def test_detached_before_it_is_told_to_end(make_mount: MakeMount) -> None:
    """After ``umount -l`` there is nothing left to unmount; who still has it open is cut off."""
    mount = make_mount()
    with managed(mount) as manager:
        process = manager.start()
        manager.hear_until("READY")
        (mount.path / "page").write_bytes(DATA)
        wait_sealed(mount.path / "page")
        with open(mount.path / "page", "rb"):
            subprocess.run(["umount", "-l", str(mount.path)], check=True)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        assert "its connection is cut" in manager.journal
    wait_until(lambda: not list(mount.state_base.iterdir()), 5, "the state is gone")
