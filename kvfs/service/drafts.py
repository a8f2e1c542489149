"""New pages: drafts that only their client knows, and the batch commit that gives them names."""

from __future__ import annotations

import fcntl
import os
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from kvfs.errors import (
    FileTooLarge,
    KvfsError,
    OutOfRoom,
    PageInUse,
    UsageError,
    means_no_room,
)
from kvfs.holding import Holding
from kvfs.index import DRAFT
from kvfs.leaving import MUCH_FREED
from kvfs.opening import INLINE_ALLOCATION
from kvfs.page import DIGEST, OWNER
from kvfs.sealing import lease_is_free
from kvfs.service.messages import ABSENT, DONE, Abort, Codes, Commit, Create, Created
from kvfs.service.places import Place, Places
from kvfs.service.replies import Reply, code_of
from kvfs.sizes import format_size
from kvfs.steps import step
from kvfs.syscalls import fallocate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvfs.opening import Openings
    from kvfs.pool import Pool
    from kvfs.sealing import Examined
    from kvfs.service.session import Session

ATTEMPTS = 8
"""How often room is made for drafts that writers take before it is used."""


@dataclass(slots=True, eq=False)
class Draft:
    """A file of ``size`` bytes under a name of our own, which no listing shows. ``fd`` is for reading: the
    kernel tells by it whether anybody can still write the file."""

    path: bytes
    fd: int
    size: int
    write_fd: int = -1
    """The client's, until it is sent."""
    is_claimed: bool = False
    """Whether it is being committed."""


class Drafts:
    """The drafts of all connections; belongs to the event loop. Together they take at most half of the
    pool."""

    def __init__(self, pool: Pool, openings: Openings) -> None:
        self._pool = pool
        self._openings = openings
        self._places = Places(pool)
        self._threads = trio.CapacityLimiter(2)
        self._serial = 0
        self.count = 0
        self.bytes = 0

    # Making drafts

    def create_now(self, request: Create, session: Session) -> Reply | None:
        """Where there is room already, and little to allocate."""
        total = self._require_sizes(request.sizes)
        room = self._pool.tier.room()
        if total > INLINE_ALLOCATION or total + room.block_size > room.free_bytes:
            return None
        with ExitStack() as undo:
            try:
                made = self._make(request.sizes, undo)
                self._allocate(made)
            except OSError as error:
                if means_no_room(error):
                    return None
                raise
            undo.pop_all()
        return self._created(request, session, made)

    async def create(self, request: Create, session: Session) -> Reply:
        """Makes room first, and allocates in a thread."""
        for _ in range(ATTEMPTS):
            await self._pool.evictor.require(self._require_sizes(request.sizes))
            self._require_sizes(request.sizes)  # others may have made drafts meanwhile
            with ExitStack() as undo:
                try:
                    made = self._make(request.sizes, undo)
                    await trio.to_thread.run_sync(self._allocate, made, limiter=self._threads)
                except OSError as error:
                    if not means_no_room(error):
                        raise
                else:
                    undo.pop_all()
                    return self._created(request, session, made)
            await self._pool.evictor.for_a_name()
        raise OutOfRoom("the pool has no room for the drafts: writers take it as soon as it is made")

    def _require_sizes(self, sizes: Sequence[int]) -> int:
        """Their sum. Raises UsageError, FileTooLarge, and OutOfRoom beyond what all drafts may take."""
        if not sizes or min(sizes) < 1:
            raise UsageError("a draft has at least one byte")
        limit = self._openings.file_limit
        if max(sizes) > limit:
            raise FileTooLarge(f"a file may have at most half of the pool, {format_size(limit)}")
        total = sum(sizes)
        if self.bytes + total > limit:
            raise OutOfRoom(
                f"drafts of batches take at most half of the pool, {format_size(limit)}, of which "
                f"{format_size(self.bytes)} are taken: commit or abort some first"
            )
        return total

    def _make(self, sizes: Sequence[int], undo: ExitStack) -> list[Draft]:
        """Empty files, whose bytes count already; ``undo`` gets what takes them away again."""
        made = []
        for size in sizes:
            path, write_fd = self._create_file()
            undo.callback(self._discard, path, size)
            undo.callback(os.close, write_fd)
            self.count += 1
            self.bytes += size
            read_fd = self._pool.idle.open(partial(self._pool.tier.open, path, os.O_RDONLY))
            undo.callback(os.close, read_fd)
            made.append(Draft(path, read_fd, size, write_fd))
        self._pool.evictor.kick()
        return made

    def _create_file(self) -> tuple[bytes, int]:
        while True:
            self._serial += 1
            path = b".kvfs-batch-%d" % self._serial
            with suppress(FileExistsError), self._unseen():
                return path, self._pool.idle.open(partial(self._pool.tier.create, path))

    def _unseen(self) -> AbstractContextManager[None]:
        """Around what becomes of drafts in the root of the tier."""
        return self._pool.directories.unseen(self._pool.index.root)

    def _allocate(self, made: Sequence[Draft]) -> None:
        """The sizes first, so that the files get hugepages."""
        for draft in made:
            os.ftruncate(draft.write_fd, draft.size)
            with self._pool.tier.growing(draft.size):
                fallocate(draft.write_fd, 0, 0, draft.size)

    def _created(self, request: Create, session: Session, made: Sequence[Draft]) -> Reply:
        """The client gets the descriptors for writing, and nobody else keeps one."""
        numbers = [next(session.numbers) for _ in made]
        session.drafts.update(zip(numbers, made, strict=True))
        descriptors = []
        for draft in made:
            descriptors.append(draft.write_fd)
            draft.write_fd = -1
        return Reply(Created(request.number, numbers), descriptors)

    # Drafts that go

    def abort_now(self, request: Abort, session: Session) -> Reply:
        codes = []
        for number in request.drafts:
            draft = session.drafts.get(number)
            if draft is None:
                codes.append(ABSENT)
            elif draft.is_claimed:
                codes.append(PageInUse.errno)
            else:
                self._forget(session, number)
                codes.append(DONE)
        return Reply(Codes(request.number, codes))

    def ended(self, session: Session) -> None:
        """The client has gone, and leaves nothing."""
        for number in list(session.drafts):
            self._forget(session, number)

    def _forget(self, session: Session, number: int) -> None:
        draft = session.drafts.pop(number)
        self._discard(draft.path, draft.size)
        self._close(draft.fd, draft.size)

    def _discard(self, path: bytes, size: int) -> None:
        self.count -= 1
        self.bytes -= size
        with suppress(FileNotFoundError), self._unseen():
            self._pool.tier.unlink(path)

    def _close(self, fd: int, size: int) -> None:
        """Gives the memory back, in a thread where it is much."""
        if size > MUCH_FREED:
            trio.lowlevel.spawn_system_task(trio.to_thread.run_sync, os.close, fd)
        else:
            os.close(fd)

    # Committing

    async def commit(self, request: Commit, session: Session) -> Reply:
        """All drafts of the request become pages in one turn of the loop, or none does."""
        drafts = self._claim(request, session)
        try:
            codes = await self._commit(request, drafts, session)
        finally:
            for draft in drafts:
                draft.is_claimed = False
        await self._pool.face.told()
        return Reply(Codes(request.number, codes))

    def _claim(self, request: Commit, session: Session) -> list[Draft]:
        if len(request.drafts) != len(request.keys):
            raise UsageError(f"{len(request.drafts)} drafts for {len(request.keys)} keys")
        if len(set(request.drafts)) != len(request.drafts) or len(set(request.keys)) != len(request.keys):
            raise UsageError("a draft or a key is named twice")
        drafts = [session.drafts.get(number) for number in request.drafts]
        claimed = [draft for draft in drafts if draft is not None and not draft.is_claimed]
        if len(claimed) != len(drafts):
            raise UsageError("a draft is not this connection's, or gone, or being committed")
        for draft in claimed:
            draft.is_claimed = True
        return claimed

    async def _commit(self, request: Commit, drafts: Sequence[Draft], session: Session) -> list[int]:
        codes = [_code_of_draft(draft) for draft in drafts]
        if any(codes):
            return _none_done(codes)
        places = [await self._places.prepare(key, session.peer, request.mode) for key in request.keys]
        codes = [place if isinstance(place, int) else DONE for place in places]
        if any(codes):
            return _none_done(codes)
        examined = await self._pool.sealer.examine([(draft.fd, draft.size) for draft in drafts])
        # From here on nothing waits: who looks sees all of them, or none.
        ready = [place for place in places if isinstance(place, Place)]
        codes = [self._places.check(place, session.peer) for place in ready]
        if any(codes):
            return _none_done(codes)
        for position, (draft, place, one) in enumerate(zip(drafts, ready, examined, strict=True)):
            try:
                self._publish(draft, place, one)
            except (KvfsError, OSError) as error:
                codes[position] = code_of(error)
            else:
                del session.drafts[request.drafts[position]]
        return codes

    def _publish(self, draft: Draft, place: Place, examined: Examined) -> None:
        """A draft gets its name, in the place of what has it, and is a page from then on. Its digest comes
        first, so that a daemon that is killed leaves the old page or the new one."""
        pool = self._pool
        tier, root = pool.tier, pool.index.root
        tier.set_attribute(draft.fd, OWNER, place.owner.format().encode())
        tier.set_attribute(draft.fd, DIGEST, examined.digest.format().encode())
        step("commit.described")
        parent, name = place.parent, place.name
        with nullcontext() if parent is root else self._unseen():
            entry = pool.index.add(root, draft.path, place.owner, DRAFT)
            entry.holding = Holding(draft.fd)
            entry.holding.sized = True
            try:
                replaced_fd = pool.names.rename(root, draft.path, parent, name, 0)
            except BaseException:
                entry.holding = None
                pool.index.drop(pool.index.remove(root, draft.path))
                raise
        step("commit.named")
        self.count -= 1
        self.bytes -= draft.size
        pool.sealer.store(entry, entry.holding, examined, sparse=False)
        pool.face.invalidate(parent.number, name)
        pool.settle(entry)
        if replaced_fd >= 0:
            self._close(replaced_fd, draft.size)

    def statistics(self) -> dict[str, Any]:
        """For status."""
        return {"drafts": self.count, "draft_bytes": self.bytes}


def _code_of_draft(draft: Draft) -> int:
    """Why a draft cannot be a page now; 0 if it can."""
    if not lease_is_free(draft.fd, fcntl.F_RDLCK):
        return PageInUse.errno
    return DONE if os.fstat(draft.fd).st_size == draft.size else UsageError.errno


def _none_done(codes: list[int]) -> list[int]:
    """Where one draft cannot be committed, none is: the others have its code."""
    first = next(filter(None, codes))
    return [code or first for code in codes]
