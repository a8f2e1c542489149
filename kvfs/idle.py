"""Which pages can be opened without the daemon, and what that costs: descriptors and backing ids."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

from kvfs.errors import AttributeMissing
from kvfs.holding import Face, Holding, NoFace, close
from kvfs.index import Entry
from kvfs.page import SPARSE
from kvfs.tiers.base import Tier

READY_LIMIT = 1 << 18
PORTION = 256
"""Descriptors given up at a time where they have run out. Closing one takes some microseconds of the event
loop, and there may be more than a hundred thousand."""


class IdlePages:
    """Sealed pages that nobody uses but that can be opened without the daemon.

    Up to ``limit`` of them keep their descriptor, the hottest ones. Beyond, a page keeps its backing id
    alone, and the channel a description of its file: a few hundred bytes of the kernel's, and no descriptor.
    Where there are no ids, since the kernel has no passthrough, ``limit_without_ids`` pages keep theirs.
    """

    def __init__(self, tier: Tier, limit: int, limit_without_ids: int) -> None:
        self.face: Face = NoFace()
        self.limit = limit
        self.limit_without_ids = limit_without_ids
        self.ready = 0
        """Pages with a backing id and no descriptor."""
        self._tier = tier
        self._idle: OrderedDict[Entry, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def add(self, entry: Entry) -> None:
        """Keeps an entry ready; takes the descriptors of the coldest ones beyond the limit."""
        self._idle[entry] = None
        self._idle.move_to_end(entry)
        holding = entry.holding
        has_id = holding is not None and holding.backing_id > 0
        limit = self.limit if has_id else self.limit_without_ids
        self._give_up(len(self._idle) - limit, attempts=8)

    def give_up_descriptors(self) -> None:
        """Closes up to ``PORTION`` descriptors that nobody uses now, those of the coldest pages."""
        self._give_up(PORTION, attempts=len(self._idle))

    def _give_up(self, count: int, attempts: int) -> None:
        """Takes the descriptors of the ``count`` coldest pages that no program has open. ``attempts`` bounds
        how many pages are looked at; those that a program has open count as hot from now on."""
        while count > 0 and attempts > 0:
            attempts -= 1
            coldest = next(iter(self._idle))
            if self.face.withdraw(coldest):
                self.face.publish(coldest)
                self._idle.move_to_end(coldest)
            else:
                count -= 1
                self.discard(coldest)
                self._let_go(coldest)

    def _let_go(self, entry: Entry) -> None:
        holding = entry.holding
        assert holding is not None
        if holding.backing_id <= 0 or self.ready >= READY_LIMIT:
            close(entry, self.face)
            return
        entry.ready_id, entry.holding = holding.backing_id, None
        self.ready += 1
        self.face.describe(entry, os.fstat(holding.read_fd))
        self.face.publish(entry)  # first: the channel looks at the descriptor until it is told otherwise
        os.close(holding.read_fd)

    def changed(self, entry: Entry) -> None:
        """Something other than its bytes changed of a file: the channel cannot see that of one without a
        descriptor."""
        if entry.ready_id and entry.parent is not None:
            with suppress(FileNotFoundError):  # whoever opens it finds that out
                self.face.describe(entry, self._tier.stat(entry.path()))
                self.face.publish(entry)

    def _take_ready_id(self, entry: Entry) -> int:
        """The id of a page that gets a descriptor again, or loses its name; 0 if it has none."""
        backing_id, entry.ready_id = entry.ready_id, 0
        self.ready -= bool(backing_id)
        return backing_id

    def touch(self, entry: Entry) -> None:
        if entry in self._idle:
            self._idle.move_to_end(entry)

    def discard(self, entry: Entry) -> None:
        self._idle.pop(entry, None)

    # Opening

    def open(self, open_file: Callable[[], int]) -> int:
        """Opens a file; where descriptors have run out, some that nobody uses now are given up first."""
        try:
            return open_file()
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
        self.give_up_descriptors()
        return open_file()

    def hold(self, entry: Entry) -> Holding:
        """The holding of an entry that has a name, opened if need be. FileNotFoundError if it vanished."""
        if entry.holding is None:
            holding = Holding(self.open(lambda: self._tier.open(entry.path(), os.O_RDONLY)))
            holding.backing_id = self._take_ready_id(entry)
            entry.holding = holding
            holding.sized = self._is_sparse(holding.read_fd)
        return entry.holding

    def _is_sparse(self, fd: int) -> bool:
        try:
            return bool(self._tier.get_attribute(fd, SPARSE))
        except AttributeMissing:
            return False

    def secure(self, entry: Entry) -> None:
        """Before a name goes: a page without a descriptor gets one if somebody has it open, whose fstat still
        has to be answered; if nobody has, its id goes."""
        if not entry.ready_id or self.release_ready(entry):
            return
        try:
            self.hold(entry)
            self.face.publish(entry)
            self.add(entry)  # it may have another name, and stay
        except FileNotFoundError:  # vanished: nothing can be told of it
            self.face.release(entry, self._take_ready_id(entry))

    def forget(self, entry: Entry) -> None:
        """The kernel knows nothing more of an entry without a name: a ready id that was still open goes."""
        if entry.ready_id:
            self.face.release(entry, self._take_ready_id(entry))

    def release_ready(self, entry: Entry) -> bool:
        """Lets go of a ready id, so that it is no user of the file; false if somebody has the page open."""
        if self.face.withdraw(entry):
            self.face.publish(entry)
            return False
        self.face.release(entry, self._take_ready_id(entry))
        return True
