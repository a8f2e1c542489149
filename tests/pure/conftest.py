"""A running channel with files in its table."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pure import fuse
from tests.pure.fuse import PublishedFiles, Wire


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    before = set(os.listdir("/proc/self/fd"))
    tier = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    with fuse.wire(tier) as wire:
        yield wire
    os.close(tier)
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def files(wire: Wire, tmp_path: Path) -> Iterator[PublishedFiles]:
    files = PublishedFiles(tmp_path, wire.channel)
    yield files
    files.close()
