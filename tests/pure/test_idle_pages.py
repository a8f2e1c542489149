"""How many pages keep their descriptors while nobody uses them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfs.idle
from kvfs.holding import Holding, NoFace
from kvfs.idle import IdlePages
from kvfs.index import SEALED, Entry, Index
from kvfs.page import Owner
from kvfs.tiers.base import Tier


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Tier]:
    """A directory with one file, whose descriptors stand for those of all pages."""
    (tmp_path / "page").touch()
    tier = Tier("test", os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY))
    yield tier
    tier.close()


def add_pages(idle: IdlePages, tier: Tier, count: int, backing_id: int = 0) -> list[Entry]:
    index = Index(Owner(stat.S_IFDIR | 0o755, 0, 0))
    entries: list[Entry] = []
    for number in range(count):
        entry = index.add(index.root, b"%d" % number, Owner(stat.S_IFREG | 0o644, 0, 0), SEALED)
        entry.holding = Holding(tier.open(b"page", os.O_RDONLY))
        entry.holding.backing_id = backing_id
        entries.append(entry)
        idle.add(entry)
    return entries


def held(entries: list[Entry]) -> list[bool]:
    return [entry.holding is not None for entry in entries]


@pytest.mark.parametrize(("backing_id", "kept"), [(1, 2), (0, 5), (-1, 5)])
def test_pages_without_an_id_keep_more_descriptors(tier: Tier, backing_id: int, kept: int) -> None:
    """Nothing else opens them without the daemon."""
    idle = IdlePages(tier, 2, 5)
    entries = add_pages(idle, tier, 8, backing_id)
    assert held(entries) == [False] * (8 - kept) + [True] * kept
    assert idle.ready == (8 - kept if backing_id > 0 else 0)
    idle.give_up_descriptors()
    assert not any(held(entries))


class FaceWithOpens(NoFace):
    """Some pages are open without the pool's having been asked."""

    def __init__(self) -> None:
        self.open: set[Entry] = set()

    def withdraw(self, entry: Entry) -> int:
        return entry in self.open


def test_descriptors_that_have_run_out_are_given_up_in_portions(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop serves others in between, however many there are."""
    monkeypatch.setattr(kvfs.idle, "PORTION", 2)
    idle = IdlePages(tier, 8, 8)
    entries = add_pages(idle, tier, 7)
    failures = [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]

    def open_file() -> int:
        if failures:
            raise failures.pop()
        return 1000

    assert idle.open(open_file) == 1000
    assert held(entries) == [False] * 2 + [True] * 5
    idle.give_up_descriptors()
    assert held(entries) == [False] * 4 + [True] * 3


def test_a_portion_passes_over_pages_that_programs_have_open(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an open would fail though descriptors could be had."""
    monkeypatch.setattr(kvfs.idle, "PORTION", 2)
    idle = IdlePages(tier, 8, 8)
    idle.face = face = FaceWithOpens()
    entries = add_pages(idle, tier, 7)
    face.open = set(entries[:4])
    idle.give_up_descriptors()
    assert held(entries) == [True] * 4 + [False] * 2 + [True]
    idle.give_up_descriptors()
    assert held(entries) == [True] * 4 + [False] * 3, "it ends where all others are open"
    face.open.clear()
    for _ in range(2):
        idle.give_up_descriptors()
    assert not any(held(entries))
