"""mount(8), fstab and umount(8) on a kvfs: a mount namespace has the helper where mount looks for it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounted.operations import pattern
from tests.mounted.running import (
    MIB,
    environment_for_kvfs,
    is_alive,
    scratch_directory,
    wait_sealed,
    wait_until,
)
from tests.namespaces import skip_unless_namespaces_can_be_private

pytestmark = pytest.mark.as_root
DATA = pattern(29, MIB)
USAGE, FAILED = 1, 32


class Machine:
    """A mount namespace in which kvfs is installed for mount(8)."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.path = base / "mnt"
        self.path.mkdir()
        helpers = base / "sbin"
        helpers.mkdir()
        script = "from kvfs.cli.mount_helper import main; main()"
        command = f'exec {shlex.quote(sys.executable)} -P -c "{script}" "$@"'
        for name in ("mount.kvfs", "mount.fuse.kvfs"):
            (helpers / name).write_text(f"#!/bin/sh\n{command}\n")
            (helpers / name).chmod(0o755)
        (base / "fstab").write_text("")
        self._holder = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", f"{self._preparation()} && echo ready && exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"ready\n"
        self.root = Path(f"/proc/{self._holder.pid}/root")

    def _preparation(self) -> str:
        sbin, fstab = shlex.quote(str(self.base / "sbin")), shlex.quote(str(self.base / "fstab"))
        return (
            f"mount --bind {sbin} {os.path.realpath('/sbin')} && touch /etc/fstab && "
            f"mount --bind {fstab} /etc/fstab && mkdir -p /run/mount && mount -t tmpfs utab /run/mount"
        )

    @property
    def inside(self) -> Path:
        """The mountpoint, as one sees it from outside of the namespace."""
        return self.root / self.path.relative_to("/")

    def run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """A command in the namespace; the state of mounts is the test's own."""
        return subprocess.run(
            ["nsenter", "-m", "-t", str(self._holder.pid), *map(str, words)],
            env=environment_for_kvfs({"KVFS_STATE_DIR": str(self.base / "state")}),
            cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def mount(self, *words: str | Path) -> None:
        ended = self.run("mount", *words)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", ""), ended

    def umount(self) -> None:
        """Returns when the daemon has ended too."""
        daemon = self.daemon()
        ended = self.run("umount", self.path)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", ""), ended
        wait_until(lambda: not is_alive(daemon), 20, "the daemon has ended")

    def shown(self, columns: str) -> list[str]:
        """The columns of findmnt, of all that is mounted at the mountpoint."""
        return self.run("findmnt", "-n", "-o", columns, self.path).stdout.split()

    def daemon(self) -> int:
        status = (self.inside / ".kvfs/status.json").read_text()
        return int(status.partition('"pid": ')[2].partition(",")[0])

    def close(self) -> None:
        if self.shown("FSTYPE"):
            self.umount()
        self._holder.communicate(b"")
        assert list(self.base.glob("state/*")) == []


@pytest.fixture
def machine() -> Iterator[Machine]:
    skip_unless_namespaces_can_be_private()
    with scratch_directory() as base:
        machine = Machine(base)
        yield machine
        machine.close()


def assert_refused(ended: subprocess.CompletedProcess[str], code: int, words: str) -> None:
    assert ended.returncode == code, ended
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert words in line


def test_mount_and_umount(machine: Machine) -> None:
    """Quiet as mount is; findmnt shows the source."""
    machine.mount("-t", "kvfs", "pages of alice", machine.path, "-o", "pool=64M,owner=12345:54321,mode=0711")
    assert machine.shown("FSTYPE") == ["fuse.kvfs"]
    assert machine.run("findmnt", "-n", "-o", "SOURCE", machine.path).stdout == "pages of alice\n"
    status = machine.inside.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (12345, 54321, 0o711)
    (machine.inside / "page").write_bytes(DATA)
    assert (machine.inside / "page").read_bytes() == DATA
    machine.umount()
    assert machine.shown("FSTYPE") == []


def test_a_line_in_fstab(machine: Machine) -> None:
    options = "pool=64M,owner=12345,ro,noatime,_netdev,nofail,x-systemd.mount-timeout=30,nosuid"
    (machine.base / "fstab").write_text(f"kvfs {machine.path} kvfs {options} 0 0\n")
    machine.mount(machine.path)
    assert machine.shown("SOURCE,FSTYPE") == ["kvfs", "fuse.kvfs"]
    assert {"ro", "nosuid", "nodev", "noatime"} <= set(machine.shown("OPTIONS")[0].split(","))
    machine.mount("-a")
    assert machine.shown("FSTYPE") == ["fuse.kvfs"]


def test_options_that_go_with_any_filesystem(machine: Machine) -> None:
    ignored = "suid,dev,sync,dirsync,strictatime,lazytime,diratime,iversion"
    machine.mount(
        "-t", "kvfs", "kvfs", machine.path, "-o", f"{ignored},nosymfollow,noexec,pool=900%,pool=64M"
    )
    [options] = machine.shown("OPTIONS")
    assert {"nosuid", "nodev", "noexec", "nosymfollow"} <= set(options.split(","))
    machine.umount()


def test_an_ssd_has_everything_when_it_is_unmounted(machine: Machine) -> None:
    disk = machine.base / "disk"
    machine.mount("-t", "kvfs", "kvfs", machine.path, "-o", f"pool=64M,settle=1h,ssd={disk}")
    (machine.inside / "page").write_bytes(DATA)
    wait_sealed(machine.inside / "page")
    machine.umount()
    assert (disk / "page").read_bytes()[: len(DATA)] == DATA


def test_a_remount_is_refused(machine: Machine) -> None:
    machine.mount("-t", "kvfs", "kvfs", machine.path, "-o", "pool=64M")
    assert_refused(machine.run("mount", "-o", "remount,ro", machine.path), FAILED, "cannot be remounted")
    assert "rw" in machine.shown("OPTIONS")[0].split(",")


def test_what_is_mounted_already_is_refused(machine: Machine) -> None:
    machine.mount("-t", "kvfs", "kvfs", machine.path, "-o", "pool=64M")
    again = machine.run("mount", "-t", "kvfs", "other", machine.path, "-o", "pool=64M")
    assert_refused(again, FAILED, "already served")


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ("pol=64M", USAGE, "did you mean pool"),
        ("pool=300%", USAGE, "more than"),
        ("pool=64M,owner=nobody-of-this-name", USAGE, "nobody-of-this-name"),
        ("pool=64M,numa=63", USAGE, "63"),
    ],
)
def test_a_mistake_is_one_line(machine: Machine, options: str, code: int, words: str) -> None:
    ended = machine.run("mount", "-t", "kvfs", "kvfs", machine.path, "-o", options)
    assert_refused(ended, code, words)
    assert machine.shown("FSTYPE") == []


def test_trying_without_mounting(machine: Machine) -> None:
    machine.mount("-f", "-t", "kvfs", "kvfs", machine.path, "-o", "pool=64M")
    assert machine.shown("FSTYPE") == []
    ended = machine.run("mount", "-f", "-t", "kvfs", "kvfs", machine.path, "-o", "pool=12Q")
    assert_refused(ended, USAGE, "12Q")


def test_what_was_mounted_is_said_when_asked(machine: Machine) -> None:
    ended = machine.run("mount", "-v", "-t", "kvfs", "kvfs", machine.path, "-o", "pool=64M,nofail")
    assert ended.stdout.startswith(f"{machine.path} serves 64.0 MiB of DRAM")


def test_a_dead_mount_is_mounted_again_with_its_pages(machine: Machine) -> None:
    words = ("-t", "kvfs", "kvfs", machine.path, "-o", "pool=64M")
    machine.mount(*words)
    (machine.inside / "page").write_bytes(DATA)
    wait_sealed(machine.inside / "page")
    daemon = machine.daemon()
    os.kill(daemon, 9)
    wait_until(lambda: not is_alive(daemon), 10, "the daemon is gone")
    machine.mount(*words)
    assert machine.shown("FSTYPE") == ["fuse.kvfs"]
    assert (machine.inside / "page").read_bytes() == DATA
