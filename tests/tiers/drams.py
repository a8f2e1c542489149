"""What the tests of the DRAM tier share."""

from __future__ import annotations

import os
from pathlib import Path

from kvfs.tiers.dram import DramTier

MEBIBYTE = 1 << 20


def attach(
    state: Path, pool_bytes: int = 64 * MEBIBYTE, hugepages: str = "prefer", numa: str = ""
) -> DramTier:
    return DramTier.attach(state, pool_bytes, hugepages, numa)


def write(tier: DramTier, path: bytes, size: int, chunk: int = MEBIBYTE) -> None:
    fd = tier.create(path)
    try:
        for start in range(0, size, chunk):
            os.write(fd, os.urandom(min(chunk, size - start)))
    finally:
        os.close(fd)


def is_oversized(tier: DramTier) -> bool:
    return tier.oversized
