"""The verbs as a person uses them: mount, umount in all its ways, status, and where settings come from."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
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
    mounts_below,
    run_kvfs,
    wait_sealed,
    wait_until,
)

DATA = pattern(19, MIB)
CAP_SYS_RESOURCE = 24
HOLDING = """
import mmap, os, sys
path, how = sys.argv[1:]
if how == 'cwd':
    os.chdir(os.path.dirname(path))
elif how == 'descriptor':
    file = open(path, 'rb')
else:
    with open(path, 'rb') as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print('ready', flush=True)
sys.stdin.read()
if how == 'descriptor':
    sys.stdout.write(str(len(file.read())))
elif how == 'mapping':
    sys.stdout.write(str(len(mapping[:])))
"""


@contextmanager
def held(path: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    """A process that uses the mount until its standard input ends."""
    command = [sys.executable, "-c", HOLDING, str(path), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        yield process


def gone_without_a_trace(mount: KvfsMount) -> bool:
    return (
        not is_alive(mount.daemon_pid)
        and not mounts_below(mount.path.parent)
        and not list(mount.state_base.iterdir())
    )


def test_mount_returns_when_the_mount_serves(make_mount: MakeMount) -> None:
    mount = make_mount()
    mount.mount()
    (fields,) = mountinfo(mount.path)
    assert fields[-3:-1] == ["fuse.kvfs", "kvfs"]
    found = subprocess.run(
        ["findmnt", "-n", "-t", "fuse.kvfs", "-o", "TARGET", str(mount.path)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.split() == [str(mount.path)]
    (mount.path / "page").write_bytes(DATA)
    mount.umount()
    assert gone_without_a_trace(mount)
    assert os.listdir(mount.path) == []


@pytest.mark.parametrize("how", ["cwd", "descriptor", "mapping"])
def test_umount_names_who_is_busy(make_mount: MakeMount, how: str) -> None:
    mount = make_mount()
    mount.mount()
    page = mount.path / "page"
    page.write_bytes(DATA)
    wait_sealed(page)
    with held(page, how) as process:
        ended = mount.try_umount()
        assert ended.returncode == 7, ended
        assert str(process.pid) in ended.stderr
        assert "python" in ended.stderr
        assert page.read_bytes() == DATA
        process.communicate("")
    mount.umount()
    assert gone_without_a_trace(mount)


def test_a_lazy_umount_lets_users_finish(make_mount: MakeMount) -> None:
    """And while they do, nobody else can take the same state."""
    mount = make_mount()
    mount.mount()
    page = mount.path / "page"
    page.write_bytes(DATA)
    wait_sealed(page)
    with held(page, "descriptor") as process:
        ended = mount.try_umount("-z")
        assert ended.returncode == 0, ended
        assert not mountinfo(mount.path)
        again = mount.try_mount()
        assert again.returncode == 5, again
        assert str(mount.daemon_pid) in again.stderr
        read, _ = process.communicate("")
        assert read == str(MIB)
    wait_until(lambda: gone_without_a_trace(mount), 10, "the daemon follows its last user")


@pytest.mark.parametrize("command", [["fusermount3", "-u"], ["umount"]])
def test_the_systems_own_commands_end_it_cleanly(make_mount: MakeMount, command: list[str]) -> None:
    mount = make_mount()
    mount.mount()
    (mount.path / "page").write_bytes(DATA)
    subprocess.run([*command, str(mount.path)], check=True)
    wait_until(lambda: gone_without_a_trace(mount), 10, "daemon, DRAM and state are gone")


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_daemon_unmounts(make_mount: MakeMount, signal_number: signal.Signals) -> None:
    mount = make_mount()
    mount.mount()
    os.kill(mount.daemon_pid, signal_number)
    wait_until(lambda: gone_without_a_trace(mount), 10, "daemon, DRAM and state are gone")


def test_keep_keeps_the_pages_for_the_next_mount(make_mount: MakeMount) -> None:
    mount = make_mount()
    mount.mount()
    page = mount.path / "page"
    page.write_bytes(DATA)
    wait_sealed(page)
    mount.umount("--keep")
    assert not is_alive(mount.daemon_pid)
    mount.mount()
    assert page.read_bytes() == DATA
    mount.umount()
    assert gone_without_a_trace(mount)
    mount.mount()
    assert os.listdir(mount.path) == []
    mount.umount()


def test_a_second_mount_on_the_same_path_is_refused(make_mount: MakeMount) -> None:
    mount = make_mount()
    mount.mount()
    ended = mount.try_mount()
    assert ended.returncode == 5
    assert len(ended.stderr.splitlines()) == 1
    assert len(mountinfo(mount.path)) == 1
    assert mount.status()["pid"] == mount.daemon_pid
    mount.umount()


def has_capability(number: int) -> bool:
    """Whether this process, and so what it starts, has a capability; root in a container may lack some."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if "CapEff" in line)
    return bool(int(line.split()[1], 16) >> number & 1)


def test_the_daemon_stands_on_its_own(make_mount: MakeMount) -> None:
    """It keeps no directory busy, is no child of a terminal, and is the last to go when memory runs out."""
    mount = make_mount()
    mount.mount()
    process = Path(f"/proc/{mount.daemon_pid}")
    assert os.readlink(process / "cwd") == "/"
    assert os.getsid(mount.daemon_pid) == mount.daemon_pid
    if has_capability(CAP_SYS_RESOURCE):
        assert int((process / "oom_score_adj").read_text()) < 0
    assert not [link for link in map(os.readlink, (process / "fd").iterdir()) if link.startswith("/dev/pts")]
    mount.umount()


def test_a_mountpoint_with_a_space_by_another_name(make_mount: MakeMount) -> None:
    """Given by a relative path, through a symlink, with a slash at its end."""
    mount = make_mount()
    base = mount.path.parent
    mount.path.rmdir()
    mount.path = base / "a mount%point"
    mount.path.mkdir()
    (base / "symlink").symlink_to("a mount%point")
    command = [sys.executable, "-m", "kvfs"]
    arguments = ["mount", "symlink/", "--pool", "64M", "--state-dir", str(mount.state_base)]
    environment = environment_for_kvfs()
    subprocess.run([*command, *arguments], cwd=base, env=environment, check=True, capture_output=True)
    mount.daemon_pid = mount.status()["pid"]
    assert len(mountinfo(mount.path)) == 1
    assert mount.status()["mount"] == str(mount.path)
    subprocess.run([*command, "umount", "symlink"], cwd=base, env=environment, check=True)
    assert gone_without_a_trace(mount)


def test_a_pool_that_takes_most_of_the_memory_is_warned_of(make_mount: MakeMount) -> None:
    mount = make_mount()
    ended = run_kvfs("mount", mount.path, "--pool", "90%", "--state-dir", mount.state_base)
    assert ended.returncode == 0, ended.stderr
    assert "warning" in ended.stderr
    mount.daemon_pid = mount.status()["pid"]
    mount.umount()


def test_two_mounts_share_nothing(make_mount: MakeMount) -> None:
    one, other = make_mount(), make_mount()
    one.mount()
    other.mount()
    (one.path / "page").write_bytes(DATA * 20)
    wait_sealed(one.path / "page")
    assert os.listdir(other.path) == []
    assert other.used_bytes() < MIB
    assert other.status()["tiers"]["dram"]["pages"] == 0
    (other.path / "page").write_bytes(b"other")
    assert (one.path / "page").read_bytes() == DATA * 20
    one.umount()
    assert (other.path / "page").read_bytes() == b"other"
    other.umount()


def test_umount_of_what_is_not_mounted(make_mount: MakeMount) -> None:
    ended = make_mount().try_umount()
    assert ended.returncode == 8
    assert len(ended.stderr.splitlines()) == 1


def test_umount_of_a_dead_mount_frees_its_memory(make_mount: MakeMount) -> None:
    mount = make_mount()
    mount.mount()
    (mount.path / "page").write_bytes(DATA)
    mount.kill_daemon()
    ended = mount.try_umount("--state-dir", str(mount.state_base))
    assert ended.returncode == 0, ended
    assert gone_without_a_trace(mount)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_in_the_foreground_it_serves_until_a_signal(
    make_mount: MakeMount, signal_number: signal.Signals
) -> None:
    mount = make_mount()
    command = [sys.executable, "-m", "kvfs", "mount", str(mount.path), "--pool", "128M", "-f"]
    command += ["--state-dir", str(mount.state_base)]
    with subprocess.Popen(
        command, env=environment_for_kvfs(), cwd="/", stderr=subprocess.PIPE, text=True
    ) as process:
        wait_until(lambda: bool(mountinfo(mount.path)), 15, "it is mounted")
        (mount.path / "page").write_bytes(DATA)
        assert (mount.path / "page").read_bytes() == DATA
        process.send_signal(signal_number)
        _, errors = process.communicate(timeout=20)
    assert process.returncode in (0, 128 + signal_number), (process.returncode, errors)
    assert "Traceback" not in errors
    assert mounts_below(mount.path.parent) == []
    assert list(mount.state_base.iterdir()) == []


def test_flag_before_environment_before_file_before_default(make_mount: MakeMount, tmp_path: Path) -> None:
    file = tmp_path / "kvfs.toml"
    file.write_text('pool = "96M"\nhugepages = "off"\nmode = "0751"\n')
    mount = make_mount(
        128 * MIB, "--config", str(file), environment={"KVFS_HUGEPAGES": "prefer", "KVFS_POOL": "64M"}
    )
    mount.mount()
    config = mount.status()["config"]
    origins = {key: config[key]["origin"] for key in config}
    assert "flag" in origins["pool_bytes"]
    assert origins["hugepages"] == "environment KVFS_HUGEPAGES"
    assert str(file) in origins["mode"]
    assert "default" in origins["numa"]
    assert stat.S_IMODE(mount.path.stat().st_mode) == 0o751
    assert mount.status()["tiers"]["dram"]["capacity_bytes"] <= 128 * MIB
    mount.umount()


@pytest.mark.as_root
def test_the_root_directory_belongs_to_its_owner(make_mount: MakeMount) -> None:
    mount = make_mount(128 * MIB, "--owner", "65534:65534", "--mode", "0750")
    mount.mount()
    found = mount.path.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (65534, 65534, 0o750)
    mount.umount()


@pytest.mark.as_root
def test_who_called_sudo_is_the_owner(make_mount: MakeMount) -> None:
    mount = make_mount(128 * MIB, environment={"SUDO_UID": "1234", "SUDO_GID": "4321"})
    mount.mount()
    found = mount.path.stat()
    assert (found.st_uid, found.st_gid) == (1234, 4321)
    mount.umount()


@pytest.mark.parametrize("hugepages", ["prefer", "off", "require"])
def test_hugepages(make_mount: MakeMount, hugepages: str) -> None:
    mount = make_mount(128 * MIB, "--hugepages", hugepages)
    ended = mount.try_mount()
    if hugepages == "require" and ended.returncode == 6:
        assert "hugepage" in ended.stderr
        assert len(ended.stderr.splitlines()) == 1
        return
    assert ended.returncode == 0, ended.stderr
    mount.daemon_pid = mount.status()["pid"]
    status = mount.status()["hugepages"]
    if hugepages == "off":
        assert not status["active"]
    if hugepages == "require":
        assert status["active"]
    assert status["reason"] or status["active"]
    mount.umount()


def test_status_for_people_and_for_programs(make_mount: MakeMount) -> None:
    mount = make_mount()
    mount.mount()
    text = run_kvfs("status", mount.path)
    assert text.returncode == 0
    assert text.stdout.strip()
    assert re.sub(r"[\d.]+", "", text.stdout) == re.sub(
        r"[\d.]+", "", (mount.path / ".kvfs/status").read_text()
    )
    found = json.loads(run_kvfs("status", mount.path, "--json").stdout)
    assert found["pid"] == mount.daemon_pid
    everything = run_kvfs("status")
    assert str(mount.path) in everything.stdout
    mount.umount()
    assert run_kvfs("status", mount.path).returncode == 8


def test_status_of_a_dead_mount_does_not_hang(make_mount: MakeMount) -> None:
    mount = make_mount()
    mount.mount()
    mount.kill_daemon()
    begun = time.monotonic()
    ended = run_kvfs("status", mount.path)
    assert ended.returncode != 0
    assert len(ended.stderr.splitlines()) == 1
    assert time.monotonic() - begun < 5
    mount.remount()
    mount.umount()
