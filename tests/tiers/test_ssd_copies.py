"""Files on the SSD that are not ours, although they look so: copies that somebody made of pages."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.errors import NoSuchPage, NotStorable
from kvfs.tiers import ssd_following as following
from kvfs.tiers.ssd import SsdTier
from kvfs.tiers.ssd_directory import MARK
from kvfs.tiers.ssd_leftovers import find_foreign
from tests.conftest import LogGuard
from tests.tiers.ssds import attach, check_accounts, pages, read, scan, store, tree

DATA = b"content" * 1000


@pytest.fixture
def tier(ssd: Path) -> Iterator[SsdTier]:
    made = attach(ssd)
    yield made
    made.close()


def copy_plainly(source: Path, target: Path) -> None:
    """As cp does it on some systems: the mode, and with it our mark, and no attributes."""
    target.write_bytes(source.read_bytes())
    target.chmod(source.stat().st_mode)


def copy_with_all(source: Path, target: Path) -> None:
    """As cp -a does it."""
    copy_plainly(source, target)
    for name in os.listxattr(source):
        os.setxattr(target, name, os.getxattr(source, name))


@pytest.mark.parametrize("copy_file", [copy_plainly, copy_with_all])
def test_a_copy_of_a_page_is_not_ours(
    tier: SsdTier, expect_log: LogGuard, copy_file: Callable[[Path, Path], None]
) -> None:
    expect_log("2 files or directories that are not ours, and stay: ")
    store(tier, b"a/page", DATA)
    root = tier.directory
    (root / "mine").mkdir(mode=0o700 | MARK)
    for name in ("a/copy", "mine/copy"):
        copy_file(root / "a/page", root / name)
    before = tree(root)
    stored, findings = scan(tier)
    assert [one.path for one in stored] == [b"a", b"a/page"]
    assert (findings.foreign, sum(findings.damaged.values())) == (2, 0)
    assert {leftover.path for leftover in find_foreign(tier) if leftover} == {b"a/copy", b"mine/copy"}
    for path in (b"a/copy", b"mine/copy"):
        with pytest.raises(NoSuchPage):
            tier.open_page(path)
        assert not tier.set_aside(path, "bytes")
        assert following.unlink(tier, path)
        with pytest.raises(NotStorable, match="is not ours"):
            store(tier, path, DATA)
    tier.empty()
    assert (root / "a/copy").read_bytes() == (root / "mine/copy").read_bytes() == DATA
    assert {name for name in before if "copy" in name} <= set(tree(root))


def test_a_copy_of_a_directory_is_not_ours(tier: SsdTier, expect_log: LogGuard) -> None:
    expect_log("1 files or directories that are not ours, and stay: all/page")
    store(tier, b"a/page", DATA)
    root = tier.directory
    subprocess.run(["cp", "-a", root / "a", root / "all"], check=True)
    for _ in range(2):
        stored, findings = scan(tier)
        assert [one.path for one in stored] == [b"a", b"a/page"]
        assert (findings.foreign, sum(findings.damaged.values())) == (1, 0)
        assert [leftover.path for leftover in find_foreign(tier) if leftover] == [b"all/page"]
    with pytest.raises(NotStorable, match="is not ours"):
        store(tier, b"all/page", DATA * 2)
    assert (root / "all/page").read_bytes() == DATA
    store(tier, b"all/other", DATA)
    assert pages(tier) == {b"a/page", b"all/other"}


def test_a_whole_tier_can_be_restored_from_a_backup(ssd: Path, expect_log: LogGuard) -> None:
    tier = attach(ssd)
    for path in (b"a/b/page", b"page"):
        store(tier, path, DATA)
    tier.close_cleanly()
    restored = ssd.parent / "restored"
    subprocess.run(["cp", "-a", ssd, restored], check=True)
    tier = attach(restored)
    assert pages(tier) == {b"a/b/page", b"page"}
    assert read(tier, b"a/b/page") == DATA
    tier.unlink(b"page")
    store(tier, b"a/b/page", DATA * 2)
    assert pages(tier) == {b"a/b/page"}
    check_accounts(tier)
    tier.close()


def test_names_of_what_is_not_ours_are_told_on_one_line(tier: SsdTier, expect_log: LogGuard) -> None:
    expect_log(r"not ours, and stay: two\\nlines \\xff$")
    (tier.directory / os.fsdecode(b"two\nlines \xff")).touch()
    scan(tier)
    assert len(expect_log.lines) == 1
