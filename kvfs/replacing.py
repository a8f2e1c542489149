"""A new draft under the names of a page, where a writer comes while readers hold the page."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import TYPE_CHECKING

import trio

from kvfs.errors import StalePage
from kvfs.holding import Holding
from kvfs.index import DRAFT, Directory, Entry
from kvfs.page import DIGEST, OWNER, SPARSE
from kvfs.syscalls import fallocate

if TYPE_CHECKING:
    from kvfs.pool import Pool

COPY_CHUNK = 8 << 20


class Replacements:
    """Gives the names of pages to new files, and makes files that have no name of a user's yet."""

    def __init__(
        self, pool: Pool, threads: trio.CapacityLimiter, note: Callable[[Entry, Entry], None]
    ) -> None:
        """``note`` is told of a page and of the draft that took its names, as soon as it has them. Bytes are
        copied in the threads that ``threads`` allows."""
        self._pool = pool
        self._threads = threads
        self._note = note
        self._serial = 0

    async def replace(self, entry: Entry, truncate: bool) -> None:
        """Puts a new draft under every name of a page that readers hold."""
        pool = self._pool
        with ExitStack() as stack:
            old_fd = os.dup(pool.hold(entry).read_fd)
            stack.callback(os.close, old_fd)
            temporary, new_fd = self.create_temporary()
            stack.callback(os.close, new_fd)
            stack.callback(self.remove_if_there, temporary)
            if not truncate:
                size = os.fstat(old_fd).st_size
                await pool.evictor.require(size)
                await trio.to_thread.run_sync(_copy, old_fd, new_fd, size, limiter=self._threads)
            for name in pool.tier.list_attributes(old_fd):
                if name not in (DIGEST, OWNER, SPARSE):
                    pool.tier.set_attribute(new_fd, name, pool.tier.get_attribute(old_fd, name))
            if entry.parent is None:
                raise StalePage("the page was removed meanwhile")
            with self._unseen(*(parent for parent, _ in entry.names())):
                self._take_names(entry, temporary, stack)

    def create_temporary(self) -> tuple[bytes, int]:
        """A new file whose name no user has taken, and its descriptor."""
        while True:
            self._serial += 1
            temporary = b".kvfs-draft-%d" % self._serial
            with suppress(FileExistsError), self._unseen():
                return temporary, self._pool.tier.create(temporary)

    def remove_if_there(self, temporary: bytes) -> None:
        with suppress(FileNotFoundError), self._unseen():  # as a rule it has the name of a page by now
            self._pool.tier.unlink(temporary)

    def _unseen(self, *parents: Directory) -> AbstractContextManager[None]:
        """Around what becomes of temporaries."""
        return self._pool.directories.unseen(self._pool.index.root, *parents)

    def _take_names(self, entry: Entry, temporary: bytes, stack: ExitStack) -> None:
        """Gives every name of a page to the file ``temporary``: on the tier, in the index, in the kernel.

        What can fail comes before the first name is taken.
        """
        pool = self._pool
        names = entry.names()
        paths = [parent.child_path(name) for parent, name in names]
        sources = [temporary]
        for number, path in enumerate(paths):
            pool.tier.stat(path)
            if number:
                sources.append(b"%b-%d" % (temporary, number))
                pool.tier.link(temporary, sources[-1])
                stack.callback(self.remove_if_there, sources[-1])
        holding = Holding(pool.tier.open(temporary, os.O_RDONLY))
        try:
            for path, source in zip(paths, sources, strict=True):
                pool.tier.rename(source, path)
        except OSError:
            os.close(holding.read_fd)
            raise
        # Who looks the name up to read it and finds it replaced twice opens this one all the same.
        pool.hold(entry).until_forgotten = True
        pool.abandon(entry, names)
        (parent, name), further_names = names[0], names[1:]
        draft = pool.index.add(parent, name, entry.owner, DRAFT)
        for further_parent, further_name in further_names:
            pool.index.add_link(draft, further_parent, further_name)
        for any_parent, any_name in names:
            pool.face.invalidate(any_parent.number, any_name)
        draft.holding = holding
        self._note(entry, draft)
        holding.sized = True  # what the page had as holes, its copy has
        holding.kept_if_empty = False
        pool.drafts.add(draft)
        pool.face.publish(draft)
        pool.sealer.schedule(draft)


def _copy(source: int, target: int, size: int) -> None:
    """In a thread: copies a page into the draft that replaces it. StalePage when it became shorter."""
    os.ftruncate(target, size)
    fallocate(target, 0, 0, size)
    offset = 0
    while offset < size:
        copied = os.copy_file_range(source, target, min(COPY_CHUNK, size - offset), offset, offset)
        if not copied:
            raise StalePage("the page was removed and shortened meanwhile")
        offset += copied
