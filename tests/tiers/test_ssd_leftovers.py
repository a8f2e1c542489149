"""What is left over on an SSD tier, found and deleted while pages are being written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.tiers.ssd import SsdTier
from kvfs.tiers.ssd_directory import MARK
from kvfs.tiers.ssd_leftovers import Leftover, delete_temporaries, find_foreign, find_temporaries
from tests.conftest import LogGuard
from tests.tiers.conftest import mounted_tmpfs, needs_root
from tests.tiers.ssds import attach, check_accounts, named, read, store, temporaries, write

DATA = b"bytes of a page" * 1000


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[SsdTier]:
    made = attach(tmp_path / "ssd")
    yield made
    made.close()


def foreign(tier: SsdTier) -> dict[bytes, Leftover]:
    return {found.path: found for found in find_foreign(tier) if found is not None}


def leave_temporary(tier: SsdTier, name: str = "left") -> Path:
    path = tier.directory / ".kvfs-temporary" / name
    path.write_bytes(DATA)
    path.chmod(0o600 | MARK)
    return path


def test_a_fresh_tier_has_nothing_left_over(tier: SsdTier) -> None:
    store(tier, b"a/page", DATA)
    assert find_temporaries(tier) == []
    assert foreign(tier) == {}


def test_temporaries_are_deleted_but_for_those_that_are_being_written(tier: SsdTier) -> None:
    left = leave_temporary(tier)
    directory = left.with_name("directory")
    directory.mkdir()
    directory.chmod(0o700 | MARK)
    written = write(tier, DATA)
    found = {one.path: one for one in find_temporaries(tier)}
    assert set(found) == {b".kvfs-temporary/left", b".kvfs-temporary/directory"}
    one = found[b".kvfs-temporary/left"]
    assert (one.size, one.since_ns) == (left.stat().st_blocks * 512, left.stat().st_mtime_ns)
    delete_temporaries(tier)
    assert temporaries(tier.directory) == [os.fsdecode(written.temporary)]
    tier.publish_page(written, named(b"page"))
    assert read(tier, b"page") == DATA
    assert tier.temporaries == set()
    check_accounts(tier)


def test_a_page_that_was_abandoned_leaves_nothing(tier: SsdTier) -> None:
    tier.abandon_page(write(tier, DATA))
    assert tier.temporaries == set()
    assert find_temporaries(tier) == []


def test_what_is_not_ours_is_found_and_stays(tier: SsdTier, expect_log: LogGuard) -> None:
    expect_log("quarantined")
    store(tier, b"a/b/page", DATA)
    root = tier.directory
    (root / "a/b/notes.txt").write_bytes(DATA)
    (root / "theirs").mkdir()
    (root / "theirs/inside").write_bytes(DATA)
    (root / "link").symlink_to("a")
    (root / ".kvfs-strange").write_bytes(DATA)
    (root / ".kvfs-temporary/theirs").write_bytes(DATA)
    (root / ".kvfs-quarantine/theirs").write_bytes(DATA)
    tier.set_aside(b"a/b/page", "bytes")
    expected = {
        b"a/b/notes.txt",
        b"theirs",
        b"link",
        b".kvfs-strange",
        b".kvfs-temporary/theirs",
        b".kvfs-quarantine/theirs",
    }
    assert set(foreign(tier)) == expected
    assert foreign(tier)[b"a/b/notes.txt"].size == (root / "a/b/notes.txt").stat().st_blocks * 512
    delete_temporaries(tier)
    assert tier.shrink_quarantine(0) > 0
    assert set(foreign(tier)) == expected
    assert tier.list_quarantined() == []


@needs_root
def test_another_filesystem_within_is_not_ours(tier: SsdTier) -> None:
    with mounted_tmpfs(tier.directory / "theirs") as theirs:
        theirs.chmod(0o700 | MARK)
        (theirs / "inside").write_bytes(DATA)
        assert set(foreign(tier)) == {b"theirs"}
