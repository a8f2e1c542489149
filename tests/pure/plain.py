"""A pool without DRAM: for tests that need real files and no mount."""

from __future__ import annotations

import os
import stat
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import cast

from kvfs.page import Owner
from kvfs.pool import Pool
from kvfs.tiers.base import Tier
from kvfs.tiers.dram import DramTier

ROOT_OWNER = Owner(stat.S_IFDIR | 0o755, 1000, 1000)


class PlainTier(Tier):
    """A directory of any filesystem, with what a pool asks of `DramTier` besides."""

    hugepages_active = False
    hugepages_reason = "a plain directory"
    is_private = True
    oversized = False

    def __init__(self, directory: Path, target_bytes: int = 1 << 30) -> None:
        super().__init__("dram", os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        self.target_bytes = target_bytes
        self.options: tuple[str, ...] = ("size=1g",)
        self.missing: dict[str, str] = {}

    def account(self, delta_bytes: int) -> None: ...

    def growing(self, size: int) -> AbstractContextManager[None]:
        return nullcontext()

    def collapse(self, fd: int, size: int) -> bool:
        return False


def plain_pool(directory: Path) -> Pool:
    """A pool on ``directory``; close its ``tier`` in the end."""
    return Pool(cast(DramTier, PlainTier(directory)), ROOT_OWNER)
