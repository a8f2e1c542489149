from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from kvfs import mounts
from kvfs.errors import Unavailable
from kvfs.page import HUGEPAGE
from kvfs.tiers import hugepages, tmpfs
from kvfs.tiers.dram import DramTier
from kvfs.tiers.hugepages import hugepage_mapped_bytes
from tests.tiers.conftest import needs_root
from tests.tiers.drams import MEBIBYTE, attach, write

pytestmark = needs_root


def mapped_on_hugepages(tier: DramTier, path: bytes, size: int) -> int:
    fd = tier.open(path, os.O_RDONLY)
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapping:
        for offset in range(0, size, 4096):
            mapping[offset]
        mapped = hugepage_mapped_bytes(fd)
    os.close(fd)
    return mapped


def hugepages_to_be_had() -> bool:
    return "huge=within_size" in tmpfs.probe_options("require", "").usable


needs_hugepages = pytest.mark.skipif(
    not hugepages_to_be_had(), reason="this kernel has no hugepages for tmpfs"
)


@needs_hugepages
def test_they_are_found_by_trying(state: Path) -> None:
    tier = attach(state, hugepages="require")
    assert tier.hugepages_active
    assert tier.hugepages_reason == ""
    assert tier.list(b"") == [], "the probe leaves nothing"
    assert tier.room().used_bytes == 0
    tier.close()


@needs_hugepages
def test_a_large_write_and_a_presized_file_get_them(state: Path) -> None:
    tier = attach(state)
    write(tier, b"written", 4 * HUGEPAGE, chunk=4 * HUGEPAGE)
    fd = tier.create(b"presized")
    os.posix_fallocate(fd, 0, 4 * HUGEPAGE)
    os.close(fd)
    for name in (b"written", b"presized"):
        assert mapped_on_hugepages(tier, name, 4 * HUGEPAGE) == 4 * HUGEPAGE
    tier.close()


@needs_hugepages
def test_a_file_occupies_no_more_than_it_holds(state: Path) -> None:
    tier = attach(state)
    write(tier, b"small", 65536)
    assert tier.stat(b"small").st_blocks * 512 == 65536
    assert tier.room().used_bytes == 65536
    tier.close()


@needs_hugepages
def test_small_chunks_are_collapsed_afterwards_and_keep_their_bytes(state: Path) -> None:
    tier = attach(state)
    size = 3 * HUGEPAGE + 4096
    write(tier, b"page", size, chunk=64 << 10)
    fd = tier.open(b"page", os.O_RDONLY)
    before = os.pread(fd, size, 0)
    assert mapped_on_hugepages(tier, b"page", size) == 0
    assert tier.collapse(fd, size)
    assert tier.collapse(fd, size), "a second time costs nothing and says the same"
    assert os.pread(fd, size, 0) == before
    assert mapped_on_hugepages(tier, b"page", size) == 3 * HUGEPAGE
    assert tier.stat(b"page").st_blocks * 512 == size
    assert not tier.collapse(fd, HUGEPAGE - 1), "nothing to collapse"
    os.close(fd)
    tier.close()


@needs_hugepages
def test_a_full_tier_is_believed_not_tried(state: Path) -> None:
    tier = attach(state, 8 * MEBIBYTE)
    write(tier, b"page", 7 * MEBIBYTE)
    tier.close(keep=True)
    tier = attach(state, 8 * MEBIBYTE, hugepages="require")
    assert tier.hugepages_active
    assert "too full to try" in tier.hugepages_reason
    tier.close()


def test_switched_off_means_small_pages(state: Path) -> None:
    tier = attach(state, hugepages="off")
    assert not tier.hugepages_active
    assert "off" in tier.hugepages_reason
    write(tier, b"page", 2 * HUGEPAGE, chunk=2 * HUGEPAGE)
    assert mapped_on_hugepages(tier, b"page", 2 * HUGEPAGE) == 0
    tier.close()


def test_hugepages_required_and_not_had_is_an_error_that_leaves_nothing(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hugepages, "hugepage_mapped_bytes", lambda _fd: 0)
    with pytest.raises(Unavailable, match=r"the kernel gave small pages.*kvfs doctor"):
        attach(state, hugepages="require")
    assert mounts.find(state) == []
    tier = attach(state, hugepages="prefer")
    assert not tier.hugepages_active
    assert "small pages" in tier.hugepages_reason
    tier.close()


def test_hugepages_required_and_not_had_leaves_pages_of_an_earlier_process(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = attach(state)
    write(tier, b"page", MEBIBYTE)
    tier.close(keep=True)
    monkeypatch.setattr(hugepages, "hugepage_mapped_bytes", lambda _fd: 0)
    with pytest.raises(Unavailable):
        attach(state, hugepages="require")
    tier = attach(state)
    assert tier.list(b"") == [b"page"]
    tier.close()
