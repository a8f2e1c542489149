from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.errors import DamagedPage, NoSuchPage
from kvfs.page import OWNER, digest_of
from kvfs.syscalls import RENAME_EXCHANGE, renameat2
from kvfs.tiers import ssd_following as following
from kvfs.tiers.ssd import SsdTier
from kvfs.tiers.ssd_directory import MARK
from kvfs.tiers.ssd_quarantine import REASONS
from kvfs.tiers.ssd_scan import Scan
from tests.conftest import LogGuard
from tests.tiers.ssds import (
    FILE,
    MEBIBYTE,
    attach,
    check_accounts,
    named,
    pages,
    read,
    scan,
    store,
    write,
)


@pytest.fixture
def tier(ssd: Path) -> Iterator[SsdTier]:
    made = attach(ssd)
    yield made
    made.close()


def exchange(one: Path, other: Path) -> None:
    renameat2(-100, os.fsencode(one), -100, os.fsencode(other), RENAME_EXCHANGE)


def truncate(root: Path) -> None:
    os.truncate(root / "a/b/page", 5)


def lengthen(root: Path) -> None:
    os.truncate(root / "a/b/page", 50_000)


def drop_attributes(root: Path) -> None:
    for name in os.listxattr(root / "a/b/page"):
        os.removexattr(root / "a/b/page", name)


def damage_attributes(root: Path) -> None:
    for name in os.listxattr(root / "a/b/page"):
        value = bytearray(os.getxattr(root / "a/b/page", name))
        value[len(value) // 2] ^= 4
        os.setxattr(root / "a/b/page", name, bytes(value))


def swap_files(root: Path) -> None:
    exchange(root / "a/b/page", root / "a/b/other")


def swap_files_of_one_name(root: Path) -> None:
    exchange(root / "a/b/page", root / "a/c/page")


def swap_directories(root: Path) -> None:
    exchange(root / "a/b", root / "a/c")


def swap_directories_above(root: Path) -> None:
    exchange(root / "a", root / "d")


def rename_directory(root: Path) -> None:
    (root / "a/b").rename(root / "a/moved")
    (root / "a/b").mkdir(mode=0o700 | MARK)
    (root / "a/moved/page").rename(root / "a/b/page")


def drop_attributes_of_directory(root: Path) -> None:
    for name in os.listxattr(root / "a/b"):
        os.removexattr(root / "a/b", name)


DAMAGES: dict[Callable[[Path], None], str] = {
    truncate: "size",
    lengthen: "size",
    drop_attributes: "attributes",
    damage_attributes: "attributes",
    swap_files: "name",
    swap_files_of_one_name: "name",
    swap_directories: "name",
    swap_directories_above: "name",
    rename_directory: "name",
    drop_attributes_of_directory: "name",
}

FOUR = (b"a/b/page", b"a/b/other", b"a/c/page", b"d/b/page")


def fill(tier: SsdTier) -> None:
    for path in FOUR:
        store(tier, path, path * 1000)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_while_in_use_is_noticed_at_open(
    tier: SsdTier, damage: Callable[[Path], None], expect_log: LogGuard
) -> None:
    fill(tier)
    damage(tier.directory)
    tier._directories.clear()  # what is open already still is the right directory
    with pytest.raises(DamagedPage) as damaged:
        tier.open_page(b"a/b/page")
    assert damaged.value.reason == DAMAGES[damage]
    assert damaged.value.inode == (tier.directory / "a/b/page").stat().st_ino
    expect_log("a/b/page is quarantined: " + REASONS[damaged.value.reason])
    assert tier.set_aside(b"a/b/page", damaged.value.reason)
    with pytest.raises(NoSuchPage):
        tier.open_page(b"a/b/page")
    (kept,) = tier.list_quarantined()
    assert (kept.path, kept.reason) == (b"a/b/page", damaged.value.reason)
    assert tier.damaged == {damaged.value.reason: 1}
    store(tier, b"a/b/page", b"again")
    assert read(tier, b"a/b/page") == b"again"


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_while_not_in_use_is_noticed_by_the_walk(
    ssd: Path, damage: Callable[[Path], None], expect_log: LogGuard
) -> None:
    tier = attach(ssd)
    fill(tier)
    tier.close()
    damage(ssd)
    expect_log("is quarantined: " + REASONS[DAMAGES[damage]])
    tier = attach(ssd)
    stored, findings = scan(tier)
    assert set(findings.damaged) == {DAMAGES[damage]}
    assert findings.damaged.total() == len(tier.list_quarantined()) >= 1
    assert findings.foreign == 0
    assert b"a/b/page" not in {one.path for one in stored}
    for one in stored:
        if not one.is_directory:
            assert read(tier, one.path) == one.path * 1000
    check_accounts(tier)
    for path in FOUR:
        store(tier, path, b"again")
        assert read(tier, path) == b"again"
    assert pages(tier) == set(FOUR)
    check_accounts(tier)
    tier.close()


def test_a_flipped_bit_is_for_the_reader_to_find(tier: SsdTier) -> None:
    """Opening does not read the bytes: who does compares them with the digest that it gave."""
    store(tier, b"page", b"x" * 10_000)
    with (tier.directory / "page").open("r+b") as file:
        file.seek(5000)
        file.write(b"y")
    opened = tier.open_page(b"page")
    content = os.pread(opened.fd, 20_000, 0)
    os.close(opened.fd)
    assert digest_of(content) != opened.digest


def test_a_page_that_is_gone_is_gone(tier: SsdTier) -> None:
    store(tier, b"a/page", b"content")
    (tier.directory / "a/page").unlink()
    with pytest.raises(NoSuchPage):
        tier.open_page(b"a/page")
    assert not tier.set_aside(b"a/page", "bytes")
    assert not tier.set_aside(b"a", "bytes")
    (tier.directory / "a").rmdir()
    with pytest.raises(NoSuchPage):
        tier.open_page(b"a/page")
    store(tier, b"a/page", b"again")
    assert read(tier, b"a/page") == b"again"
    Scan(tier).run()
    check_accounts(tier)


def test_a_page_that_was_stored_again_meanwhile_is_not_quarantined(
    tier: SsdTier, expect_log: LogGuard
) -> None:
    store(tier, b"page", b"damaged")
    damaged = tier.stat(b"page").st_ino
    store(tier, b"other", b"x")  # so that the number is not used again at once
    store(tier, b"page", b"good")
    assert not tier.set_aside(b"page", "bytes", damaged)
    assert read(tier, b"page") == b"good"
    expect_log("page is quarantined")
    assert tier.set_aside(b"page", "bytes", tier.stat(b"page").st_ino)


def test_pages_that_move_while_they_are_opened_are_never_taken_for_damaged(tier: SsdTier) -> None:
    for directory in (b"a", b"b"):
        store(tier, directory + b"/deep/page", directory * 1000)
    stop = threading.Event()

    def move() -> None:
        while not stop.is_set():
            following.rename(tier, b"a", b"b", RENAME_EXCHANGE)

    mover = threading.Thread(target=move)
    mover.start()
    try:
        for _ in range(2000):
            assert read(tier, b"a/deep/page")[:1] in (b"a", b"b")
    finally:
        stop.set()
        mover.join()


def test_a_page_that_is_removed_while_it_is_stored(tier: SsdTier) -> None:
    written = write(tier, b"content")
    (temporary,) = (tier.directory / ".kvfs-temporary").iterdir()
    temporary.unlink()
    with pytest.raises(NoSuchPage, match="somebody removed a page"):
        tier.publish_page(written, named(b"page"))
    check_accounts(tier)


def test_swapped_names_that_are_links_of_one_file_are_no_damage(tier: SsdTier) -> None:
    tier.publish_page(write(tier, b"content"), named(b"a/one", b"b/two"))
    exchange(tier.directory / "a/one", tier.directory / "b/two")
    assert read(tier, b"a/one") == read(tier, b"b/two") == b"content"
    assert scan(tier)[1].damaged == {}


def test_quarantine_is_bounded_and_the_oldest_leave_first(ssd: Path, expect_log: LogGuard) -> None:
    limit = 3 * MEBIBYTE + 65536  # a note of the path may take a block
    tier = attach(ssd, quarantine_bytes=limit)
    expect_log("is quarantined: its bytes do not match its digest")
    for number in range(10):
        path = b"a/%d" % number
        store(tier, path, os.urandom(MEBIBYTE))
        assert tier.set_aside(path, "bytes")
        assert tier.statistics().quarantine_bytes <= limit
        check_accounts(tier)
    assert [kept.path for kept in tier.list_quarantined()] == [b"a/7", b"a/8", b"a/9"]
    assert len(os.listdir(ssd / ".kvfs-quarantine")) == 3
    assert len(expect_log.lines) < 10  # one a second
    assert tier.damaged["bytes"] == 10
    tier.close()
    tier = attach(ssd, quarantine_bytes=limit)
    assert [kept.path for kept in tier.list_quarantined()] == [b"a/7", b"a/8", b"a/9"]
    assert pages(tier) == set()
    tier.delete_quarantined(tier.list_quarantined()[1].name)
    assert tier.shrink_quarantine(MEBIBYTE + 65536) >= MEBIBYTE
    assert [kept.path for kept in tier.list_quarantined()] == [b"a/9"]
    with pytest.raises(KeyError):
        tier.delete_quarantined(b"missing")
    check_accounts(tier)
    tier.close()


def test_a_page_larger_than_quarantine_goes_at_once(ssd: Path, expect_log: LogGuard) -> None:
    tier = attach(ssd, quarantine_bytes=MEBIBYTE)
    expect_log("quarantined")
    store(tier, b"page", os.urandom(2 * MEBIBYTE))
    assert tier.set_aside(b"page", "bytes")
    assert tier.list_quarantined() == []
    check_accounts(tier)
    tier.close()


def test_a_page_in_quarantine_keeps_what_was_known_of_it(tier: SsdTier, expect_log: LogGuard) -> None:
    expect_log("quarantined")
    path = b"/".join([b"d" * 200] * 15) + b"/page"
    store(tier, path, b"content", FILE | {"user.mine": b"x"})
    tier.set_aside(path, "bytes")
    (kept,) = tier.list_quarantined()
    assert path.endswith(kept.path)
    assert len(kept.path) == 1024
    assert kept.size == tier.stat(b".kvfs-quarantine/" + kept.name).st_blocks * 512
    inside = b".kvfs-quarantine/" + kept.name
    assert tier.get_attribute(inside, "user.mine") == b"x"
    assert tier.get_attribute(inside, OWNER) == FILE[OWNER]


def test_all_names_of_a_damaged_page_go_one_by_one(tier: SsdTier, expect_log: LogGuard) -> None:
    expect_log("quarantined")
    tier.publish_page(write(tier, b"x" * 9000), named(b"a/one", b"b/two", b"three"))
    os.truncate(tier.directory / "three", 1)
    assert scan(tier)[1].damaged == {"size": 3}
    assert pages(tier) == set()
    check_accounts(tier)
    tier.shrink_quarantine(0)
    check_accounts(tier)


def test_a_crash_between_the_note_and_the_move_is_finished_by_the_walk(
    tier: SsdTier, expect_log: LogGuard
) -> None:
    expect_log("page is quarantined: its bytes do not match its digest")
    store(tier, b"page", b"content")
    tier.quarantine.label(os.fsencode(tier.directory / "page"), b"page", "bytes")
    assert scan(tier)[1].damaged == {"bytes": 1}
    assert pages(tier) == set()


def test_what_somebody_else_put_into_quarantine_is_not_counted(tier: SsdTier) -> None:
    (tier.directory / ".kvfs-quarantine" / "mine").write_bytes(b"x" * 10_000)
    findings = scan(tier)[1]
    assert findings.drift_bytes == 0
    assert (tier.directory / ".kvfs-quarantine" / "mine").exists()


def test_files_that_were_deleted_from_quarantine_by_hand(tier: SsdTier, expect_log: LogGuard) -> None:
    expect_log("quarantined")
    for path in (b"one", b"two"):
        store(tier, path, b"content")
        tier.set_aside(path, "bytes")
    for kept in (tier.directory / ".kvfs-quarantine").iterdir():
        kept.unlink()
    assert [one.reason for one in tier.list_quarantined()] == ["", ""]
    tier.shrink_quarantine(0)
    assert tier.list_quarantined() == []
    Scan(tier).run()
    check_accounts(tier)


def test_directories_beside_the_tree_that_somebody_removed_come_back(
    tier: SsdTier, expect_log: LogGuard
) -> None:
    expect_log("quarantined")
    for name in (".kvfs-quarantine", ".kvfs-temporary"):
        (tier.directory / name).rmdir()
    store(tier, b"page", b"content")
    tier.set_aside(b"page", "bytes")
    assert len(tier.list_quarantined()) == 1
