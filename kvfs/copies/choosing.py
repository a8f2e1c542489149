"""Which way pages move between the SSD and DRAM: the one asked for, or the next that works here.

A way that fails by its own fault, and not by that of the disk, is given up for good. Whose fault it was shows
when the next way is asked to do the same.
"""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvfs.copies import trial
from kvfs.copies.copier import Copier, is_direct
from kvfs.copies.cufile import CUFILE, GPU_DIRECT_STORAGE
from kvfs.copies.direct import DIRECT, DirectCopier
from kvfs.copies.uring import URING
from kvfs.errors import KvfsError, Unavailable, means_forbidden, means_unsupported
from kvfs.interleaved import Work, at_once, finish
from kvfs.page import Digest

log = logging.getLogger("kvfs.copies")

AUTO: Final = "auto"
READ_PATHS: Final = (AUTO, CUFILE, URING, DIRECT)
"""What ``--ssd-read-path`` takes. The ways among them are tried in this order."""


@dataclass(frozen=True, slots=True)
class CopiesStatistics:
    """``path`` is the way in use, one of READ_PATHS, and ``mode`` what else is to be known of it.
    ``degraded``: another one was wanted; ``reason`` says why it is not used."""

    path: str
    mode: str
    degraded: bool
    reason: str


class _CachedCopier(DirectCopier):
    """The last resort, where a filesystem refuses what it took before: through the page cache."""

    @property
    def mode(self) -> str:
        return "page cache"

    def read(self, source_fd: int, target_fd: int, size: int) -> Digest:
        if is_direct(source_fd):
            fcntl.fcntl(source_fd, fcntl.F_SETFL, fcntl.fcntl(source_fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        return super().read(source_fd, target_fd, size)


class Copies:
    """Moves pages, by the first of some ways that works. May be used by several threads at once."""

    def __init__(self, paths: Sequence[str], directory: int, *, direct: bool = True) -> None:
        """``paths`` are tried in this order, each when it is needed, in a directory of the SSD of which this
        keeps a descriptor of its own; past the page cache where ``direct``."""
        self._directory = os.dup(directory)
        self._direct = direct
        self._lock = threading.Lock()
        self._reasons: list[str] = []
        self._untried = self._open(paths)
        self._copiers: list[Copier] = [next(self._untried)]
        self._current = 0

    def _open(self, paths: Sequence[str]) -> Iterator[Copier]:
        """The ways that work, each tried when it is asked for."""
        for path in paths:
            if path == DIRECT:
                continue
            try:
                trial.try_in_child(path, self._directory, direct=self._direct)
                copier = trial.make(path)
            except (Unavailable, OSError) as error:
                self._note(f"{path} cannot be used: {error}")
            else:
                yield copier
        yield DirectCopier()
        yield _CachedCopier()

    def _note(self, reason: str) -> None:
        self._reasons.append(reason)
        log.warning("SSD: %s", reason)

    def statistics(self) -> CopiesStatistics:
        current = self._copiers[self._current]
        return CopiesStatistics(current.name, current.mode, bool(self._reasons), "; ".join(self._reasons))

    def read(self, source_fd: int, target_fd: int, size: int) -> Digest:
        """See ``Copier.read``."""
        return finish(self._move(lambda copier: at_once(copier.read)(source_fd, target_fd, size)))

    def write(self, source_fd: int, target_fd: int, size: int, *, idle: bool = False) -> Work[Digest]:
        """See ``Copier.write``."""
        return self._move(lambda copier: copier.write(source_fd, target_fd, size, idle=idle))

    def _move(self, move: Callable[[Copier], Work[Digest]]) -> Work[Digest]:
        number, failure = self._current, None
        while True:
            try:
                digest = yield from move(self._copiers[number])
            except Exception as error:
                if not _is_its_own_fault(error) or not self._has(number + 1):
                    raise
                number, failure = number + 1, error
            else:
                if failure is not None:
                    self._give_up(number, failure)
                return digest

    def _has(self, number: int) -> bool:
        """Whether there is another way; opens it."""
        with self._lock:
            if number == len(self._copiers) and (copier := next(self._untried, None)) is not None:
                self._copiers.append(copier)
            return number < len(self._copiers)

    def _give_up(self, number: int, failure: Exception) -> None:
        """From now on a later way is used. Those who still use an earlier one may end what they do."""
        with self._lock:
            if number > self._current:
                self._note(f"{self._copiers[self._current].name} is not used any more: {failure}")
                self._current = number

    def close(self) -> None:
        """Lets go of all ways. Nothing may be under way."""
        for copier in self._copiers:
            copier.close()
        os.close(self._directory)


def _is_its_own_fault(error: Exception) -> bool:
    """Whether a way failed for a reason that another one may not have."""
    if isinstance(error, OSError):
        return means_unsupported(error) or means_forbidden(error)
    return isinstance(error, Unavailable) or not isinstance(error, (KvfsError, MemoryError))


def _is_promising(path: str) -> bool:
    """Whether a way is worth trying where nobody asked for it; costs next to nothing."""
    if path == CUFILE:
        return os.path.exists(GPU_DIRECT_STORAGE) and importlib.util.find_spec("kvikio") is not None
    return path == DIRECT or importlib.util.find_spec("liburing") is not None


def choose(read_path: str, directory: int, *, direct: bool = True) -> Copies:
    """The way that ``read_path``, one of READ_PATHS, asks for, or the next one that works in a directory of
    the SSD, given by its descriptor; past the page cache where ``direct``.

    Blocks: next to nothing is tried for "direct", and another process for each other way. It writes a few
    blocks to a file that has no name. Never fails; what could not be had is one line in the log each, and in
    ``statistics``.
    """
    if read_path == AUTO:
        paths = [path for path in READ_PATHS[1:] if _is_promising(path)]
    else:
        first, *others = READ_PATHS[READ_PATHS.index(read_path) :]
        paths = [first, *filter(_is_promising, others)]
    return Copies(paths, directory, direct=direct)
