from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs import syscalls
from kvfs.errors import AttributeMissing, NotStorable
from kvfs.page import OWNER
from kvfs.syscalls import RENAME_EXCHANGE, RENAME_NOREPLACE
from kvfs.tiers import ssd_following as following
from kvfs.tiers.attributes import Target
from kvfs.tiers.ssd import SsdTier
from tests.tiers.ssds import DIRECTORY, attach, check_accounts, named, pages, read, scan, store, write


@pytest.fixture
def tier(ssd: Path) -> Iterator[SsdTier]:
    made = attach(ssd)
    yield made
    check_accounts(made)
    made.close()


def content(tier: SsdTier) -> dict[bytes, bytes]:
    """Every page by its path; all of them lie under names that they were given."""
    stored, findings = scan(tier)
    assert findings.damaged == {}
    assert findings.foreign == 0
    return {one.path: read(tier, one.path) for one in stored if not one.is_directory}


def directories(tier: SsdTier) -> set[bytes]:
    return {one.path for one in scan(tier)[0] if one.is_directory}


def test_a_file_is_renamed(tier: SsdTier) -> None:
    store(tier, b"a/page", b"content")
    assert following.rename(tier, b"a/page", b"b/c/other", 0, [DIRECTORY, DIRECTORY])
    assert content(tier) == {b"b/c/other": b"content"}
    assert tier.get_attribute(b"b/c", OWNER) == DIRECTORY[OWNER]
    assert len(tier.records.record(os.fsencode(tier.directory / "b/c/other")).names) == 1


def test_a_file_is_renamed_over_another(tier: SsdTier) -> None:
    store(tier, b"page", b"content")
    store(tier, b"other", b"old")
    assert following.rename(tier, b"page", b"other")
    assert content(tier) == {b"other": b"content"}


def test_a_directory_moves_with_all_that_is_below(tier: SsdTier) -> None:
    for number in range(20):
        store(tier, b"a/b/%d/page" % number, b"%d" % number)
    assert following.rename(tier, b"a/b", b"x")
    assert content(tier) == {b"x/%d/page" % number: b"%d" % number for number in range(20)}
    store(tier, b"a/b/page", b"new")
    assert following.rename(tier, b"x", b"a/b/x")
    assert len(content(tier)) == 21


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("flags", [0, RENAME_EXCHANGE])
def test_a_change_that_is_done_does_not_fail_any_more(
    tier: SsdTier, monkeypatch: pytest.MonkeyPatch, number: int, flags: int
) -> None:
    """Who is told of a failure tries again, and would find that the old name was never there."""
    store(tier, b"page", b"1")
    store(tier, b"other", b"2")
    assert following.link(tier, b"other", b"link")
    bind = tier.records.bind

    def refuse(target: Target, add: tuple[int, ...] = (), drop: tuple[int, ...] = ()) -> None:
        if drop:
            raise OSError(number, os.strerror(number))
        bind(target, add, drop)

    monkeypatch.setattr(tier.records, "bind", refuse)
    assert following.rename(tier, b"page", b"other", flags)
    assert following.unlink(tier, b"link")
    assert content(tier) == ({b"other": b"1", b"page": b"2"} if flags else {b"other": b"1"})


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_rename_that_fails_leaves_the_page_under_its_old_name(
    tier: SsdTier, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store(tier, b"page", b"content")

    def refuse(*_arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(syscalls, "renameat2", refuse)
        with pytest.raises(OSError, match=os.strerror(number)):
            following.rename(tier, b"page", b"other")
    assert content(tier) == {b"page": b"content"}
    assert following.rename(tier, b"page", b"other")
    assert content(tier) == {b"other": b"content"}


def test_two_names_are_exchanged(tier: SsdTier) -> None:
    store(tier, b"a/page", b"1")
    store(tier, b"b/deep/page", b"2")
    store(tier, b"page", b"3")
    assert following.rename(tier, b"a", b"b", RENAME_EXCHANGE)
    assert content(tier) == {b"b/page": b"1", b"a/deep/page": b"2", b"page": b"3"}
    assert following.rename(tier, b"page", b"b", RENAME_EXCHANGE)
    assert content(tier) == {b"page/page": b"1", b"a/deep/page": b"2", b"b": b"3"}
    assert following.rename(tier, b"a/deep/page", b"page/page", RENAME_EXCHANGE)
    assert content(tier) == {b"page/page": b"2", b"a/deep/page": b"1", b"b": b"3"}


@pytest.mark.parametrize("stored", [b"a/page", b"b/page"])
def test_exchanged_with_something_that_is_not_stored(tier: SsdTier, stored: bytes) -> None:
    store(tier, stored, b"content")
    other = {b"a/page": b"b/page", b"b/page": b"a/page"}[stored]
    assert following.rename(tier, b"a/page", b"b/page", RENAME_EXCHANGE, [DIRECTORY], [DIRECTORY])
    assert content(tier) == {other: b"content"}


def test_what_was_never_stored_is_no_error(tier: SsdTier) -> None:
    assert not following.rename(tier, b"a/page", b"b/page")
    assert not following.rename(tier, b"a/page", b"b/page", RENAME_EXCHANGE)
    assert not following.unlink(tier, b"a/page")
    assert not following.rmdir(tier, b"a")
    assert not following.link(tier, b"a/page", b"b/page")
    assert not following.set_attribute(tier, b"a/page", OWNER, b"100644 0 0")
    assert not following.remove_attribute(tier, b"a/page", "user.mine")
    assert directories(tier) == set()


def test_a_name_that_got_something_else_that_is_not_stored_is_stale(tier: SsdTier) -> None:
    """The mount renamed a page that is only in DRAM over one that is stored."""
    store(tier, b"page", b"stale")
    assert not following.rename(tier, b"not-stored", b"page")
    store(tier, b"other", b"stale")
    assert not following.link(tier, b"not-stored", b"other")
    store(tier, b"directory/page", b"stale")
    assert not following.rename(tier, b"not-stored", b"directory")
    assert content(tier) == {}
    assert directories(tier) == set()


def test_a_file_takes_the_place_of_a_stale_directory_and_back(tier: SsdTier) -> None:
    store(tier, b"page", b"content")
    store(tier, b"a/b/stale", b"stale")
    assert following.rename(tier, b"page", b"a")
    assert content(tier) == {b"a": b"content"}
    store(tier, b"d/page", b"2")
    assert following.rename(tier, b"d", b"a")
    assert content(tier) == {b"a/page": b"2"}


def test_links(tier: SsdTier) -> None:
    store(tier, b"a/page", b"content")
    store(tier, b"stale", b"stale")
    assert following.link(tier, b"a/page", b"b/link", [DIRECTORY])
    assert following.link(tier, b"b/link", b"stale")
    assert content(tier) == {b"a/page": b"content", b"b/link": b"content", b"stale": b"content"}
    assert tier.stat(b"a/page").st_nlink == 3
    assert following.rename(tier, b"a/page", b"b/link")  # POSIX: two names of one file both stay
    assert following.unlink(tier, b"b/link")
    assert following.rename(tier, b"a/page", b"c")
    assert content(tier) == {b"c": b"content", b"stale": b"content"}
    record = tier.open_page(b"c")
    os.close(record.fd)
    assert len(record.record.names) == 2


def test_renamed_to_itself(tier: SsdTier) -> None:
    store(tier, b"a/page", b"content")
    assert following.rename(tier, b"a", b"a")
    assert following.rename(tier, b"a/page", b"a/page", RENAME_EXCHANGE)
    assert content(tier) == {b"a/page": b"content"}


def test_directories_come_and_go(tier: SsdTier) -> None:
    assert following.mkdir(tier, b"a/b", {OWNER: b"40700 1 2", "user.mine": b"x"}, [DIRECTORY])
    assert tier.get_attribute(b"a/b", OWNER) == b"40700 1 2"
    assert tier.get_attribute(b"a", OWNER) == DIRECTORY[OWNER]
    assert following.mkdir(tier, b"a/b", {OWNER: b"40755 3 4"})
    assert tier.get_attribute(b"a/b", OWNER) == b"40755 3 4"
    assert tier.get_attribute(b"a/b", "user.mine") == b"x"
    assert following.rmdir(tier, b"a/b")
    assert not following.rmdir(tier, b"a/b")
    assert directories(tier) == {b"a"}
    assert not following.mkdir(tier, b".kvfs-quarantine/x", {})


def test_attributes_follow(tier: SsdTier) -> None:
    store(tier, b"a/page", b"content")
    assert following.set_attribute(tier, b"a/page", "user.mine", b"1")
    assert following.set_attribute(tier, b"a/page", OWNER, b"100600 5 6")
    assert following.set_attribute(tier, b"a", OWNER, b"40700 7 8")
    opened = tier.open_page(b"a/page")
    os.close(opened.fd)
    assert opened.attributes == {"user.mine": b"1"}
    assert opened.record.owner is not None
    assert (opened.record.owner.mode, opened.record.owner.uid) == (0o100600, 5)
    assert following.remove_attribute(tier, b"a/page", "user.mine")
    assert not following.remove_attribute(tier, b"a/page", "user.mine")
    with pytest.raises(AttributeMissing):
        tier.get_attribute(b"a/page", "user.mine")


def test_to_a_name_of_the_tiers_own_a_page_goes(tier: SsdTier) -> None:
    store(tier, b"page", b"content")
    assert not following.rename(tier, b"page", b".kvfs-mine")
    store(tier, b"page", b"content")
    store(tier, b"a/page", b"content")
    assert not following.rename(tier, b"a", b"lost+found")
    assert not following.link(tier, b"page", b".kvfs-temporary/x")
    assert not following.unlink(tier, b".kvfs-owner")
    assert content(tier) == {b"page": b"content"}
    assert (tier.directory / ".kvfs-owner").exists()


def test_what_is_not_ours_stays_and_what_cannot_follow_goes(ssd: Path) -> None:
    tier = attach(ssd)
    (ssd / "file").write_text("mine")
    store(tier, b"a/page", b"content")
    (ssd / "a" / "notes").write_text("mine")
    store(tier, b"page", b"content")
    assert not following.unlink(tier, b"file")
    with pytest.raises(NotStorable):
        following.rename(tier, b"page", b"file")
    with pytest.raises(NotStorable):
        following.rename(tier, b"a", b"file")
    with pytest.raises(NotStorable):
        following.mkdir(tier, b"file", {})
    assert not following.rmdir(tier, b"a")
    assert (ssd / "file").read_text() == (ssd / "a" / "notes").read_text() == "mine"
    assert not (ssd / "a" / "page").exists()
    assert not (ssd / "page").exists()
    tier.close()


def test_base_operations_say_what_is_absent(tier: SsdTier) -> None:
    operations: list[Callable[[], None]] = [
        lambda: tier.unlink(b"a"),
        lambda: tier.rmdir(b"a"),
        lambda: tier.rename(b"a", b"b"),
        lambda: tier.link(b"a", b"b"),
    ]
    for operation in operations:
        with pytest.raises(FileNotFoundError):
            operation()
    store(tier, b"a", b"1")
    store(tier, b"b", b"2")
    with pytest.raises(FileExistsError):
        tier.rename(b"a", b"b", RENAME_NOREPLACE)
    with pytest.raises(FileExistsError):
        tier.link(b"a", b"b")
    with pytest.raises(FileExistsError):
        tier.mkdir(b"a")
    assert content(tier) == {b"a": b"1", b"b": b"2"}


class Model:
    """What the mount has; the tier has a part of it. A name is a file (its bytes) or a directory (None)."""

    def __init__(self) -> None:
        self.names: dict[bytes, bytes | None] = {}

    def is_free(self, path: bytes) -> bool:
        parent = path.rpartition(b"/")[0]
        return path not in self.names and (not parent or self.names.get(parent, b"") is None)

    def below(self, path: bytes) -> list[bytes]:
        return [name for name in self.names if name.startswith(path + b"/")]

    def move(self, old: bytes, new: bytes) -> None:
        moved = {new + name[len(old) :]: self.names.pop(name) for name in [old, *self.below(old)]}
        self.names.update(moved)


@pytest.mark.parametrize("seed", range(4))
def test_a_tier_that_follows_a_mount_has_nothing_under_a_wrong_name(tier: SsdTier, seed: int) -> None:
    """Random changes of a mount of which only some pages are stored. Whatever the tier has, the mount has."""
    randomly = random.Random(seed)
    model = Model()
    stored = 0
    for turn in range(1500):
        depth = randomly.randrange(1, 4)
        path = b"/".join(b"%d" % randomly.randrange(5) for _ in range(depth))
        other = b"/".join(b"%d" % randomly.randrange(5) for _ in range(randomly.randrange(1, 4)))
        action = randomly.random()
        if action < 0.15 and model.is_free(path):
            model.names[path] = None
            if randomly.random() < 0.5:
                following.mkdir(tier, path, DIRECTORY)
        elif action < 0.45 and (model.is_free(path) or model.names.get(path)):
            model.names[path] = b"%d" % turn
            if randomly.random() < 0.8:
                store(tier, path, b"%d" % turn)
                stored += 1
            else:
                following.unlink(tier, path)  # written again in DRAM: the old page is gone
        elif action < 0.6 and path in model.names and not model.below(path):
            following.unlink(tier, path)
            following.rmdir(tier, path)
            del model.names[path]
        elif action < 0.8 and path in model.names and path != other and not other.startswith(path + b"/"):
            if model.is_free(other):
                model.move(path, other)
            elif model.names.get(path) and model.names.get(other):
                model.names[other] = model.names.pop(path)
            elif path in model.names and model.names[path] is None and model.names.get(other, b"") is None:
                if model.below(other) or path.startswith(other + b"/"):
                    continue
                del model.names[other]
                model.move(path, other)
            else:
                continue
            following.rename(tier, path, other)
        elif action < 0.9 and model.names.get(path) and model.is_free(other):
            model.names[other] = model.names[path]
            following.link(tier, path, other)
        elif path in model.names and other in model.names and path != other:
            if path.startswith(other + b"/") or other.startswith(path + b"/"):
                continue
            model.move(path, b"held")
            model.move(other, path)
            model.move(b"held", other)
            following.rename(tier, path, other, RENAME_EXCHANGE)
    found = content(tier)
    assert stored > 100
    assert found.items() <= model.names.items()
    assert len(found) >= len([value for value in model.names.values() if value]) // 2
    assert directories(tier) <= {path for path, value in model.names.items() if value is None}


def test_a_page_that_lost_its_stored_name_is_published_under_the_new_one(tier: SsdTier) -> None:
    """A page was renamed in the mount while it was being written to the SSD."""
    written = write(tier, b"content")
    assert not following.rename(tier, b"a/temporary", b"a/final", 0, [DIRECTORY])
    tier.publish_page(written, named(b"a/final"))
    assert pages(tier) == {b"a/final"}
