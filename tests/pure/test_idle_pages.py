"""How many pages keep their descriptors while nobody uses them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvfs.holding import Holding
from kvfs.idle import IdlePages
from kvfs.index import SEALED, Entry, Index
from kvfs.page import Owner
from kvfs.tiers.base import Tier


@pytest.mark.parametrize(("backing_id", "kept"), [(1, 2), (0, 5), (-1, 5)])
def test_pages_without_an_id_keep_more_descriptors(tmp_path: Path, backing_id: int, kept: int) -> None:
    """Nothing else opens them without the daemon."""
    (tmp_path / "page").touch()
    index = Index(Owner(stat.S_IFDIR | 0o755, 0, 0))
    tier = Tier("test", os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY))
    idle = IdlePages(tier, 2, 5)
    entries: list[Entry] = []
    for _ in range(8):
        entry = index.add(index.root, b"%d" % len(entries), Owner(stat.S_IFREG | 0o644, 0, 0), SEALED)
        entry.holding = Holding(os.open(tmp_path / "page", os.O_RDONLY))
        entry.holding.backing_id = backing_id
        entries.append(entry)
        idle.add(entry)
    assert [entry.holding is not None for entry in entries] == [False] * (8 - kept) + [True] * kept
    assert idle.ready == (8 - kept if backing_id > 0 else 0)
    idle.give_up_descriptors()
    assert not any(entry.holding for entry in entries)
    tier.close()
