"""Looking at many files of a directory in one call."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.tiers._looking import look_at

FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
NAME = "user.kvfs.page"


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def make(path: Path, **attributes: bytes) -> Path:
    path.write_bytes(b"x" * 5000)
    for name, value in attributes.items():
        os.setxattr(path, name.replace("__", "."), value)
    return path


def test_what_stat_tells_and_the_attribute(tmp_path: Path, fd: int) -> None:
    one = make(tmp_path / "one", user__kvfs__page=b"\0value\xff")
    os.utime(one, ns=(1_234_567_891, 9_876_543_219))
    os.link(one, tmp_path / "link")
    directory = tmp_path / "directory"
    directory.mkdir()
    os.setxattr(directory, NAME, b"")
    (tmp_path / "two").write_bytes(b"")
    os.setxattr(tmp_path / "two", NAME, b"x" * 256)
    names = (b"one", b"directory", b"two", b"link")
    for name, look in zip(names, look_at(fd, names, FLAGS, NAME), strict=True):
        path = tmp_path / os.fsdecode(name)
        status = path.stat()
        assert look == (
            *(status.st_mode, status.st_dev, status.st_ino, status.st_nlink),
            *(status.st_size, status.st_blocks, status.st_mtime_ns, status.st_atime_ns),
            os.getxattr(path, NAME),
        )


def test_what_is_not_plain_is_left_to_the_caller(tmp_path: Path, fd: int) -> None:
    make(tmp_path / "without")
    make(tmp_path / "other", user__kvfs__page=b"value", user__kvfs__ttl=b"1")
    make(tmp_path / "large", user__kvfs__page=b"x" * 257)
    make(tmp_path / "many", user__kvfs__page=b"value", **{f"user__{number:0100}": b"" for number in range(8)})
    (tmp_path / "symlink").symlink_to("plain")
    os.mkfifo(tmp_path / "fifo")
    make(tmp_path / "plain", user__kvfs__page=b"value", user__note=b"of somebody else")
    names = (b"without", b"other", b"large", b"many", b"symlink", b"fifo", b"missing")
    assert look_at(fd, names, FLAGS, NAME) == [None] * len(names)
    (look,) = look_at(fd, (b"plain",), FLAGS, NAME)
    assert look is not None
    assert look[-1] == b"value"
    assert look_at(fd, (), FLAGS, NAME) == []


def test_no_descriptor_is_left(tmp_path: Path, fd: int) -> None:
    make(tmp_path / "plain", user__kvfs__page=b"value")
    make(tmp_path / "without")
    before = os.listdir("/proc/self/fd")
    for _ in range(10):
        look_at(fd, (b"plain", b"without", b"missing"), FLAGS, NAME)
    assert os.listdir("/proc/self/fd") == before
    assert look_at(-1, (b"plain",), FLAGS, NAME) == [None]


def test_calls_that_make_no_sense(fd: int) -> None:
    for arguments in (
        (fd, [b"list"], FLAGS, NAME),
        (fd, ("text",), FLAGS, NAME),
        (fd, (), FLAGS, "no-prefix"),
        (fd, (b"x",) * 65, FLAGS, NAME),
        (fd, ()),
    ):
        with pytest.raises((TypeError, ValueError)):
            look_at(*arguments)
