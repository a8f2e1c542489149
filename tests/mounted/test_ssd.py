"""A mount with an SSD tier, as users and the end of a machine see it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounted.operations import pattern
from tests.mounted.running import MIB, KvfsMount, scratch_directory, wait_sealed, wait_until

POOL = 128 * MIB
CAPACITY = 1024 * MIB
COUNT = 40
SIZE = 8 * MIB


@pytest.fixture
def base() -> Iterator[Path]:
    with scratch_directory() as directory:
        yield directory


def mounted(base: Path, *options: str) -> KvfsMount:
    """The same disk each time."""
    number = len(list(base.iterdir()))
    disk = ("--ssd", str(base / "disk"), "--ssd-capacity", str(CAPACITY))
    return KvfsMount(base / f"mount-{number}", POOL, *disk, *(options or ("--ssd-write-delay", "0s")))


def data(number: int) -> bytes:
    return pattern(number, MIB) * (SIZE // MIB)


def fill(mount: KvfsMount, count: int = COUNT) -> list[Path]:
    paths = [mount.path / "pages" / f"{number:02}" for number in range(count)]
    paths[0].parent.mkdir(exist_ok=True)
    for number, path in enumerate(paths):
        path.write_bytes(data(number))
    wait_sealed(*paths, seconds=60)
    return paths


def stored(mount: KvfsMount) -> None:
    """Wait until the SSD has everything."""
    wait_until(lambda: not mount.status()["tiers"]["ssd"]["unstored"], 60, "every page is on the SSD")


def test_more_than_dram_holds_is_kept_and_read_back(base: Path) -> None:
    with mounted(base) as mount:
        paths = fill(mount)
        for number, path in enumerate(paths):
            assert path.read_bytes() == data(number)
        status = mount.status()
        assert status["misses"] == {}
        assert status["tiers"]["ssd"]["read"] > COUNT // 2
        assert status["tiers"]["dram"]["used_bytes"] <= POOL
        assert mount.used_bytes() >= COUNT * SIZE
        room = os.statvfs(mount.path)
        assert room.f_blocks * room.f_frsize <= CAPACITY
        used = subprocess.run(["du", "-sB1", mount.path], capture_output=True, text=True, check=True)
        assert abs(int(used.stdout.split()[0]) - COUNT * SIZE) < COUNT * 8192
        tiers = {os.getxattr(path, "user.kvfs.tier") for path in paths}
        assert tiers == {b"dram", b"ssd"}
        cold = next(path for path in paths if os.getxattr(path, "user.kvfs.tier") == b"ssd")
        os.setxattr(cold, "user.note", b"of a page on the SSD")
        assert os.getxattr(cold, "user.note") == b"of a page on the SSD"
        assert "user.kvfs.digest" in os.listxattr(cold)
        for path in paths:
            path.unlink()
        wait_until(lambda: mount.used_bytes() < 16 * MIB, 20, "what was removed is gone from the SSD")
    assert not list((base / "disk" / "pages").iterdir())


@pytest.mark.parametrize("end", ["umount", "kill"])
def test_pages_outlive_the_mount(base: Path, end: str) -> None:
    with mounted(base) as mount:
        paths = [path.relative_to(mount.path) for path in fill(mount, 20)]
        (mount.path / paths[0]).rename(mount.path / "renamed")
        os.setxattr(mount.path / "renamed", "user.note", b"value")
        os.chmod(mount.path / "renamed", 0o600)
        stored(mount)
        if end == "kill":
            wait_until(lambda: not mount.status()["tiers"]["ssd"]["waiting_changes"], 10, "the SSD follows")
            mount.kill_daemon()
        else:
            mount.umount()
    with mounted(base) as again:  # the DRAM is lost: another mount, the same disk
        names = {*paths[1:], Path("renamed")}
        files = (path for path in again.path.rglob("*") if path.is_file())
        assert {path.relative_to(again.path) for path in files} == names
        assert (again.path / "renamed").read_bytes() == data(0)
        assert os.getxattr(again.path / "renamed", "user.note") == b"value"
        assert (again.path / "renamed").stat().st_mode & 0o777 == 0o600
        for number, path in enumerate(paths[1:], 1):
            assert (again.path / path).read_bytes() == data(number)
        assert again.status()["misses"] == {}


def test_what_is_not_on_the_ssd_yet_goes_there_at_the_end(base: Path) -> None:
    with mounted(base) as mount:
        (mount.path / "late").write_bytes(data(1))
        wait_sealed(mount.path / "late")
        mount.umount()
    assert (base / "disk" / "late").read_bytes() == data(1)


def test_the_capacity_is_never_exceeded(base: Path) -> None:
    with mounted(base) as mount:
        names = []
        for number in range(200):
            path = mount.path / f"{number:03}"
            path.write_bytes(data(number))
            names.append(path)
            assert mount.used_bytes() <= CAPACITY
        stored(mount)
        used = subprocess.run(["du", "-sB1", base / "disk"], capture_output=True, text=True, check=True)
        assert int(used.stdout.split()[0]) <= CAPACITY
        left = [path for path in names if path.exists()]
        assert 60 < len(left) < 160
        assert left[-20:] == names[-20:], "the newest are there"
        for path in left[:10]:
            assert path.read_bytes() == data(int(path.name))


def test_one_directory_has_one_owner(base: Path) -> None:
    with mounted(base) as mount:
        (mount.path / "page").write_bytes(data(1))
        second = mounted(base)
        ended = second.try_mount()
        assert ended.returncode != 0
        assert len(ended.stderr.splitlines()) == 1
        assert str(base / "disk") in ended.stderr
        assert not os.path.ismount(second.path)


def test_pages_that_another_mount_wrote_to_the_ssd_meanwhile_are_the_newer_ones(base: Path) -> None:
    first = mounted(base)
    first.arguments += ("--settle", "0s", "--ssd-write-delay", "0s")
    names = ("changed", "removed", "kept")
    with first:
        for name in names:
            (first.path / name).write_bytes(data(1))
        wait_until(lambda: all((base / "disk" / name).exists() for name in names), 20, "the SSD has them")
        first.kill_daemon()
        with mounted(base) as second:
            (second.path / "changed").write_bytes(data(2))
            (second.path / "removed").unlink()
            wait_sealed(second.path / "changed")
            second.umount()
        first.mount()
        assert (first.path / "changed").read_bytes() == data(2)
        assert not (first.path / "removed").exists()
        assert (first.path / "kept").read_bytes() == data(1)
        assert "what was left in DRAM is older, and is dropped" in first.log
        first.umount()
    assert (base / "disk" / "changed").read_bytes() == data(2)


def test_what_is_removed_in_time_is_never_written(base: Path) -> None:
    with mounted(base, "--ssd-write-delay", "5s") as mount:
        paths = fill(mount, 6)
        began = time.monotonic()
        for path in paths[:3]:
            path.unlink()
        paths[3].write_bytes(data(7))
        (mount.path / "pages/temporary").write_bytes(data(8))
        (mount.path / "pages/temporary").rename(paths[4])
        assert mount.status()["tiers"]["ssd"]["unstored"] in (1, 2, 3), "what is being written is none yet"
        wait_until(lambda: mount.status()["tiers"]["ssd"]["written"] == 3, 20, "the others are written")
        assert time.monotonic() - began > 2
        ssd = mount.status()["tiers"]["ssd"]
        assert (ssd["unstored_bytes"], ssd["written_bytes"]) == (0, 3 * SIZE)
        assert (base / "disk/pages/03").read_bytes() == data(7)
        assert (base / "disk/pages/04").read_bytes() == data(8)


def test_with_reuse_only_what_is_asked_for_again_is_written(base: Path) -> None:
    with mounted(base, "--ssd-write-delay", "0s", "--ssd-write-policy", "reuse") as mount:
        paths = fill(mount, 4)
        left_out_pages = {"not-reused": {"pages": 4, "bytes": 4 * SIZE}}
        wait_until(lambda: mount.status()["tiers"]["ssd"]["left_out"] == left_out_pages, 10, "all is decided")
        assert paths[1].read_bytes() == data(1)
        (mount.path / "pages/temporary").write_bytes(data(9))
        (mount.path / "pages/temporary").rename(paths[2])
        on_disk = base / "disk/pages"
        wait_until(
            lambda: sorted(os.listdir(on_disk)) == ["01", "02"], 10, "what was touched twice is written"
        )
        left_out = mount.status()["tiers"]["ssd"]["left_out"]["not-reused"]
        assert left_out == {"pages": 2, "bytes": 2 * SIZE}
        mount.umount()
    assert sorted(os.listdir(on_disk)) == ["01", "02"]
