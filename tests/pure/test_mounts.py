from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs import mounts
from kvfs.errors import MountpointError, NotPermitted, UsageError

MOUNTINFO = rb"""24 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
60 24 0:45 / /mnt/kv\040a\134 rw,nosuid,nodev shared:2 master:3 - fuse.kvfs kvfs rw,user_id=0,allow_other
61 60 0:46 /sub /mnt/kv\040a\134 ro - tmpfs none rw
"""


def test_mountinfo_is_parsed() -> None:
    entries = mounts.parse_mountinfo(MOUNTINFO)
    assert [entry.mount_id for entry in entries] == [24, 60, 61]
    kvfs = entries[1]
    assert kvfs.mountpoint == Path("/mnt/kv a\\")
    assert (kvfs.fstype, kvfs.source, kvfs.device, kvfs.root) == ("fuse.kvfs", "kvfs", "0:45", "/")
    assert {"nosuid", "allow_other"} <= set(kvfs.options)
    assert entries[2].root == "/sub"


def test_this_machine_has_a_proc() -> None:
    [entry] = mounts.find(Path("/proc"))[-1:]
    assert entry.fstype == "proc"
    assert not mounts.is_dead(Path("/proc"))


def test_a_path_is_resolved_unless_something_is_mounted_on_it(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert mounts.resolve_mountpoint(tmp_path / "link") == (tmp_path / "real").resolve()
    assert mounts.resolve_mountpoint(tmp_path / "link" / ".." / "missing") == tmp_path.resolve() / "missing"
    assert mounts.resolve_mountpoint("/proc/") == Path("/proc")


def test_an_empty_path_does_not_mean_the_current_directory() -> None:
    with pytest.raises(UsageError, match="name a directory"):
        mounts.resolve_mountpoint("")


@pytest.mark.parametrize(("user", "name"), [(0, "root"), (4242424, "user 4242424")])
def test_who_did_not_mount_is_told_who_did(user: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("/mnt/kv")
    entry = mounts.MountEntry(60, "/", path, mounts.FSTYPE, "kvfs", ("rw", f"user_id={user}"), "0:45")
    monkeypatch.setattr(mounts, "find", lambda _: [entry])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    with pytest.raises(NotPermitted, match=f"^/mnt/kv was mounted by {name}: sudo kvfs umount /mnt/kv$"):
        mounts.unmount(path)


def test_another_filesystem_is_not_cleared() -> None:
    with pytest.raises(MountpointError, match=r"/proc: proc from .* is mounted there"):
        mounts.clear_dead(Path("/proc"))


def test_nothing_to_clear(tmp_path: Path) -> None:
    assert not mounts.clear_dead(tmp_path)


def test_mountpoints_that_cannot_be_used(tmp_path: Path) -> None:
    mounts.check_mountpoint(tmp_path)
    with pytest.raises(MountpointError, match="mkdir -p"):
        mounts.check_mountpoint(tmp_path / "missing")
    (tmp_path / "file").write_text("")
    with pytest.raises(MountpointError, match="is not empty"):
        mounts.check_mountpoint(tmp_path)
    with pytest.raises(MountpointError, match="is not a directory"):
        mounts.check_mountpoint(tmp_path / "file")
    with pytest.raises(MountpointError, match="not a directory"):
        mounts.check_mountpoint(tmp_path / "file" / "below")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root")
def test_holders_are_found_by_what_they_hold(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "none", str(tmp_path)], check=True)
    try:
        [entry] = mounts.find(tmp_path.resolve())
        (tmp_path / "page").write_bytes(b"x" * 4096)
        assert mounts.holders(entry.device) == []
        script = "import mmap, os; f = os.open('page', 2); m = mmap.mmap(f, 4096); print(flush=True); input()"
        with subprocess.Popen(
            ["python3", "-c", script], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            found = mounts.holders(entry.device)
            process.communicate(b"\n")
        assert {holder.pid for holder in found} == {process.pid}
        assert {holder.name for holder in found} == {"python3"}
        assert {holder.what for holder in found} == {
            f"working directory {tmp_path.resolve()}",
            f"open file {tmp_path.resolve()}/page",
            f"mapped file {tmp_path.resolve()}/page",
        }
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_stuck_process_is_listed_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may make whoever looks at a process wait for ever."""
    end, every_use = threading.Event(), mounts._every_use

    def stuck(process: Path, device: str) -> Iterator[str]:
        if process.name == str(os.getpid()):
            end.wait()
        return every_use(process, device)

    monkeypatch.setattr(mounts, "_every_use", stuck)
    monkeypatch.setattr(mounts, "LOOK_SECONDS", 0.05)
    begun = time.monotonic()
    found = mounts.holders("0:9999")
    end.set()
    assert time.monotonic() - begun < mounts.SCAN_SECONDS
    assert [(holder.pid, "may hold it" in holder.what) for holder in found] == [(os.getpid(), True)]


def test_looking_for_holders_comes_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    monkeypatch.setattr(mounts, "_every_use", lambda *_: iter(["it"] if end.wait() else []))
    monkeypatch.setattr(mounts, "SCAN_SECONDS", 0.2)
    monkeypatch.setattr(mounts, "LOOK_SECONDS", 0.15)
    begun = time.monotonic()
    assert len(mounts.holders("0:9999")) == 2
    end.set()
    assert time.monotonic() - begun < 2
