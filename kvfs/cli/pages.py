"""Asking a mount about many pages, a few at once, for verbs that can be interrupted at any time.

A call that waits for a daemon cannot be interrupted. So all of them are made in threads, which are left
behind when the program ends. Where a daemon hangs, the kernel keeps the process until it answers.
"""

from __future__ import annotations

import errno as numbers
import os
import queue
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from kvfs import mounts, page
from kvfs.cli.control import ANSWER_DEADLINE_SECONDS
from kvfs.deadlines import answer_within
from kvfs.errors import DaemonFailed, KvfsError, NotMounted, NotPermitted, UsageError
from kvfs.sizes import format_count

VERIFY: Final = "user.kvfs.verify"
EVICT: Final = "user.kvfs.evict"
PREFETCH: Final = "user.kvfs.prefetch"
LEFTOVERS: Final = "user.kvfs.leftovers"
TIER: Final = "user.kvfs.tier"
PIN: Final = "user.kvfs.pin"

AT_ONCE: Final = 4
"""Requests that are under way at once: the daemon would not do more of them at once anyway."""
_AHEAD = 256
"""Files that are listed before they are asked about."""

_LEFT = (numbers.ENOENT, numbers.ESTALE, numbers.ENOTDIR)
_DAEMON_GONE = (numbers.ENOTCONN, numbers.ECONNABORTED)
_WORDS = {numbers.ETIMEDOUT: "the SSD does not answer", numbers.EROFS: "the mount is read-only"}
_KINDS = {stat.S_IFIFO: "it is a fifo", stat.S_IFSOCK: "it is a socket"}

Answer = TypeVar("Answer")


def shown(path: str) -> str:
    """A path on one line, whatever characters are in it."""
    return page.shown(os.fsencode(path))


def in_words(error: OSError) -> str:
    return _WORDS.get(error.errno or 0, error.strerror or str(error))


def has_left(error: OSError) -> bool:
    """Whether a page is not there any more: it was evicted or removed meanwhile, as pages of a cache are."""
    return error.errno in _LEFT


# Where


def mount_of(text: str) -> tuple[Path, str]:
    """The kvfs mount that a path is on, and the path without symlinks, of a file or a directory.

    Raises UsageError where there is nothing or what is no page, NotMounted where it is on another filesystem
    or the daemon is gone, NotPermitted, and DaemonFailed where nobody answers.
    """
    if not text:
        raise UsageError("the path is empty: name a file or directory on a mount of kvfs")
    try:
        found = answer_within(ANSWER_DEADLINE_SECONDS, partial(_find, text))
    except OSError as error:
        raise _unreachable(text, error) from None
    if found is None:
        raise DaemonFailed(f"{shown(text)}: no answer within {ANSWER_DEADLINE_SECONDS:g} s")
    path, mode = found
    entry = max(
        (entry for entry in mounts.read_mountinfo() if Path(path).is_relative_to(entry.mountpoint)),
        key=lambda entry: (len(entry.mountpoint.parts), entry.mount_id),
        default=None,  # below a changed root, which need not be a mount itself
    )
    if entry is None or entry.fstype != mounts.FSTYPE:
        filesystem = "another filesystem" if entry is None else entry.fstype
        raise NotMounted(f"{shown(text)} is on {filesystem}, not on a mount of kvfs")
    if os.fsencode(os.path.relpath(path, entry.mountpoint)).startswith(page.RESERVED):
        raise UsageError(f"{shown(text)} is no page: it is how the mount tells of itself")
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise UsageError(f"{shown(text)} is no page: {_KINDS.get(stat.S_IFMT(mode), 'it is a device')}")
    return entry.mountpoint, path


def _find(text: str) -> tuple[str, int]:
    """The path without symlinks, and the mode of what is there."""
    path = os.path.realpath(text, strict=True)
    return path, os.lstat(path).st_mode


def _unreachable(text: str, error: OSError) -> KvfsError:
    if error.errno in _DAEMON_GONE:
        return NotMounted(
            f"{shown(text)}: the daemon of its mount is gone: kvfs mount serves its pages again"
        )
    if isinstance(error, PermissionError):
        return NotPermitted(f"{shown(text)} cannot be reached by you: use sudo")
    return UsageError(f"{shown(text)}: {in_words(error)}")


@dataclass(frozen=True, slots=True)
class File:
    """A file on the mount, or a directory that cannot be listed, with the reason."""

    path: str
    error: OSError | None = None


def files_below(start: str) -> Iterator[File]:
    """The file at a path, or every file below a directory; of hard links only one."""
    try:
        status = os.lstat(start)
    except OSError as error:
        yield File(start, error)
        return
    if not stat.S_ISDIR(status.st_mode):
        yield File(start)
        return
    seen: set[int] = set()
    pending = [start]
    while pending:
        directory = pending.pop()
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    elif entry.is_file(follow_symlinks=False) and entry.inode() not in seen:
                        seen.add(entry.inode())
                        yield File(entry.path)
        except OSError as error:
            yield File(directory, error)


# Asking


def ask_each(
    files: Iterable[File], ask: Callable[[str], Answer], at_once: int = AT_ONCE
) -> Iterator[tuple[str, Answer | OSError]]:
    """Asks about each file; gives the answers as they come, or the errors."""
    waiting: queue.Queue[File | None] = queue.Queue(_AHEAD)
    answers: queue.SimpleQueue[tuple[str, Answer | OSError] | Exception | None] = queue.SimpleQueue()

    def run_all() -> None:
        try:
            for file in files:
                waiting.put(file)
        except Exception as error:
            answers.put(error)
        for _ in range(at_once):
            waiting.put(None)

    def work() -> None:
        try:
            while (file := waiting.get()) is not None:
                answer = _answer(ask, file.path) if file.error is None else file.error
                answers.put((file.path, answer))
        except Exception as error:
            answers.put(error)
        answers.put(None)

    for target in (run_all, *[work] * at_once):
        threading.Thread(target=target, daemon=True).start()
    working = at_once
    while working:
        answer = answers.get()
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            working -= 1
        else:
            yield answer


def sizes_of(files: Iterable[File], look: Callable[[str], int], failures: Failures) -> list[tuple[File, int]]:
    """The files that a verb is about, each with its size in bytes; ``look`` gives -1 for others."""
    found = []
    for path, size in ask_each(files, look):
        if isinstance(size, OSError):
            failures.note(path, size)
        elif size >= 0:
            found.append((File(path), size))
    return found


def _answer(ask: Callable[[str], Answer], path: str) -> Answer | OSError:
    try:
        return ask(path)
    except OSError as error:
        return error


def ask_once(path: str, ask: Callable[[str], Answer]) -> Answer:
    """One answer, however long it takes. Raises OSError."""
    [(_, answer)] = ask_each([File(path)], ask, at_once=1)
    if isinstance(answer, OSError):
        raise answer
    return answer


def request(name: str, value: bytes) -> Callable[[str], None]:
    """Sets an attribute of a file."""
    return lambda path: os.setxattr(path, name, value, follow_symlinks=False)


@dataclass
class Failures:
    """Files about which there was no answer. ``doing`` completes "could not be …"."""

    doing: str
    denied: list[str] = field(default_factory=list)
    others: list[tuple[str, str]] = field(default_factory=list)
    """Each with the reason."""

    def note(self, path: str, error: OSError) -> None:
        """Files that have left meanwhile are no failures. Raises NotMounted where the daemon is gone."""
        if error.errno in _DAEMON_GONE:
            raise NotMounted("the daemon has gone meanwhile: kvfs mount serves its pages again")
        if isinstance(error, PermissionError):
            self.denied.append(path)
        elif not has_left(error):
            self.others.append((path, in_words(error)))

    def raise_if_any(self) -> None:
        """Raises NotPermitted or another KvfsError that tells of all of them in one line."""
        if self.denied:
            count = format_count(len(self.denied), "file")
            raise NotPermitted(f"{count} could not be {self.doing} by you: use sudo")
        if self.others:
            path, reason = self.others[0]
            count = format_count(len(self.others), "file")
            more = " first" if len(self.others) > 1 else ""
            raise KvfsError(f"{count} could not be {self.doing}, {shown(path)}{more}: {reason}")


@contextmanager
def progress(doing: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, and nothing elsewhere; what it gives is called for each of ``total`` files."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda: bar.advance(task)
