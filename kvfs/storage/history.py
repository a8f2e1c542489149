"""The SSD follows the mount: what happened to names is done there too, in the same order.

The mount's own calls never wait for the SSD. Each change of a name, and each page that is ready to appear,
becomes a step here; one thread does the steps one after the other. So the tree on the SSD is at all times
what the tree of the mount was a moment ago, less the pages that are not stored yet: a name that is absent
there is no error.

Whoever asks the SSD about a page waits for the steps that concern it, and for no others. Where the SSD does
not do them they hear so at once: a disk that turned read-only still has all that did not move. A step that
the disk has no room for goes after the coldest pages there.
"""

from __future__ import annotations

import errno
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import trio

from kvfs.counters import LimitedLog
from kvfs.errors import NotStorable, TierFailed, means_in_the_way, means_no_room, means_too_large
from kvfs.page import OWNER, Owner
from kvfs.steps import step as pass_step
from kvfs.tiers import ssd_following as following
from kvfs.tiers.ssd_names import prefixes
from kvfs.tiers.ssd_tree import SsdTree

log = logging.getLogger("kvfs.storage.history")

BATCH = 256
"""Steps between two turns of the event loop."""
TURN_SECONDS = 0.5
"""How long they may take together: a slow disk is to be told from one that hangs."""
FIRST_RETRY = 0.1
LAST_RETRY = 30.0
WATCH_SECONDS = 0.25
"""How often it is looked whether the disk still answers, while it is asked."""
LONGEST = 1 << 17
"""Steps that may wait while the SSD does not answer. Beyond, it is given up."""


Done = Callable[[Exception | None], None]


class Step(NamedTuple):
    """One thing to do on the SSD, and whom to tell on the event loop that it was done, or why not. Until then
    ``moves`` and all below them lie elsewhere there, the attributes of ``changes`` are older, and under
    ``vacates`` lies the only file of what has another name already."""

    work: Callable[[], object]
    done: Done | None
    moves: Sequence[bytes] = ()
    changes: Sequence[bytes] = ()
    vacates: Sequence[bytes] = ()


def _is_change(step: Step) -> bool:
    return bool(step.moves or step.changes)


class NoHistory:
    """Of a pool without an SSD tier."""

    def make_directory(self, path: bytes, owner: Owner) -> None: ...

    def remove_directory(self, path: bytes) -> None: ...

    def unlink(self, path: bytes) -> None: ...

    def link(self, old: bytes, new: bytes, *, vacates: Sequence[bytes] = ()) -> None: ...

    def rename(self, old: bytes, new: bytes, flags: int, *, vacates: Sequence[bytes] = ()) -> None: ...

    def set_owner(self, path: bytes, owner: Owner) -> None: ...

    def set_attribute(self, path: bytes, name: str, value: bytes) -> None: ...

    def remove_attribute(self, path: bytes, name: str) -> None: ...

    def set_times(self, path: bytes, access_ns: int, modification_ns: int) -> None: ...

    async def vacated(self, path: bytes) -> None: ...


class History(NoHistory):
    """Steps that wait for the SSD. Belongs to the event loop but for the steps' work."""

    def __init__(
        self,
        tier: SsdTree,
        given_up: Callable[[str], None],
        timeout: Callable[[], float],
        make_room: Callable[[], list[bytes]] = list,
    ) -> None:
        """``given_up`` is told why, when the SSD can never catch up with the mount any more; ``timeout`` says
        in how many seconds it must have done a few steps. ``make_room`` evicts a little where no step that
        waits concerns it, and says under which paths it lay."""
        self._tier = tier
        self._make_room = make_room
        self._given_up = given_up
        self._timeout = timeout
        self._steps: deque[Step] = deque()
        self._moves: Counter[bytes] = Counter()
        """How many steps that wait give each path another meaning, or will."""
        self._changes: Counter[bytes] = Counter()
        """The same for attributes."""
        self._vacates: Counter[bytes] = Counter()
        """The same for paths that have on the SSD the only file of a page with another name."""
        self._changed = trio.Event()
        self._progress = trio.Event()
        """Set, and replaced, whenever steps were done or the SSD failed to."""
        self._log = LimitedLog(log)
        self.failure = ""
        """Why the SSD does not do what it is told; empty while it does."""
        self.is_lost = False
        self._lost = 0
        self._busy_since = math.inf
        """When the batch under way was begun."""
        self._begun = trio.Event()
        self.is_busy = False
        """Whether the thread does steps now; it goes on when the mount has ended meanwhile."""
        self.named: set[bytes] = set()
        """While the SSD is walked, the names whose meaning steps have changed or will: what the walk saw
        there may be as it was before."""
        self._is_walked = False
        self.renames = 0
        """How many renames there were: whoever asks the SSD by a path asks again when one came between."""

    def __len__(self) -> int:
        return len(self._steps)

    def count(self) -> int:
        """How many changes of names and attributes wait, or were lost when the SSD was given up."""
        return self._lost + sum(map(_is_change, self._steps))

    def append(
        self,
        work: Callable[[], object],
        done: Done | None = None,
        *,
        moves: Sequence[bytes] = (),
        changes: Sequence[bytes] = (),
        vacates: Sequence[bytes] = (),
    ) -> None:
        """One more step. An error of the disk is tried again until it passes; any other goes to ``done``.
        Without ``done`` a step is tried again after every error but those that say that the SSD can never
        have what it is about."""
        if self.is_lost:
            self._lost += bool(moves or changes)
            if done is not None:
                done(NotStorable("the SSD tier was given up"))
            return
        if len(self._steps) >= LONGEST:
            self.give_up(f"{LONGEST} changes wait for the SSD tier, which does not answer: {self.failure}")
            self.append(work, done, moves=moves, changes=changes)
            return
        self._steps.append(Step(work, done, moves, changes, vacates))
        self._moves.update(moves)
        self._changes.update(changes)
        self._vacates.update(vacates)
        if not self._is_walked:
            self.named.update(moves)
        self._changed.set()

    def walked(self) -> None:
        """The walk over the SSD is over."""
        self._is_walked = True
        self.named.clear()

    def give_up(self, reason: str) -> None:
        """Nothing is done any more; what waits is told so. Nothing happens the second time."""
        if self.is_lost:
            return
        self.is_lost, self.failure, self._lost = True, reason, self.count()
        while self._steps:
            done = self._take().done
            if done is not None:
                done(NotStorable("the SSD tier was given up"))
        self._tell_progress()
        self._given_up(reason)

    def _take(self) -> Step:
        """The oldest step waits no more."""
        step = self._steps.popleft()
        for counts, paths in (
            (self._moves, step.moves),
            (self._changes, step.changes),
            (self._vacates, step.vacates),
        ):
            for path in paths:
                counts[path] -= 1
                if not counts[path]:
                    del counts[path]
        return step

    def _tell_progress(self) -> None:
        self._progress.set()
        self._progress = trio.Event()

    # What happens to names

    def make_directory(self, path: bytes, owner: Owner) -> None:
        attributes = {OWNER: owner.format().encode()}
        self.append(lambda: following.mkdir(self._tier, path, attributes), moves=(path,))

    def remove_directory(self, path: bytes) -> None:
        self.append(lambda: following.rmdir(self._tier, path), moves=(path,))

    def unlink(self, path: bytes) -> None:
        self.append(lambda: following.unlink(self._tier, path), moves=(path,))

    def link(self, old: bytes, new: bytes, *, vacates: Sequence[bytes] = ()) -> None:
        self.append(lambda: following.link(self._tier, old, new), moves=(new,), vacates=vacates)

    def rename(self, old: bytes, new: bytes, flags: int, *, vacates: Sequence[bytes] = ()) -> None:
        """``vacates``: which of the names have on the SSD the only file of a page."""
        self.renames += 1
        work = partial(following.rename, self._tier, old, new, flags)
        self.append(work, moves=(old, new), vacates=vacates)

    def set_owner(self, path: bytes, owner: Owner) -> None:
        self.set_attribute(path, OWNER, owner.format().encode())

    def set_attribute(self, path: bytes, name: str, value: bytes) -> None:
        self.append(lambda: following.set_attribute(self._tier, path, name, value), changes=(path,))

    def remove_attribute(self, path: bytes, name: str) -> None:
        self.append(lambda: following.remove_attribute(self._tier, path, name), changes=(path,))

    def set_times(self, path: bytes, access_ns: int, modification_ns: int) -> None:
        self.append(lambda: _set_times(self._tier, path, access_ns, modification_ns))

    # Doing it

    async def settled(self) -> None:
        """Waits until everything that was appended has been done, however long the SSD fails to."""
        while self._steps:
            await self._progress.wait()

    async def wait_for(self, is_done: Callable[[], bool]) -> None:
        """Waits for what steps bring about. Raises TierFailed while the SSD does not do them."""
        while not is_done():
            if self.failure:
                raise TierFailed(f"the SSD tier does not follow the mount: {self.failure}")
            await self._progress.wait()

    async def progress(self, deadline: float) -> bool:
        """Waits until some steps were done, until a time of trio's clock; says whether there were any to wait
        for, and that the SSD does them."""
        if not self._steps or self.failure:
            return False
        with trio.move_on_at(deadline):
            await self._progress.wait()
            return True
        return False

    async def caught_up(self) -> None:
        """Waits as `settled`, and raises as `wait_for`."""
        await self.wait_for(lambda: not self._steps)

    async def followed(self, path: bytes) -> None:
        """Waits until a path means the same on the SSD as in the mount, and raises as `wait_for`."""
        await self.wait_for(lambda: not self.concerns(path))

    async def vacated(self, path: bytes) -> None:
        """Waits until a name can be given to something in DRAM, and raises as `wait_for`. While the SSD has
        under it what the mount has elsewhere, a daemon that is killed would leave two pages of one name, and
        the next would drop that of the SSD. A directory brings all the names below it."""
        below = path + b"/"
        await self.wait_for(lambda: not any(one == path or one.startswith(below) for one in self._vacates))

    def concerns(self, path: bytes) -> bool:
        """Whether steps that wait have to do with what a path means."""
        if not self._steps:
            return False
        return path in self._changes or any(prefix in self._moves for prefix in prefixes(path))

    async def run(self) -> None:
        """Does the steps for as long as the mount serves."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            await self._follow()

    async def _follow(self) -> None:
        pause, is_urgent = FIRST_RETRY, True
        while True:
            if not self._steps:
                self._changed = trio.Event()
                await self._changed.wait()
            batch = [self._steps[place] for place in range(min(BATCH, len(self._steps)))]
            finished, failure = await self._do_in_time(batch)
            if self.is_lost:
                continue
            for step, error in finished:
                self._take()
                if step.done is not None:
                    step.done(error)
                elif error is not None:
                    self._log.warning("step", f"the SSD tier can never have a name or an attribute: {error}")
            if failure is None:
                pause, is_urgent, self.failure = FIRST_RETRY, True, ""
                self._tell_progress()
                continue
            if means_no_room(failure) and self._evict_first() and is_urgent:
                is_urgent = False
                continue
            self.failure = failure.strerror or str(failure)
            self._tell_progress()
            self._log.warning("failed", f"the SSD tier does not follow: {self.failure}")
            await trio.sleep(pause)
            pause = min(pause * 2, LAST_RETRY)

    def _evict_first(self) -> bool:
        """Room for the oldest step: what is evicted for it leaves the disk before that is tried again. Says
        whether there was anything."""
        paths = self._make_room()
        for path in paths:
            self._moves[path] += 1
            self._steps.appendleft(Step(partial(following.unlink, self._tier, path), None, (path,)))
        return bool(paths)

    async def _do_in_time(
        self, steps: list[Step]
    ) -> tuple[list[tuple[Step, Exception | None]], OSError | None]:
        """Does steps in a thread; `_watch` says so when that does not come back."""
        self._busy_since = trio.current_time()
        self._begun.set()
        try:
            return await trio.to_thread.run_sync(self._do, steps, abandon_on_cancel=True)
        finally:
            self._busy_since = math.inf

    async def _watch(self) -> None:
        """Says that the SSD does not follow, once for each batch that does not come back in time. One task
        for all of them: to start one costs more than most batches."""
        said = math.inf
        while True:
            await self._begun.wait()
            seconds, since = self._timeout(), self._busy_since
            if since == math.inf:
                self._begun = trio.Event()
                continue
            if since != said and trio.current_time() >= since + seconds:
                said = since
                if not self.is_lost:
                    self.failure = f"it did not answer within {seconds:g} s"
                    self._log.warning("failed", f"the SSD tier does not follow: {self.failure}")
                    self._tell_progress()
            await trio.sleep(min(seconds, WATCH_SECONDS))

    def _do(self, steps: list[Step]) -> tuple[list[tuple[Step, Exception | None]], OSError | None]:
        """In the thread: does the steps up to the first at which the disk fails; returns those, each with its
        error, and why."""
        self.is_busy = True
        try:
            return _do(steps)
        finally:
            self.is_busy = False


_OF_THE_DISK = frozenset((errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ETIMEDOUT))
_NEVER = frozenset((errno.ENOENT, errno.EMLINK, errno.EINVAL, errno.ENODATA, errno.EOPNOTSUPP))
"""Removed by somebody; more links than the filesystem has; a name, or an attribute, that it cannot have."""


def _set_times(tier: SsdTree, path: bytes, access_ns: int, modification_ns: int) -> None:
    with suppress(FileNotFoundError):
        tier.utime(path, (access_ns, modification_ns))


def _passes(step: Step, error: OSError) -> bool:
    """Whether a step is to be tried again after an error."""
    if step.done is not None:
        return error.errno in _OF_THE_DISK
    return not (error.errno in _NEVER or means_in_the_way(error) or means_too_large(error))


def _do(steps: list[Step]) -> tuple[list[tuple[Step, Exception | None]], OSError | None]:
    finished: list[tuple[Step, Exception | None]] = []
    enough = time.monotonic() + TURN_SECONDS
    for step in steps:
        if finished and time.monotonic() > enough:
            break
        try:
            pass_step("history.begun")
            step.work()
            pass_step("history.done")
        except OSError as error:
            if _passes(step, error):
                return finished, error
            finished.append((step, error))
        except Exception as error:
            finished.append((step, error))
        else:
            finished.append((step, None))
    return finished, None
