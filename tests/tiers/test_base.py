from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from kvfs import syscalls
from kvfs.errors import AttributeMissing
from kvfs.tiers.base import Tier
from kvfs.tiers.directories import Directories, Directory
from tests.tiers.conftest import mounted_tmpfs, needs_root, open_root


def write(tier: Tier, path: bytes, content: bytes = b"content") -> None:
    fd = tier.create(path)
    try:
        os.write(fd, content)
    finally:
        os.close(fd)


def read(tier: Tier, path: bytes) -> bytes:
    fd = tier.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 1 << 20)
    finally:
        os.close(fd)


def names(tier: Tier) -> set[bytes]:
    return {found.path for found in tier.walk()}


def test_files_and_directories(tier: Tier) -> None:
    tier.mkdir(b"a")
    tier.mkdir(b"a/b")
    write(tier, b"a/b/page", b"one")
    tier.link(b"a/b/page", b"again")
    assert tier.stat(b"a/b/page").st_nlink == 2
    assert read(tier, b"again") == b"one"
    tier.rename(b"a/b/page", b"a/moved")
    assert sorted(tier.list(b"a")) == [b"b", b"moved"]
    assert sorted(tier.list(b"")) == [b"a", b"again"]
    tier.unlink(b"again")
    tier.utime(b"a/moved", ns=(1_000, 2_000_000_001))
    status = tier.stat(b"a/moved")
    assert (status.st_size, status.st_atime_ns, status.st_mtime_ns) == (3, 1_000, 2_000_000_001)
    tier.rmdir(b"a/b")
    tier.unlink(b"a/moved")
    tier.rmdir(b"a")
    assert tier.list(b"") == []


def test_what_a_tier_makes_is_for_its_owner_alone(tier: Tier) -> None:
    tier.mkdir(b"d")
    write(tier, b"f")
    assert tier.stat(b"d").st_mode & 0o7777 == 0o700
    assert tier.stat(b"f").st_mode & 0o7777 == 0o600


def test_descriptors_do_not_survive_exec(tier: Tier) -> None:
    fd = tier.create(b"f")
    again = tier.open(b"f", os.O_RDONLY)
    assert not os.get_inheritable(fd)
    assert not os.get_inheritable(again)
    os.close(fd)
    os.close(again)


def test_an_existing_file_is_never_created_again(tier: Tier) -> None:
    write(tier, b"f")
    with pytest.raises(FileExistsError):
        tier.create(b"f")


def test_the_root_has_the_empty_path(tier: Tier) -> None:
    tier.utime(b"", ns=(5_000_000_000, 6_000_000_000))
    assert tier.stat(b"").st_mtime_ns == 6_000_000_000
    tier.set_attribute(b"", "owner", b"040770 0 0")
    assert tier.get_attribute(b"", "owner") == b"040770 0 0"


@pytest.mark.parametrize("path", [b"a/..", b"..", b"a/.", b".", b"a/", b"/"])
def test_a_path_that_names_nothing_is_a_bug_of_the_caller(tier: Tier, path: bytes) -> None:
    tier.mkdir(b"a")
    with pytest.raises(ValueError, match="not a path"):
        tier.stat(path)


def test_no_path_leaves_the_tier(tier: Tier, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    root = f"/proc/self/fd/{tier.root_fd}"
    os.symlink(outside, f"{root}/directory")
    os.symlink(outside / "secret", f"{root}/file")
    for operation in (
        lambda: tier.open(b"directory/secret", os.O_RDONLY),
        lambda: tier.stat(b"directory/secret"),
        lambda: tier.list(b"directory"),
        lambda: tier.create(b"directory/new"),
        lambda: tier.get_attribute(b"directory/secret", "digest"),
        lambda: tier.open(b"file", os.O_RDONLY),
        lambda: list(tier.walk(b"directory")),
    ):
        with pytest.raises(OSError, match=r"symbolic|symlink|Not a directory") as failure:
            operation()
        assert failure.value.errno in (errno.ELOOP, errno.ENOTDIR)
    with pytest.raises(OSError, match="cross-device"):
        tier.list(b"../outside")
    assert (outside / "secret").read_text() == "secret"
    assert os.listdir(outside) == ["secret"]


def test_a_symlink_in_the_tier_is_shown_bare_and_deleted_alone(tier: Tier, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    os.symlink(outside, f"/proc/self/fd/{tier.root_fd}/link")
    os.mkfifo(f"/proc/self/fd/{tier.root_fd}/fifo")
    assert {(found.path, found.is_directory, len(found.attributes)) for found in tier.walk()} == {
        (b"link", False, 0),
        (b"fifo", False, 0),
    }
    tier.empty()
    assert tier.list(b"") == []
    assert os.listdir(outside) == ["kept"]


def test_a_renamed_directory_is_not_mistaken_for_the_next_one_of_its_name(tier: Tier) -> None:
    for name in (b"a", b"a/deep"):
        tier.mkdir(name)
    write(tier, b"a/deep/page", b"old")
    assert read(tier, b"a/deep/page") == b"old"
    tier.rename(b"a", b"b")
    assert read(tier, b"b/deep/page") == b"old"
    with pytest.raises(FileNotFoundError):
        tier.stat(b"a/deep/page")
    for name in (b"a", b"a/deep"):
        tier.mkdir(name)
    write(tier, b"a/deep/page", b"new")
    assert (read(tier, b"a/deep/page"), read(tier, b"b/deep/page")) == (b"new", b"old")
    tier.rename(b"a", b"b", syscalls.RENAME_EXCHANGE)
    assert (read(tier, b"a/deep/page"), read(tier, b"b/deep/page")) == (b"old", b"new")
    write(tier, b"file", b"file")
    tier.rename(b"file", b"a", syscalls.RENAME_EXCHANGE)
    assert read(tier, b"a") == b"file"
    assert read(tier, b"file/deep/page") == b"old"


def test_a_directory_that_was_removed_behind_our_back_can_be_made_again(tier: Tier) -> None:
    tier.mkdir(b"a")
    write(tier, b"a/page")
    os.unlink(f"/proc/self/fd/{tier.root_fd}/a/page")
    os.rmdir(f"/proc/self/fd/{tier.root_fd}/a")
    with pytest.raises(FileNotFoundError):
        tier.create(b"a/page")
    tier.mkdir(b"a")
    write(tier, b"a/page", b"again")
    assert read(tier, b"a/page") == b"again"


def test_rename_keeps_its_flags(tier: Tier) -> None:
    write(tier, b"a", b"a")
    write(tier, b"b", b"b")
    with pytest.raises(FileExistsError):
        tier.rename(b"a", b"b", syscalls.RENAME_NOREPLACE)
    tier.rename(b"a", b"b")
    assert read(tier, b"b") == b"a"


def test_attributes_of_files_by_path_and_by_descriptor(tier: Tier) -> None:
    tier.mkdir(b"d")
    fd = tier.create(b"d/f")
    tier.set_attribute(fd, "digest", b"\0binary\xff")
    tier.set_attribute(b"d/f", "user.mine", b"")
    assert tier.get_attribute(b"d/f", "digest") == tier.get_attribute(fd, "digest") == b"\0binary\xff"
    assert sorted(tier.list_attributes(fd)) == sorted(tier.list_attributes(b"d/f")) == ["digest", "user.mine"]
    tier.remove_attribute(b"d/f", "digest")
    with pytest.raises(AttributeMissing):
        tier.get_attribute(fd, "digest")
    with pytest.raises(AttributeMissing):
        tier.remove_attribute(fd, "digest")
    with pytest.raises(FileNotFoundError):
        tier.get_attribute(b"d/missing", "digest")
    os.close(fd)


def test_attributes_follow_a_file_and_die_with_it(tier: Tier) -> None:
    write(tier, b"f")
    tier.set_attribute(b"f", "digest", b"1")
    tier.link(b"f", b"g")
    tier.unlink(b"f")
    assert tier.get_attribute(b"g", "digest") == b"1"
    tier.rename(b"g", b"h")
    assert tier.get_attribute(b"h", "digest") == b"1"
    write(tier, b"new")
    tier.rename(b"new", b"h")
    assert tier.list_attributes(b"h") == []
    tier.set_attribute(b"h", "digest", b"2")
    for _ in range(50):
        tier.unlink(b"h")
        write(tier, b"h")
        assert tier.list_attributes(b"h") == []
        tier.set_attribute(b"h", "digest", b"3")


def test_a_link_renamed_onto_another_link_of_the_same_file_keeps_its_attributes(tier: Tier) -> None:
    write(tier, b"f")
    tier.link(b"f", b"g")
    tier.set_attribute(b"f", "digest", b"1")
    tier.rename(b"f", b"g")  # POSIX: does nothing
    assert tier.get_attribute(b"f", "digest") == tier.get_attribute(b"g", "digest") == b"1"
    tier.rename(b"f", b"f")
    assert tier.get_attribute(b"f", "digest") == b"1"


def test_a_walk_gives_parents_before_children_and_all_that_is_known(tier: Tier) -> None:
    for name in (b"a", b"a/b", b"c"):
        tier.mkdir(name)
    write(tier, b"a/b/page", b"x" * 5000)
    tier.set_attribute(b"a/b/page", "digest", b"d")
    tier.set_attribute(b"a", "owner", b"o")
    tier.link(b"a/b/page", b"c/link")
    found = {one.path: one for one in tier.walk()}
    assert set(found) == {b"a", b"a/b", b"a/b/page", b"c", b"c/link"}
    order = [one.path for one in tier.walk()]
    assert order.index(b"a") < order.index(b"a/b") < order.index(b"a/b/page")
    page, status = found[b"a/b/page"], tier.stat(b"a/b/page")
    assert page.attributes == {"digest": b"d"}
    assert (page.size, page.blocks, page.links, page.inode) == (5000, status.st_blocks, 2, status.st_ino)
    assert (page.mtime_ns, page.atime_ns) == (status.st_mtime_ns, status.st_atime_ns)
    assert found[b"c/link"].inode == page.inode
    assert found[b"a"].is_directory
    assert found[b"a"].attributes == {"owner": b"o"}
    assert not page.is_directory
    assert {one.path for one in tier.walk(b"a")} == {b"a/b", b"a/b/page"}


def test_what_a_walk_gives_may_be_removed_at_once(tier: Tier) -> None:
    tier.mkdir(b"d")
    for number in range(500):
        write(tier, b"d/%d" % number)
    given = 0
    for found in tier.walk():
        if not found.is_directory:
            tier.unlink(found.path)
            given += 1
    assert given == 500
    assert tier.list(b"d") == []


def test_a_walk_leaves_out_what_vanishes(tier: Tier) -> None:
    for directory in (b"d", b"e"):
        tier.mkdir(directory)
        for number in range(10):
            write(tier, directory + b"/%d" % number)
    walk = tier.walk()
    next(walk)
    tier.empty()
    assert all(not found.path.count(b"/") for found in walk)


def test_names_are_bytes(tier: Tier) -> None:
    name = b"\xff\xfe \n\xc3\xa4"
    tier.mkdir(name)
    write(tier, name + b"/" + name)
    assert names(tier) == {name, name + b"/" + name}
    assert tier.list(name) == [name]


def test_room_is_what_statvfs_says(tier: Tier) -> None:
    before = tier.room()
    write(tier, b"f", b"x" * (1 << 20))
    os.fsync(tier.root_fd)
    os.sync()
    after = tier.room()
    assert before.free_bytes - after.free_bytes >= 1 << 20
    assert after.used_bytes == after.total_bytes - after.free_bytes
    assert before.free_inodes - after.free_inodes >= 1
    assert after.total_bytes <= 64 << 20


def test_close_lets_go_of_every_descriptor(tier: Tier) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        tier.mkdir(b"%d" % number)
        write(tier, b"%d/page" % number)
    assert len(os.listdir("/proc/self/fd")) == before + 20
    tier.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    assert tier.root_fd == -1


@needs_root
def test_closing_for_good_deletes_everything(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "tier") as directory:
        tier = Tier("test", open_root(directory))
        path = b""
        for depth in range(50):
            path += b"/d" if path else b"d"
            tier.mkdir(path)
            write(tier, path + b"/%d" % depth)
        tier.close(keep=False)
        assert os.listdir(directory) == []


def test_the_number_of_open_directories_is_bounded(tmp_path: Path) -> None:
    root = Directory(open_root(tmp_path))
    directories = Directories(root, limit=4)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(10):
        (tmp_path / str(number)).mkdir()
    held = directories.get(b"0")
    for number in range(10):
        directories.get(b"%d" % number)
    assert len(os.listdir("/proc/self/fd")) == before + 5
    assert os.fstat(held.fd).st_ino == (tmp_path / "0").stat().st_ino
    assert directories.get(b"9") is directories.get(b"9")
    del held
    directories.clear()
    assert len(os.listdir("/proc/self/fd")) == before
    root.close()


def test_threads_never_meet_a_closed_or_strange_directory(tmp_path: Path) -> None:
    """With a cache of one directory, every look-up throws out the one that another thread is using."""
    for name in "abcd":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    tier = Tier("test", open_root(tmp_path))
    tier._directories = Directories(tier._root, limit=1)
    problems: list[str] = []

    def look(name: bytes) -> None:
        for _ in range(2000):
            try:
                tier.stat(name + b"/" + name)
            except OSError as error:
                problems.append(str(error))

    threads = [threading.Thread(target=look, args=(name.encode(),)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tier.close()
    assert problems == []
