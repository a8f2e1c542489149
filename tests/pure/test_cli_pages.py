"""Walking over files, and asking about each of them a few at a time."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from kvfs import mounts
from kvfs.cli.pages import Failures, File, ask_each, ask_once, files_below, mount_of, shown
from kvfs.errors import KvfsError, NotMounted, NotPermitted, UsageError


def failing(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def test_every_file_below_a_directory_is_found_once(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    for name in ("one", "a/two", "a/b/three"):
        (tmp_path / name).touch()
    os.link(tmp_path / "one", tmp_path / "a/link")
    (tmp_path / "symlink").symlink_to("one")
    (tmp_path / "directory").symlink_to("a")
    os.mkfifo(tmp_path / "fifo")
    found = sorted(os.path.basename(file.path) for file in files_below(str(tmp_path)))
    assert found in (["one", "three", "two"], ["link", "three", "two"])
    assert list(files_below(str(tmp_path / "one"))) == [File(str(tmp_path / "one"))]


def test_what_is_not_there_is_given_with_its_error(tmp_path: Path) -> None:
    (file,) = files_below(str(tmp_path / "none"))
    assert isinstance(file.error, FileNotFoundError)
    [(path, answer)] = ask_each([file], len)
    assert (path, answer) == (file.path, file.error)


def test_each_file_is_asked_about_and_gives_its_answer_or_error() -> None:
    def ask(path: str) -> int:
        if path == "7":
            raise failing(errno.EIO)
        return int(path)

    answers = dict(ask_each((File(str(number)) for number in range(1000)), ask))
    assert isinstance(answers.pop("7"), OSError)
    assert answers == {str(number): number for number in range(1000) if number != 7}
    assert dict(ask_each([], ask)) == {}


def test_so_many_are_asked_at_once_and_no_more() -> None:
    together = threading.Barrier(3)
    running: list[str] = []
    most: list[int] = []

    def ask(path: str) -> None:
        running.append(path)
        most.append(len(running))
        together.wait(10)
        running.remove(path)

    assert len(list(ask_each([File(str(number)) for number in range(9)], ask, at_once=3))) == 9
    assert max(most) == 3


def test_a_bug_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        list(ask_each([File("page")], lambda _: 1 // 0))
    with pytest.raises(ZeroDivisionError):
        list(ask_each((File(str(1 // number)) for number in (1, 0)), len))


def test_one_question() -> None:
    assert ask_once("page", len) == 4

    def refuse(_path: str) -> None:
        raise failing(errno.EPERM)

    with pytest.raises(PermissionError):
        ask_once("page", refuse)


def test_failures_are_told_in_one_line() -> None:
    failures = Failures("evicted")
    for number in (errno.ENOENT, errno.ESTALE):  # they have left meanwhile
        failures.note("page", failing(number))
    failures.raise_if_any()
    failures.note("one", failing(errno.EIO))
    with pytest.raises(KvfsError, match=r"^1 file could not be evicted, one: Input/output error$"):
        failures.raise_if_any()
    failures.note("other", failing(errno.ETIMEDOUT))
    with pytest.raises(KvfsError, match=r"^2 files could not be evicted, one first: Input/output error$"):
        failures.raise_if_any()
    failures.note("theirs", failing(errno.EACCES))
    with pytest.raises(NotPermitted, match="1 file could not be evicted by you"):
        failures.raise_if_any()
    with pytest.raises(NotMounted):
        failures.note("page", failing(errno.ENOTCONN))


def test_where_a_path_lies() -> None:
    with pytest.raises(UsageError, match="the path is empty"):
        mount_of("")
    with pytest.raises(UsageError, match="No such file or directory"):
        mount_of("/nowhere/at all")
    with pytest.raises(NotMounted, match="/proc/self/status is on proc"):
        mount_of("/proc/self/status")


def test_below_a_root_that_is_no_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As chroot makes it: the list of mounts then has nothing that the path is on."""
    monkeypatch.setattr(mounts, "read_mountinfo", list)
    with pytest.raises(NotMounted, match="is on another filesystem, not on a mount of kvfs"):
        mount_of(str(tmp_path))


def test_any_name_is_shown_on_one_line() -> None:
    assert shown("pages/ab") == "pages/ab"
    assert shown("ünï") == "ünï"
    assert shown("a\nb\x1b[31m") == r"a\nb\x1b[31m"
    assert shown(os.fsdecode(b"\xff")) == r"\xff"
