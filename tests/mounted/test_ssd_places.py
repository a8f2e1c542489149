"""Directories that cannot be an SSD tier: one line that says why, nothing mounted, nothing changed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounted.operations import pattern
from tests.mounted.running import MIB, KvfsMount, mounts_below, raw_tmpfs, scratch_directory, wait_until

POOL = 128 * MIB
CAPACITY = ("--ssd-capacity", "256M")
USAGE, UNUSABLE = 2, 11


@pytest.fixture
def base() -> Iterator[Path]:
    with scratch_directory() as directory:
        yield directory


@pytest.fixture
def mount(base: Path) -> KvfsMount:
    return KvfsMount(base / "second", POOL)


def tree(directory: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_ino, path.lstat().st_mode) for path in directory.rglob("*")}


def assert_refused(mount: KvfsMount, code: int, words: str, *arguments: str | Path) -> None:
    ended = mount.try_mount(*map(str, arguments))
    assert ended.returncode == code, (ended.returncode, ended.stdout, ended.stderr)
    assert ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert words in ended.stderr
    assert mounts_below(mount.path.parent) == []
    assert list(mount.state_base.iterdir()) == []


def test_no_part_of_a_directory_in_use(base: Path, mount: KvfsMount) -> None:
    disk = base / "above" / "disk"
    disk.parent.mkdir()
    options = ("--ssd", str(disk), *CAPACITY, "--settle", "0s", "--ssd-write-delay", "0s")
    with KvfsMount(base / "first", POOL, *options) as first:
        page = first.path / "pages/ab/page"
        page.parent.mkdir(parents=True)
        page.write_bytes(pattern(1, MIB))
        wait_until((disk / "pages/ab/page").exists, 40, "the page is on the SSD")
        before = tree(disk)
        for place in ("pages", "pages/ab", "new", ".kvfs-quarantine"):
            assert_refused(mount, USAGE, f"lies in {disk}, an SSD", "--ssd", disk / place, *CAPACITY)
        assert_refused(mount, UNUSABLE, "holds an SSD directory", "--ssd", disk.parent, *CAPACITY)
        assert tree(disk) == before
        assert page.read_bytes() == pattern(1, MIB)
        assert first.status()["tiers"]["ssd"]["quarantined"] == 0


def test_no_part_of_a_mount_of_kvfs(base: Path, mount: KvfsMount) -> None:
    with KvfsMount(base / "first", POOL) as first:
        for place in (first.path, first.path / "new", first.dram, first.dram / "new"):
            assert_refused(mount, USAGE, "on a mount of kvfs", "--ssd", place, *CAPACITY)
        assert list(first.path.iterdir()) == list(first.dram.iterdir()) == []
    for place, words in (
        (mount.path, "that is the mount itself"),
        (mount.path / "new", "that lies in the mount"),
        (mount.path.parent, "lies in it"),
        (mount.state_base, "lies in it"),
        (mount.state_base / "new", "that lies in the state directory"),
    ):
        assert_refused(mount, USAGE, words, "--ssd", place, *CAPACITY)
    assert list(mount.path.iterdir()) == []


def test_what_is_no_directory_on_a_disk(base: Path, mount: KvfsMount) -> None:
    (base / "file").touch()
    for place, words in (
        ("/proc", "has no room to give"),
        ("/sys", "has no room to give"),
        ("/proc/self/new", "has no room to give"),
        (base / "file", "is not a directory"),
        (base / "file/below", "is not a directory"),
        (base / "missing/below", "does not exist: is the disk mounted?"),
    ):
        assert_refused(mount, USAGE, words, "--ssd", place, *CAPACITY)
    assert_refused(mount, USAGE, "has no room to give", "--ssd", "/proc")
    assert_refused(mount, USAGE, "is the disk mounted?", "--ssd", base / "missing/below")
    assert (base / "file").read_bytes() == b""


def test_a_capacity_that_makes_no_sense(base: Path, mount: KvfsMount) -> None:
    disk = base / "disk"
    for capacity, words in (
        ("1M", "--ssd-capacity: 1.0 MiB is too little: at least 64.0 MiB"),
        ("0", "is no room at all"),
        ("120%", "--ssd-capacity: '120%' is more than there is"),
        ("1000P", "is more than"),
        ("much", "is not a size"),
    ):
        assert_refused(mount, USAGE, words, "--ssd", disk, "--ssd-capacity", capacity)
    assert not disk.exists()


def test_a_directory_in_memory_and_a_small_capacity_are_warned_about(base: Path) -> None:
    with raw_tmpfs(base / "tmpfs", "size=256m") as directory:
        options = ("--ssd-capacity", "64M", "--settle", "0s", "--ssd-write-delay", "0s")
        mount = KvfsMount(base / "mnt", POOL, "--ssd", str(directory / "tier"), *options)
        ended = mount.try_mount()
        assert ended.returncode == 0, ended.stderr
        mount.daemon_pid = int(mount.status()["pid"])
        try:
            small, memory = ended.stderr.splitlines()
            assert "the SSD of 64.0 MiB is smaller than the pool of 128.0 MiB" in small
            assert f"{directory / 'tier'} is in memory (tmpfs): its pages do not outlive the host" in memory
            assert any("in memory (tmpfs)" in line for line in mount.status()["degraded"])
            for number in range(12):
                (mount.path / str(number)).write_bytes(pattern(number, MIB) * 8)
            room = subprocess.run(["df", "-B1", mount.path], capture_output=True, text=True, check=True)
            size, used, free = map(int, room.stdout.splitlines()[-1].split()[1:4])
            occupied = sum(path.stat().st_blocks * 512 for path in mount.path.iterdir())
            assert size >= POOL, "what DRAM alone can hold"
            assert occupied <= used <= occupied + 32 * MIB
            assert size - used == free
        finally:
            mount.close()


def test_a_directory_of_a_newer_layout_is_kept_unless_it_may_go(base: Path) -> None:
    disk = base / "disk"
    mount = KvfsMount(base / "mount", POOL, "--ssd", str(disk), *CAPACITY)
    with mount:
        (mount.path / "page").write_bytes(pattern(1, MIB))
        mount.umount()
    owner = disk / ".kvfs-owner"
    record = json.loads(owner.read_bytes()) | {"layout": 99}
    owner.write_text(json.dumps(record).ljust(511) + "\n")
    (disk / "notes.txt").write_text("mine")
    before = tree(disk)
    assert_refused(mount, UNUSABLE, "has layout 99, this kvfs has")
    assert tree(disk) == before
    mount.mount("--discard-incompatible")
    assert list(mount.path.iterdir()) == []
    assert sorted(path.name for path in disk.iterdir() if not path.name.startswith(".kvfs")) == ["notes.txt"]
    assert (disk / "notes.txt").read_text() == "mine"
    (mount.path / "page").write_bytes(pattern(2, MIB))
    mount.umount()
    mount.mount()
    assert (mount.path / "page").read_bytes() == pattern(2, MIB)
    mount.close()
