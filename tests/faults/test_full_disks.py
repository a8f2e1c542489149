"""A disk that is full, by what kvfs put there or by others: never above the cap, never for ever."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.crashing import disk_usage
from tests.faults.disks import small_disk
from tests.faults.small_mounts import SIZE, Mount, data, evicts, reads, serving
from tests.mounted.running import MIB, wait_sealed, wait_until

pytestmark = [pytest.mark.as_root, pytest.mark.deadline(180)]

CAPACITY = 200 * MIB
#: XFS makes no smaller ones.
MEGABYTES = {"ext4": 256, "xfs": 300}


@pytest.fixture(params=MEGABYTES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def fill_up(disk: Path) -> Path:
    """A file of somebody else's, which takes all that is left of a disk."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        piece = MIB
        while piece >= 4096:
            try:
                file.write(bytes(piece))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                piece //= 2
    return ballast


def store(mount: Mount, first: int, count: int, after: Callable[[], object] = lambda: None) -> list[Path]:
    """Pages, of which none may be refused."""
    paths = [mount.path / f"{number:03}" for number in range(first, first + count)]
    for number, path in enumerate(paths, first):
        path.write_bytes(data(number))
        after()
    wait_sealed(*paths[-5:], seconds=30)
    return paths


def test_a_disk_that_fills_up_to_the_cap_keeps_what_is_new(base: Path, kind: str) -> None:
    """Three times what the disk may have: the cap holds at every moment, the oldest pages go."""
    with small_disk(base, kind, MEGABYTES[kind]) as disk, serving(base, disk) as mount:

        def check() -> None:
            # Pages come and go while du walks, and it may see one that came and another that had to go first.
            assert min(disk_usage(disk / "kvfs") for _ in range(4)) <= CAPACITY
            assert mount.used_bytes() <= CAPACITY

        paths = store(mount, 0, 3 * CAPACITY // SIZE, check)
        mount.wait_stored()
        there = [path.exists() for path in paths]
        assert sum(there) > CAPACITY // SIZE // 2
        assert all(there[-20:]), "the newest are there"
        for number, path in list(enumerate(paths))[-60:]:
            if path.exists():
                assert path.read_bytes() == data(number)
        assert mount.tier("ssd")["used_bytes"] == disk_usage(disk / "kvfs")
        assert mount.status()["failures"] == {}


def test_a_disk_that_others_fill_before_the_cap_is_reached(base: Path, kind: str) -> None:
    """Pages make room for pages, writers and readers hardly notice; with room again it is as before."""
    with small_disk(base, kind, MEGABYTES[kind]) as disk, serving(base, disk) as mount:
        store(mount, 0, 40)
        mount.wait_stored()
        ballast = fill_up(disk)
        paths = store(mount, 40, 80)
        for number, path in list(enumerate(paths, 40))[-10:]:
            assert path.read_bytes() == data(number)
        cold = next(path for path in paths[-20:] if tier(path) == b"ssd" or evicts(path))
        assert reads(cold, int(cold.name))
        ballast.unlink()
        again = store(mount, 200, 60)
        mount.wait_stored()
        for number, path in enumerate(again, 200):
            assert path.read_bytes() == data(number)
        assert mount.status()["failures"] == {}
        assert mount.tier("ssd")["used_bytes"] == disk_usage(disk / "kvfs")


def tier(path: Path) -> bytes:
    return os.getxattr(path, "user.kvfs.tier")


def test_a_disk_without_room_for_a_single_page(base: Path) -> None:
    """All of it is taken by others: DRAM goes on alone, as without an SSD, and the log stays short."""
    with small_disk(base, "ext4", 256) as disk, serving(base, disk) as mount:
        ballast = fill_up(disk)
        before, began = mount.log, time.monotonic()
        paths = store(mount, 0, 200)
        lines = mount.log[len(before) :].splitlines()
        assert len(lines) <= 3 * (time.monotonic() - began + 2), "each kind of line once a second at most"
        assert paths[-1].read_bytes() == data(199)
        assert mount.status()["failures"] == {}
        ballast.unlink()
        store(mount, 200, 40)
        mount.wait_stored()
        wait_until(lambda: mount.tier("ssd")["used_bytes"] > 40 * MIB, 20, "the disk is used again")


def test_writers_are_refused_only_when_neither_tier_can_take_it(base: Path) -> None:
    """DRAM is full of pages in use, and so cannot go down: ENOSPC, while reads of both tiers go on."""
    with small_disk(base, "ext4", 256) as disk, serving(base, disk) as mount:
        cold = mount.store_cold("cold", 1)
        held: list[int] = []
        try:
            refused = None
            for number in range(60):
                try:
                    (mount.path / f"held-{number}").write_bytes(data(number))
                    held.append(os.open(mount.path / f"held-{number}", os.O_RDONLY))
                except OSError as error:
                    refused = error.errno
                    break
            assert refused == errno.ENOSPC
            assert len(held) > 20
            for fd in held:
                assert os.pread(fd, 100, 5) == os.pread(fd, 100, MIB + 5)
            assert cold.stat().st_size == SIZE
            assert mount.used_bytes() <= CAPACITY
        finally:
            for fd in held:
                os.close(fd)
        wait_until(lambda: writes(mount.path / "again"), 10, "writing works again")
        assert reads(cold, 1)


def writes(path: Path) -> bool:
    try:
        path.write_bytes(data(7))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False
    return True


def test_ten_thousand_refusals_of_a_full_disk_are_a_line_a_second(base: Path) -> None:
    """Every page of a storm is refused by the disk: counted, with one line a second that says how many."""
    with small_disk(base, "ext4", 256) as disk, serving(base, disk) as mount:
        fill_up(disk)
        before, began = mount.log, time.monotonic()
        path = mount.path / "page"
        for number in range(10_000):
            path.write_bytes(b"%d" % number * 100)
        seconds = time.monotonic() - began
        lines = mount.log[len(before) :].splitlines()
        assert len(lines) <= seconds + 2, lines[:20]
        assert path.read_bytes() == b"9999" * 100


def test_a_lowered_capacity_costs_the_coldest_pages_and_no_other(base: Path) -> None:
    """What is above it goes after the walk; what is left changes its name as ever."""
    with small_disk(base, "ext4", 256) as disk:
        with serving(base, disk) as mount:
            (mount.path / "old").mkdir()
            for number in range(60):
                mount.store_cold(f"old/{number:03}", number)
        with serving(base, disk, "--ssd-capacity", "70M", number=2) as mount:
            wait_until(lambda: disk_usage(disk / "kvfs") <= 70 * MIB, 20, "the SSD is within its capacity")
            (mount.path / "new").mkdir()
            left = sorted((mount.path / "old").iterdir())
            assert 30 <= len(left) <= 35
            assert left[-1].name == "059"
            for path in left:
                path.rename(mount.path / "new" / path.name)
            mount.wait_stored()
            for path in left:
                assert reads(mount.path / "new" / path.name, int(path.name))
            assert "can never have" not in mount.log
            assert mount.status()["misses"] == {}


def test_names_change_on_a_disk_that_others_have_filled(base: Path) -> None:
    """The coldest pages make room for directories and names, and no page goes that was not one of them."""
    with small_disk(base, "ext4", 256) as disk:
        with serving(base, disk) as mount:
            for number in range(20):
                mount.store_cold(f"{number:03}", number)
            fill_up(disk)
            for number in range(10, 20):
                directory = mount.path / f"directory-{number}"
                directory.mkdir()
                (mount.path / f"{number:03}").rename(directory / ("n" * 200))
            mount.wait_stored()
            assert not mount.is_troubled()
            assert 0 < mount.tier("ssd")["evictions"] <= 5
            there = [path.exists() for path in (mount.path / f"{number:03}" for number in range(10))]
            assert there[-5:] == [True] * 5
        with serving(base, disk, number=2) as mount:
            for number in range(10, 20):
                assert reads(mount.path / f"directory-{number}" / ("n" * 200), number)
            assert not (mount.path / "019").exists()
