"""Permissions: the kernel checks them, also for what it answers without asking the daemon."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounted.children import as_user, errno_as_user
from tests.mounted.operations import USER_ID, pattern
from tests.mounted.running import KvfsMount, wait_sealed

pytestmark = pytest.mark.as_root
DATA = pattern(29, 100_000)


@pytest.fixture
def shared(directory: Path) -> Iterator[Path]:
    """A directory that everybody may write to."""
    previous = os.umask(0o022)
    directory.chmod(0o777)
    yield directory
    os.umask(previous)


def test_an_ordinary_user_writes_reads_and_removes(shared: Path) -> None:
    def work() -> None:
        path = shared / "own"
        path.write_bytes(DATA)
        wait_sealed(path)
        assert path.read_bytes() == DATA
        found = path.stat()
        assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (USER_ID, USER_ID, 0o644)
        assert os.getxattr(path, "user.kvfs.tier") == b"dram"
        os.setxattr(path, "user.mine", b"yes")
        (shared / "sub").mkdir()
        os.link(path, shared / "sub/link")
        os.symlink("own", shared / "symlink")
        assert (shared / "symlink").lstat().st_uid == USER_ID
        path.chmod(0o600)
        path.rename(shared / "sub/moved")
        (shared / "sub/moved").unlink()
        (shared / "sub/link").unlink()
        (shared / "sub").rmdir()
        (shared / "symlink").unlink()

    as_user(work)
    assert os.listdir(shared) == []


def test_an_ordinary_user_reads_the_status(mount: KvfsMount) -> None:
    as_user(lambda: (mount.path / ".kvfs/status").read_text())
    as_user(lambda: os.statvfs(mount.path))


def test_what_is_not_allowed_is_denied(shared: Path) -> None:
    private, readable = shared / "private", shared / "readable"
    for path, mode in ((private, 0o600), (readable, 0o644)):
        path.write_bytes(DATA)
        path.chmod(mode)
        wait_sealed(path)
        assert path.read_bytes() == DATA
    shared.chmod(0o1777)
    closed = shared / "closed"
    closed.mkdir(mode=0o700)
    (closed / "inside").write_bytes(DATA)
    denied = {
        "reading a private page": lambda: private.read_bytes(),
        "writing a readable page": lambda: os.open(readable, os.O_WRONLY),
        "truncating it": lambda: os.truncate(readable, 0),
        "looking inside a closed directory": lambda: (closed / "inside").stat(),
        "listing it": lambda: os.listdir(closed),
        "an attribute of another's page": lambda: os.setxattr(readable, "user.a", b""),
    }
    for what, call in denied.items():
        assert errno_as_user(call) == errno.EACCES, what
    not_permitted = {
        "chmod of another's page": lambda: readable.chmod(0o777),
        "chown": lambda: os.chown(readable, USER_ID, USER_ID),
        "setting times": lambda: os.utime(readable, ns=(0, 0)),
        "removing in a sticky directory": lambda: readable.unlink(),
        "renaming in a sticky directory": lambda: readable.rename(shared / "taken"),
    }
    for what, call in not_permitted.items():
        assert errno_as_user(call) == errno.EPERM, what
    as_user(lambda: readable.read_bytes())
    assert readable.read_bytes() == DATA


def test_a_mode_that_changes_counts_at_once(shared: Path) -> None:
    """Also for pages whose opens never reach the daemon."""
    path = shared / "page"
    path.write_bytes(DATA)
    wait_sealed(path)
    for _ in range(20):
        path.chmod(0o600)
        assert errno_as_user(lambda: path.read_bytes()) == errno.EACCES
        path.chmod(0o604)
        assert errno_as_user(lambda: path.read_bytes()) == 0
    os.chown(path, USER_ID, 0)
    path.chmod(0o400)
    assert errno_as_user(lambda: path.read_bytes()) == 0


def test_a_supplementary_group_counts(shared: Path) -> None:
    path = shared / "page"
    path.write_bytes(DATA)
    os.chown(path, 0, 4242)
    path.chmod(0o640)
    wait_sealed(path)

    def with_group() -> None:
        os.setgroups([4242])
        os.setgid(USER_ID)
        os.setuid(USER_ID)
        path.read_bytes()

    child = os.fork()
    if child == 0:
        try:
            with_group()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert errno_as_user(lambda: path.read_bytes()) == errno.EACCES


def test_the_group_of_a_setgid_directory_is_inherited(shared: Path) -> None:
    group = shared / "group"
    group.mkdir()
    os.chown(group, 0, 4242)
    group.chmod(0o2777)

    def work() -> None:
        (group / "file").write_bytes(DATA)
        (group / "directory").mkdir()

    as_user(work)
    assert (group / "file").stat().st_gid == 4242
    assert (group / "directory").stat().st_gid == 4242
    assert (group / "directory").stat().st_mode & stat.S_ISGID
    assert (group / "file").stat().st_uid == USER_ID


def test_writing_leaves_the_setuid_bit_which_means_nothing_here(shared: Path) -> None:
    path = shared / "program"
    path.write_bytes(DATA)
    os.chown(path, USER_ID, USER_ID)
    path.chmod(0o4777)
    wait_sealed(path)

    def work() -> None:
        with open(path, "r+b") as file:
            file.write(b"changed")

    as_user(work)
    assert path.stat().st_mode & stat.S_ISUID
    assert os.statvfs(path).f_flag & os.ST_NOSUID


def test_the_backing_files_are_out_of_reach(mount: KvfsMount, shared: Path) -> None:
    (shared / "page").write_bytes(DATA)
    for path in (mount.state_base, mount.state, mount.dram):
        if path != mount.state_base:
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    assert errno_as_user(lambda: os.listdir(mount.dram)) == errno.EACCES


def test_a_symlink_never_leads_the_daemon_out_of_its_tier(mount: KvfsMount, shared: Path) -> None:
    """A symlink is a small file in the tier: nothing there for the daemon to follow."""
    os.symlink("/etc", shared / "outside")
    assert os.readlink(shared / "outside") == "/etc"
    for parent, directories, files in os.walk(mount.dram):
        for name in (*directories, *files):
            assert not os.path.islink(f"{parent}/{name}")
