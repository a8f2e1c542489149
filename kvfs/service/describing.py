"""What is known of pages, and their files on the SSD for those who read past DRAM."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvfs.errors import KvfsError, StalePage
from kvfs.index import STORED, Entry
from kvfs.page import DIGEST
from kvfs.service.messages import ABSENT, DONE, OpenedStored, OpenStored, PageStatus, Stat, Stats
from kvfs.service.replies import Reply, code_of

if TYPE_CHECKING:
    from kvfs.pool import Pool
    from kvfs.service.reading import Reading
    from kvfs.service.session import Session


class Describing:
    """Belongs to the event loop."""

    def __init__(self, pool: Pool, reading: Reading) -> None:
        self._pool = pool
        self._reading = reading

    async def stat(self, request: Stat, session: Session) -> Reply:
        await self._reading.discover(request.keys)
        self._pool.uses.collect()  # hits that the channel counted
        codes: list[int] = []
        pages: list[PageStatus | None] = []
        for entry in session.finder.find(request.keys):
            page, code = None, DONE
            try:
                if isinstance(entry, int):
                    code = entry
                else:
                    page = await self._describe(entry)
            except (KvfsError, OSError) as error:
                code = code_of(error)
            pages.append(page)
            codes.append(code)
        return Reply(Stats(request.number, codes, pages))

    async def _describe(self, entry: Entry) -> PageStatus:
        if entry.parent is None:
            raise StalePage("the page was removed")
        digest = await self._pool.lifetimes.read_attribute(entry, DIGEST)
        tier = "ssd" if entry.state == STORED else self._pool.tier.name
        return PageStatus(
            entry.size, digest.decode(), tier, entry.hits, self._pool.lifetimes.is_pinned(entry)
        )

    async def open_stored(self, request: OpenStored, session: Session) -> Reply:
        """One after the other: each asks the disk."""
        await self._reading.discover(request.keys)
        storage = self._pool.storage
        codes: list[int] = []
        sizes: list[int] = []
        digests: list[str] = []
        descriptors: list[int] = []
        with ExitStack() as undo:
            for entry in session.finder.find_readable(request.keys):
                code, size, digest = entry if isinstance(entry, int) else ABSENT, 0, ""
                if isinstance(entry, Entry) and storage is not None and entry.stored is not None:
                    try:
                        opened = await storage.ask(
                            entry, lambda path: storage.tier.open_page(path, os.O_RDONLY | os.O_DIRECT)
                        )
                    except (KvfsError, OSError) as error:
                        code = code_of(error)
                    else:
                        undo.callback(os.close, opened.fd)
                        descriptors.append(opened.fd)
                        code, size, digest = DONE, opened.status.st_size, opened.digest.format()
                codes.append(code)
                sizes.append(size)
                digests.append(digest)
            undo.pop_all()
        return Reply(OpenedStored(request.number, codes, sizes, digests), descriptors)
