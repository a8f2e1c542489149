"""The daemon killed at any moment: what goes on, what the next mount serves, that nothing is left behind."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.mounted.children import start, wait
from tests.mounted.conftest import MODES, MakeMount
from tests.mounted.operations import pattern
from tests.mounted.running import (
    MIB,
    REPOSITORY,
    KvfsMount,
    digest,
    environment_for_kvfs,
    is_alive,
    mountinfo,
    mounts_below,
    wait_sealed,
    wait_until,
)
from tests.mounted.tree import differences, snapshot

DATA = pattern(17, MIB)


def write_for_ever(directory: Path) -> None:
    """Store pages until the mount is gone."""
    number = 0
    while True:
        try:
            (directory / f"race-{number % 20}").write_bytes(DATA)
        except OSError as error:
            if error.errno not in (errno.ENOTCONN, errno.ECONNABORTED, errno.ENOENT):
                raise
            return
        number += 1


def close_dead(descriptor: int) -> None:
    """Close a descriptor of a mount that has died: the close itself says so."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


@pytest.mark.deadline(240)
def test_crashes_in_a_row_leave_nothing_behind(make_mount: MakeMount, mode: str) -> None:
    """Kill, mount, kill, mount: one line in mountinfo, every sealed page there, every draft gone."""
    rounds = 20 if mode == "passthrough" else 6
    mount = make_mount(environment=MODES[mode])
    mount.mount()
    pages: dict[str, bytes] = {}
    for number in range(rounds):
        page = mount.path / f"page-{number}"
        pages[page.name] = pattern(number, 100_000 + number)
        page.write_bytes(pages[page.name])
        wait_sealed(page)
        draft = os.open(mount.path / f"draft-{number}", os.O_WRONLY | os.O_CREAT, 0o644)
        os.write(draft, DATA)
        writer = start(lambda: write_for_ever(mount.path))
        time.sleep(0.01 + 0.007 * number)
        mount.kill_daemon()
        assert wait(writer) == 0
        mount.remount()
        close_dead(draft)
        assert len(mountinfo(mount.path)) == 1
        assert {name: (mount.path / name).read_bytes() for name in pages} == pages
        assert not (mount.path / f"draft-{number}").exists()
        for name in os.listdir(mount.path):
            if name.startswith("race-"):
                assert (mount.path / name).read_bytes() == DATA, "a torn page was adopted"
    mount.umount()
    assert mounts_below(mount.path.parent) == []
    assert list(mount.state_base.iterdir()) == []
    assert not any(map(is_alive, mount.pids))


@pytest.mark.deadline(60)
def test_a_mount_right_after_a_kill_waits_for_the_dying_daemon(make_mount: MakeMount) -> None:
    """A process that was killed holds its locks and descriptors for some more milliseconds."""
    mount = make_mount()
    mount.mount()
    (mount.path / "page").write_bytes(DATA)
    wait_sealed(mount.path / "page")
    for _ in range(5):
        mount.kill_daemon(wait=False)
        mount.remount()
        assert (mount.path / "page").read_bytes() == DATA
    mount.umount()


def test_descriptors_and_mappings_outlive_the_daemon(make_mount: MakeMount) -> None:
    mount = make_mount()
    mount.mount()
    if not mount.passthrough:
        pytest.skip("without passthrough the bytes come from the daemon")
    page = mount.path / "page"
    page.write_bytes(DATA)
    wait_sealed(page)
    with open(page, "rb", buffering=0) as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        mount.kill_daemon()
        assert mapping[:] == DATA
        assert os.pread(file.fileno(), MIB, 0) == DATA
        with pytest.raises(OSError, match="not connected"):
            page.stat()
        mount.remount()
        assert mapping[:] == DATA
        assert os.pread(file.fileno(), MIB, 0) == DATA
        assert page.read_bytes() == DATA
    mount.umount()


@pytest.mark.as_root
def test_everything_that_is_sealed_survives_a_kill(make_mount: MakeMount, mode: str) -> None:
    """Names, bytes, owners, modes, times, links, symlinks, fifos, directories and attributes."""
    mount = make_mount(environment=MODES[mode])
    mount.mount()
    top = mount.path / "top"
    (top / "a/b").mkdir(parents=True)
    (top / "empty-directory").mkdir(mode=0o700)
    for number in range(20):
        path = top / f"a/b/{number}"
        path.write_bytes(pattern(number, 10_000 * number + 1))
        os.setxattr(path, "user.number", str(number).encode())
        path.chmod(0o640 + number % 4)
        os.chown(path, 1000 + number, 2000)
        os.utime(path, ns=(10**9 + number, 10**9 + number))
    os.link(top / "a/b/3", top / "link")
    os.symlink("a/b/4", top / "symlink")
    os.lchown(top / "symlink", 1000, 1000)
    os.mkfifo(top / "fifo", 0o622)
    os.chown(top / "a", 1001, 1002)
    os.setxattr(top / "a", "user.of-a-directory", b"yes")
    os.utime(top / "a", ns=(10**9, 10**9))
    wait_sealed(*(top / f"a/b/{number}" for number in range(20)))
    before = snapshot(str(top))
    digests = [digest(top / f"a/b/{number}") for number in range(20)]
    mount.kill_daemon()
    mount.remount()
    assert not differences(before, snapshot(str(top)))
    assert [digest(top / f"a/b/{number}") for number in range(20)] == digests
    mount.umount("--keep")
    mount.remount()
    assert not differences(before, snapshot(str(top)))
    mount.umount()


def test_drafts_and_empty_files_do_not_survive_a_kill(make_mount: MakeMount) -> None:
    mount = make_mount()
    mount.mount()
    (mount.path / "empty").touch()
    (mount.path / "page").write_bytes(DATA)
    wait_sealed(mount.path / "page")
    draft = os.open(mount.path / "draft", os.O_WRONLY | os.O_CREAT, 0o644)
    os.write(draft, DATA)
    mount.kill_daemon()
    mount.remount()
    close_dead(draft)
    assert os.listdir(mount.path) == ["page"]
    mount.umount()


def test_a_page_whose_bytes_changed_is_never_served(make_mount: MakeMount, mode: str) -> None:
    """After a crash every page is checked against its digest before its first reader gets it."""
    mount = make_mount(environment=MODES[mode])
    mount.mount()
    bad, good = mount.path / "bad", mount.path / "good"
    for path in (bad, good):
        path.write_bytes(DATA)
        wait_sealed(path)
    mount.kill_daemon()
    with open(mount.dram / "bad", "r+b") as file:
        file.seek(54_321)
        byte = file.read(1)
        file.seek(54_321)
        file.write(bytes([byte[0] ^ 1]))
    mount.remount()
    assert good.read_bytes() == DATA
    with pytest.raises(OSError) as caught:  # noqa: PT011
        bad.read_bytes()
    assert caught.value.errno in (errno.ENOENT, errno.EIO)
    wait_until(lambda: not bad.exists(), 5, "the look-up after the failed read is a miss")
    status = mount.status()
    assert sum(status["failures"].values()) + sum(status["misses"].values()) >= 1
    bad.write_bytes(DATA)
    wait_sealed(bad)
    assert bad.read_bytes() == DATA
    mount.umount()


def test_backing_files_that_disappear_are_misses(make_mount: MakeMount, mode: str) -> None:
    """Removed by hand below the mount: a miss or still the whole page, right accounts, a daemon alive."""
    mount = make_mount(environment=MODES[mode])
    mount.mount()
    paths = [mount.path / f"page-{number}" for number in range(40)]
    for path in paths:
        path.write_bytes(DATA)
    wait_sealed(*paths)
    for path in paths[:20]:
        (mount.dram / path.name).unlink()
    for path in paths:
        try:
            assert path.read_bytes() == DATA
        except FileNotFoundError:
            assert path in paths[:20]
    for number in range(300):
        (mount.path / f"more-{number}").write_bytes(DATA)
    wait_until(lambda: not any(path.exists() for path in paths[:20]), 5, "the names are gone")
    assert is_alive(mount.daemon_pid)
    for path in paths[:20]:
        path.write_bytes(DATA)
        assert path.read_bytes() == DATA
    wait_until(
        lambda: mount.status()["tiers"]["dram"]["pages"] == len(os.listdir(mount.path)),
        5,
        "pages are counted",
    )
    assert mount.status()["tiers"]["dram"]["used_bytes"] == mount.used_bytes()
    mount.umount()


@pytest.mark.deadline(120)
def test_a_full_pool_survives_a_kill_with_its_order(make_mount: MakeMount, mode: str) -> None:
    """Filled to nine tenths: same names, sizes and usage; what was read stays longest; eviction goes on."""
    size = 4 * MIB
    mount = make_mount(1024 * MIB, environment=MODES[mode])
    mount.mount()
    count = 1024 * MIB * 9 // 10 // size
    paths = [mount.path / f"page-{number}" for number in range(count)]
    for path in paths:
        path.write_bytes(DATA * 4)
    wait_sealed(*paths)
    favourites = paths[:40]
    for path in favourites:
        path.read_bytes()
    time.sleep(2)
    before = {path.name: path.stat().st_size for path in mount.path.iterdir()}
    used = mount.used_bytes()
    mount.kill_daemon()
    mount.remount()
    assert {path.name: path.stat().st_size for path in mount.path.iterdir()} == before
    assert abs(mount.used_bytes() - used) <= MIB
    for number in range(80):
        (mount.path / f"new-{number}").write_bytes(DATA * 4)
    wait_until(lambda: mount.status()["evictions"] >= 40, 10, "the new pages push out old ones")
    there = [path.exists() for path in favourites]
    assert sum(there) >= 30, f"{sum(there)} of 40 pages that were read last are left"
    assert sum(path.exists() for path in paths[40:120]) <= 40
    mount.umount()


def test_a_smaller_pool_evicts_down_and_serves_the_rest(make_mount: MakeMount) -> None:
    mount = make_mount(512 * MIB)
    mount.mount()
    paths = [mount.path / f"page-{number}" for number in range(300)]
    for path in paths:
        path.write_bytes(DATA)
    wait_sealed(*paths)
    mount.kill_daemon()
    mount.remount(pool_bytes=256 * MIB)
    assert mount.used_bytes() <= 256 * MIB
    room = os.statvfs(mount.path)
    assert room.f_blocks * room.f_frsize <= 256 * MIB
    left = [path for path in paths if path.exists()]
    assert 100 <= len(left) < 256
    assert all(path.read_bytes() == DATA for path in left[-50:])
    mount.umount()


@pytest.mark.as_root
def test_another_filesystem_at_the_mountpoint_is_refused(make_mount: MakeMount) -> None:
    mount = make_mount()
    subprocess.run(["mount", "-t", "tmpfs", "other", str(mount.path)], check=True)
    ended = mount.try_mount()
    assert ended.returncode == 4
    assert len(ended.stderr.splitlines()) == 1
    assert [fields[-2] for fields in mountinfo(mount.path)] == ["other"]
    subprocess.run(["umount", str(mount.path)], check=True)


@pytest.mark.as_root
def test_a_dead_mount_of_another_filesystem_is_refused(make_mount: MakeMount) -> None:
    """Only a dead kvfs is cleared away; somebody else's dead mount is theirs to look at."""
    mount = make_mount()
    command = [sys.executable, "-m", "benches.empty_handler", str(mount.path)]
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment_for_kvfs()) as process:
        wait_until(lambda: bool(mountinfo(mount.path)), 10, "the other filesystem is mounted")
        process.send_signal(signal.SIGKILL)
    ended = mount.try_mount()
    assert ended.returncode == 4
    assert len(ended.stderr.splitlines()) == 1
    assert len(mountinfo(mount.path)) == 1
    subprocess.run(["umount", str(mount.path)], check=True)


@pytest.mark.as_root
def test_an_aborted_connection_ends_the_daemon(make_mount: MakeMount, scratch: Path) -> None:
    mount: KvfsMount = make_mount()
    mount.mount()
    (mount.path / "page").write_bytes(DATA)
    wait_sealed(mount.path / "page")
    connection = os.minor(mount.path.stat().st_dev)
    control = scratch / "fusectl"
    control.mkdir()
    subprocess.run(["mount", "-t", "fusectl", "none", str(control)], check=True)
    try:
        (control / str(connection) / "abort").write_text("1")
    finally:
        subprocess.run(["umount", str(control)], check=True)
    wait_until(lambda: not is_alive(mount.daemon_pid), 10, "the daemon has ended")
    mount.remount()
    assert len(mountinfo(mount.path)) == 1
    (mount.path / "other").write_bytes(DATA)
    assert (mount.path / "other").read_bytes() == DATA
    mount.umount()


def test_files_written_into_the_bare_directory_do_not_keep_the_pages_away(make_mount: MakeMount) -> None:
    """Engines go on writing after a crash; what waits in the tier is served again all the same."""
    mount = make_mount()
    mount.mount()
    (mount.path / "page").write_bytes(DATA)
    wait_sealed(mount.path / "page")
    mount.kill_daemon()
    subprocess.run(["umount", "-l", str(mount.path)], check=True)
    (mount.path / "stray").write_bytes(b"on the disk")
    mount.remount()
    assert os.listdir(mount.path) == ["page"]
    assert (mount.path / "page").read_bytes() == DATA
    mount.umount()
    (mount.path / "stray").unlink()
