"""Which keys have pages, and the pages' descriptors.

Each request is first tried without waiting, which is how almost all of them are answered. What needs a disk,
a check of bytes or a page that somebody is still making is answered by a task of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from kvfs.errors import KvfsError, TimedOut, TooManyFiles, from_errno
from kvfs.index import SEALED, Directory, Entry
from kvfs.service.finding import Finder
from kvfs.service.messages import (
    ABSENT,
    DONE,
    LONGEST_WAIT,
    Codes,
    Count,
    Exists,
    MatchPrefix,
    Open,
    Opened,
    Touch,
)
from kvfs.service.replies import Reply, code_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvfs.opening import Openings
    from kvfs.pool import Pool
    from kvfs.service.session import Session
    from kvfs.tiers.read_only import ReadOnlyView

SHORTEST_PAUSE = 0.001
LONGEST_PAUSE = 0.02
"""Seconds between two looks for pages that are waited for. A look costs less than a microsecond a key."""
FETCHING = 64
"""Pages that all requests together bring up or have checked at once."""
FETCH_SECONDS = 45.0
"""How long an `Open` may take besides what it was told to wait: the disk has deadlines of its own."""
ATTEMPTS = 3
"""How often a page that came up is brought once more where it left before it was opened."""


class Reading:
    """Answers for all connections; belongs to the event loop."""

    def __init__(self, pool: Pool, openings: Openings, view: ReadOnlyView) -> None:
        self._pool = pool
        self._openings = openings
        self._view = view
        self._fetching = trio.CapacityLimiter(FETCHING)

    @property
    def _knows_all(self) -> bool:
        """Whether the index has every page: not before the SSD has been walked."""
        return self._pool.storage is None or self._pool.storage.walked.is_set()

    # Whether there are pages

    def exists_now(self, request: Exists, session: Session) -> Reply | None:
        reply = self._exists(request, session)
        return None if reply.missed and not self._knows_all else reply

    async def exists(self, request: Exists, session: Session) -> Reply:
        await self.discover(request.keys)
        return self._exists(request, session)

    def _exists(self, request: Exists, session: Session) -> Reply:
        codes = [_code(entry) for entry in session.finder.find(request.keys)]
        missed: Sequence[bytes] = ()
        if ABSENT in codes:
            missed = [key for key, code in zip(request.keys, codes, strict=True) if code == ABSENT]
        return Reply(Codes(request.number, codes), missed=missed)

    def match_prefix_now(self, request: MatchPrefix, session: Session) -> Reply | None:
        reply = self._match_prefix(request, session)
        return None if reply.missed and not self._knows_all else reply

    async def match_prefix(self, request: MatchPrefix, session: Session) -> Reply:
        await self.discover(request.keys)
        return self._match_prefix(request, session)

    def _match_prefix(self, request: MatchPrefix, session: Session) -> Reply:
        for place, entry in enumerate(session.finder.find(request.keys)):
            if isinstance(entry, int):
                key = request.keys[place]
                is_absent = entry == ABSENT
                answer = Count(request.number, place, DONE if is_absent else entry)
                return Reply(answer, missed=[key] if is_absent else ())
        return Reply(Count(request.number, len(request.keys)))

    def touch_now(self, request: Touch, session: Session) -> Reply | None:
        entries = session.finder.find_readable(request.keys)
        if ABSENT in entries and not self._knows_all:
            return None
        used = [entry for entry in entries if isinstance(entry, Entry)]
        return Reply(Codes(request.number, [_code(entry) for entry in entries]), used=used)

    async def touch(self, request: Touch, session: Session) -> Reply:
        await self.discover(request.keys)
        reply = self.touch_now(request, session)
        assert reply is not None
        return reply

    async def discover(self, keys: Iterable[bytes]) -> None:
        """Has the index know what the SSD has under these keys, while that is being walked."""
        storage = self._pool.storage
        if storage is None:
            return
        for key in keys:
            directory: Entry | None = self._pool.index.root
            for name in key.split(b"/"):
                if storage.walked.is_set():
                    return
                if not isinstance(directory, Directory):
                    break
                child = directory.children.get(name)
                directory = child if child is not None else await storage.walk.find(directory, name)

    # Opening pages

    def open_now(self, request: Open, session: Session) -> Reply | None:
        entries = session.finder.find_readable(request.keys)
        can_wait = request.wait_seconds > 0 or not self._knows_all
        for entry in entries:
            if entry.state != SEALED if isinstance(entry, Entry) else can_wait and entry == ABSENT:
                return None
        opened = _Opening(self._pool, self._view, request)
        try:
            for place, entry in enumerate(entries):
                if not opened.settle(place, entry):
                    break
        except BaseException:
            opened.close()
            raise
        return opened.reply()

    async def open(self, request: Open, session: Session) -> Reply:
        opened = _Opening(self._pool, self._view, request)
        wait = min(max(request.wait_seconds, 0.0), LONGEST_WAIT)
        deadline = trio.current_time() + wait
        pause = SHORTEST_PAUSE
        try:
            with trio.move_on_after(wait + FETCH_SECONDS):
                await self.discover(request.keys)
                while await self._open_more(opened, session.finder) and trio.current_time() < deadline:
                    await trio.sleep(min(pause, max(0.0, deadline - trio.current_time())))
                    pause = min(2 * pause, LONGEST_PAUSE)
                    await self.discover(request.keys)
            return opened.reply()
        except BaseException:
            opened.close()
            raise

    async def _open_more(self, opened: _Opening, finder: Finder) -> bool:
        """Opens what there is; says whether a page is still absent."""
        is_absent = False
        fetched: list[int] = []
        places = opened.missing()
        entries = finder.find_readable([opened.keys[place] for place in places])
        for place, entry in zip(places, entries, strict=True):
            if entry == ABSENT:
                is_absent = True
            elif not isinstance(entry, int) and entry.state != SEALED:
                opened.codes[place] = TimedOut.errno  # unless it comes
                fetched.append(place)
            elif not opened.settle(place, entry):
                return False
        if fetched:
            async with trio.open_nursery() as nursery:
                for place in fetched:
                    nursery.start_soon(self._fetch, opened, place, finder)
        return is_absent

    async def _fetch(self, opened: _Opening, place: int, finder: Finder) -> None:
        """Has a page brought up or checked, and opens it before anybody can evict it again."""
        try:
            async with self._fetching:
                for _ in range(ATTEMPTS):
                    [entry] = finder.find_readable([opened.keys[place]])
                    if isinstance(entry, int) or entry.state == SEALED:
                        opened.settle(place, entry)
                        return
                    await self._openings.make_readable(entry)
        except (KvfsError, OSError) as error:
            opened.codes[place] = code_of(error)


def _code(entry: Entry | int) -> int:
    return entry if isinstance(entry, int) else DONE


class _Opening:
    """One `Open` under way. Owns the descriptors until the reply has them."""

    def __init__(self, pool: Pool, view: ReadOnlyView, request: Open) -> None:
        self._pool = pool
        self._view = view
        self._number = request.number
        self.keys = request.keys
        count = len(request.keys)
        self.codes = [ABSENT] * count
        self._pages: dict[int, tuple[int, Entry]] = {}
        """By place, the descriptor and the page."""
        self._end = count
        """The place of the first key for which there was no descriptor left."""

    def missing(self) -> list[int]:
        """The places of the keys that were absent so far."""
        return [place for place in range(self._end) if self.codes[place] == ABSENT]

    def settle(self, place: int, entry: Entry | int) -> bool:
        """Opens a page that is in DRAM, or notes why there is none. False where descriptors have run out:
        then the client is to ask for this key and the rest again."""
        if isinstance(entry, int):
            self.codes[place] = entry
            return True
        key = self.keys[place]
        try:
            try:
                fd = self._view.open(key)
            except OSError:
                fd = self._pool.idle.open(lambda: self._view.open(key))
        except FileNotFoundError:
            self._pool.vanished(entry)
            self.codes[place] = ABSENT
        except OSError as error:
            reason = from_errno(error.errno or 0, "the daemon has as many files open as it may")
            if not isinstance(reason, TooManyFiles):
                self.codes[place] = code_of(error)
            elif place == 0:
                raise reason from None
            else:
                self._end = min(self._end, place)
                return False
        else:
            self.codes[place] = DONE
            self._pages[place] = fd, entry
        return True

    def reply(self) -> Reply:
        """The answer for the keys before ``_end``."""
        codes = self.codes[: self._end]
        sizes = [0] * len(codes)
        descriptors, used, missed = [], [], []
        for place, code in enumerate(codes):
            if code == DONE:
                fd, entry = self._pages.pop(place)
                sizes[place] = entry.size
                descriptors.append(fd)
                used.append(entry)
            elif code == ABSENT:
                missed.append(self.keys[place])
        self.close()
        return Reply(Opened(self._number, codes, sizes), descriptors, used, missed)

    def close(self) -> None:
        Reply(Codes(self._number, []), [self._pages.pop(place)[0] for place in list(self._pages)]).close()
