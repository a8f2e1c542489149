"""The disk of the SSD tier goes away under a mount: one line says so, and the mount serves on."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounted.operations import pattern
from tests.mounted.running import MIB, KvfsMount, scratch_directory, wait_until

POOL = 64 * MIB
OPTIONS = ("--ssd-capacity", "256M", "--settle", "0s", "--ssd-write-delay", "0s", "--io-timeout", "5s")

pytestmark = pytest.mark.as_root


@pytest.fixture
def base() -> Iterator[Path]:
    with scratch_directory() as directory:
        yield directory


def mount_disk(base: Path) -> Path:
    disk, image = base / "disk", base / "disk.ext4"
    if not image.exists():
        with image.open("wb") as file:
            file.truncate(512 * MIB)
        subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
        disk.mkdir()
    subprocess.run(["mount", "-o", "loop", image, disk], check=True)
    return disk


def data(number: int) -> bytes:
    return pattern(number, MIB) * 8


def fill(mount: KvfsMount) -> list[Path]:
    """More than DRAM holds; all of it on the SSD."""
    paths = [mount.path / str(number) for number in range(12)]
    for number, path in enumerate(paths):
        path.write_bytes(data(number))
    wait_until(lambda: mount.status()["tiers"]["ssd"]["written"] >= len(paths), 30, "all have copies")
    return paths


def lines(mount: KvfsMount, words: str) -> list[str]:
    return [line for line in mount.status()["degraded"] if words in line]


def assert_calm(log: str) -> None:
    """No trace, and one line of warning in all."""
    assert "Traceback" not in log
    assert log.count("WARNING") == 1, log


def test_a_disk_that_was_unmounted_and_comes_back(base: Path) -> None:
    disk = mount_disk(base)
    with KvfsMount(base / "mount", POOL, "--ssd", str(disk / "tier"), *OPTIONS) as mount:
        paths = fill(mount)
        subprocess.run(["umount", "-l", disk], check=True)
        wait_until(lambda: bool(lines(mount, "it was moved or unmounted")), 10, "it is noticed")
        (mount.path / "new").write_bytes(data(99))
        assert [path.read_bytes() == data(number) for number, path in enumerate(paths)] == [True] * 12
        mount_disk(base)
        wait_until(lambda: not lines(mount, "unmounted"), 10, "it is back")
        (mount.path / "newer").write_bytes(data(100))
        wait_until(lambda: (disk / "tier" / "newer").exists(), 20, "it takes pages again")
        assert_calm(mount.log)
        mount.umount()
    subprocess.run(["umount", disk], check=True)


def test_a_directory_that_was_removed(base: Path) -> None:
    disk = base / "disk"
    with KvfsMount(base / "mount", POOL, "--ssd", str(disk), *OPTIONS) as mount:
        paths = fill(mount)
        shutil.rmtree(disk)
        wait_until(lambda: bool(lines(mount, "was removed")), 10, "it is noticed")
        left = [path for path in paths if path.exists()]
        assert len(left) < len(paths)
        for path in left:
            assert path.read_bytes() == data(int(path.name))
        for number in range(20, 32):
            (mount.path / str(number)).write_bytes(data(number))
        assert (mount.path / "31").read_bytes() == data(31)
        assert os.listdir(mount.path)
        assert_calm(mount.log)
        mount.umount()
    with KvfsMount(base / "again", POOL, "--ssd", str(disk), *OPTIONS) as mount:
        assert os.listdir(mount.path) == []
        (mount.path / "page").write_bytes(data(1))
        wait_until((disk / "page").exists, 20, "the new directory is used")


def test_a_disk_that_turns_read_only_keeps_nobody_waiting(base: Path) -> None:
    disk = mount_disk(base)
    with KvfsMount(base / "mount", POOL, "--ssd", str(disk / "tier"), *OPTIONS) as mount:
        paths = fill(mount)
        cold = [path for path in paths if os.getxattr(path, "user.kvfs.tier") == b"ssd"]
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        renamed = mount.path / "renamed"
        cold[0].rename(renamed)
        wait_until(lambda: bool(lines(mount, "does not follow")), 10, "it is noticed")
        began = time.monotonic()
        for path in cold[1:4]:
            assert path.read_bytes() == data(int(path.name))
        with pytest.raises(OSError, match="Input/output error"):
            renamed.read_bytes()
        assert renamed in mount.path.iterdir()
        assert renamed.stat().st_size == len(data(0))
        assert time.monotonic() - began < 4, "nobody waited for the time-out"
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        wait_until(lambda: not lines(mount, "does not follow"), 40, "it follows again")
        assert renamed.read_bytes() == data(int(cold[0].name))
        assert "Traceback" not in mount.log
        mount.umount()
    assert (disk / "tier" / "renamed").read_bytes() == data(int(cold[0].name))
    subprocess.run(["umount", disk], check=True)
