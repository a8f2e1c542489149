"""What clients ask to be done with pages that are there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfs.errors import KvfsError
from kvfs.leaving import let_go
from kvfs.service.finding import FORBIDDEN, split
from kvfs.service.messages import ABSENT, DONE, Codes, Delete, Pin, Prefetch
from kvfs.service.peers import SEARCH, WRITE
from kvfs.service.replies import Reply, code_of

if TYPE_CHECKING:
    from kvfs.pool import Pool
    from kvfs.service.prefetching import Prefetches
    from kvfs.service.reading import Reading
    from kvfs.service.session import Session


class Changing:
    """Belongs to the event loop."""

    def __init__(self, pool: Pool, reading: Reading, prefetches: Prefetches) -> None:
        self._pool = pool
        self._reading = reading
        self._prefetches = prefetches

    async def prefetch(self, request: Prefetch, session: Session) -> Reply:
        await self._reading.discover(request.keys)
        found = session.finder.find_readable(request.keys)
        codes = [one if isinstance(one, int) else self._prefetches.add(one) for one in found]
        return Reply(Codes(request.number, codes))

    async def pin(self, request: Pin, session: Session) -> Reply:
        await self._reading.discover(request.keys)
        codes = [await self._pin(key, session, request.pinned) for key in request.keys]
        return Reply(Codes(request.number, codes))

    async def _pin(self, key: bytes, session: Session, pinned: bool) -> int:
        [entry] = session.finder.find([key])
        if isinstance(entry, int):
            return entry
        if session.peer.uid not in (0, entry.owner.uid):
            return FORBIDDEN
        try:
            if pinned:
                await self._pool.lifetimes.pin(entry)
            else:
                self._pool.lifetimes.unpin(entry)
        except (KvfsError, OSError) as error:
            return code_of(error)
        return DONE

    async def delete(self, request: Delete, session: Session) -> Reply:
        await self._reading.discover(request.keys)
        codes = []
        for key in request.keys:
            try:
                codes.append(await self._delete(key, session))
            except (KvfsError, OSError) as error:
                codes.append(code_of(error))
        await self._pool.face.told()
        return Reply(Codes(request.number, codes))

    async def _delete(self, key: bytes, session: Session) -> int:
        """As unlink(2) would, of a file only."""
        pool, peer = self._pool, session.peer
        path, name = split(key)
        while True:
            directory = session.finder.directory(path)
            if isinstance(directory, int):
                return directory
            entry = directory.children.get(name)
            if entry is None or not entry.is_file:
                return ABSENT
            if not peer.may(directory.owner, WRITE | SEARCH) or not peer.may_replace(directory, entry):
                return FORBIDDEN
            storage = pool.storage
            if storage is None or entry.stored is None or storage.walked.is_set():
                break
            await storage.walked.wait()
        fd = pool.names.unlink(directory, name)
        pool.face.invalidate(directory.number, name)
        await let_go(fd)
        return DONE
