"""DRAM that is kept, and an SSD directory that another mount had meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.storage.turns import begin_turn
from kvfs.tiers.dram import DramTier
from kvfs.tiers.ssd import SsdTier
from tests.conftest import LogGuard
from tests.tiers.ssds import attach


@pytest.fixture
def dram(tier: DramTier) -> DramTier:
    """With a page and a directory."""
    os.close(tier.create(b"page"))
    tier.mkdir(b"directory")
    return tier


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "ssd"


def taken(disk: Path, dram: DramTier | None = None, mountpoint: Path = Path("/mnt/one")) -> None:
    """One mount from its start to its end, of which nobody hears."""
    ssd = attach(disk, mountpoint=mountpoint)
    try:
        if dram is not None:
            begin_turn(dram, ssd)
    finally:
        ssd.close()


def is_whole(dram: DramTier) -> bool:
    return sorted(dram.list(b"")) == [b"directory", b"page"]


def test_the_same_mount_keeps_its_pages_however_often_it_starts(disk: Path, dram: DramTier) -> None:
    for _ in range(3):
        taken(disk, dram)
    assert is_whole(dram)


def test_what_is_older_than_the_ssd_goes(disk: Path, dram: DramTier, expect_log: LogGuard) -> None:
    expect_log(r"ssd was the SSD of /mnt/t\\nwo since: what was left in DRAM is older, and is dropped")
    taken(disk, dram)
    taken(disk, mountpoint=Path("/mnt/t\nwo"))
    taken(disk, dram)
    assert dram.list(b"") == []
    os.close(dram.create(b"page"))
    dram.mkdir(b"directory")
    taken(disk, dram)
    assert is_whole(dram), "and what came since stays"


def test_a_clean_stop_of_the_other_mount_makes_no_difference(
    disk: Path, dram: DramTier, expect_log: LogGuard
) -> None:
    expect_log("is older, and is dropped")
    taken(disk, dram)
    attach(disk).close_cleanly()
    taken(disk, dram)
    assert dram.list(b"") == []


def test_an_ssd_that_dram_was_never_with_changes_nothing(tmp_path: Path, dram: DramTier) -> None:
    taken(tmp_path / "one", mountpoint=Path("/mnt/two"))
    taken(tmp_path / "one", dram)
    taken(tmp_path / "two", dram)
    taken(tmp_path / "one", dram)
    assert is_whole(dram)


@pytest.fixture
def ssd(disk: Path) -> Iterator[SsdTier]:
    tier = attach(disk)
    yield tier
    tier.close()


def test_each_taking_is_a_turn_of_its_own(disk: Path, ssd: SsdTier) -> None:
    first = ssd.turn
    assert (ssd.last_turn, ssd.last_mount) == ("", "")
    ssd.close_cleanly()
    again = attach(disk)
    assert (again.last_turn, again.last_mount) == (first, "/mnt/of-a-test")
    assert again.turn not in ("", first)
    again.close()
