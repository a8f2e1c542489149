"""Bytes of pages on their way to the SSD, in threads that write several pages each time they are asked.

To ask a thread and to hear from it costs the event loop a good part of what writing a page costs. So what is
ordered while the threads are busy is handed over together.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

import outcome
import trio

from kvfs.errors import TimedOut
from kvfs.index import Entry
from kvfs.interleaved import Work, interleave
from kvfs.tiers.ssd_accounts import Reservation
from kvfs.tiers.ssd_pages import NewPage, WrittenPage

if TYPE_CHECKING:
    from kvfs.storage.storage import Storage

WRITERS: Final = 1
"""Threads that write at once. The second would wait for the interpreter more than for the disk."""
INTERLEAVED: Final = 2
"""Pages that a thread writes at once: while it waits for one it prepares the next."""
BATCH_BYTES: Final = 8 << 20
BATCH_PAGES: Final = 32
"""What one thread is handed at once, at most; a larger page alone."""
_BATCHES: Final = 2 * WRITERS
"""While some are written, others get their names."""
AT_ONCE: Final = 16
"""Pages that are on their way at once: enough to fill the batches with pages of 2 MiB."""

Written = outcome.Outcome[WrittenPage]
Item = TypeVar("Item")


@dataclass(slots=True, eq=False)
class Order:
    """A page that is to be written from ``fd``, which is closed when its bytes were written, or will not be.

    ``idle``: nobody waits for it, so the disk may serve others first. ``result``, once it is ``done``, says
    whether the page has its copy.
    """

    entry: Entry
    page: NewPage
    fd: int
    reservation: Reservation
    idle: bool
    is_wanted: bool = True
    result: outcome.Outcome[bool] = field(init=False)
    done: trio.Event = field(default_factory=trio.Event)

    def drop(self) -> None:
        """The page will not be written."""
        os.close(self.fd)
        self.reservation.release()

    def decide(self, result: outcome.Outcome[bool]) -> None:
        """The first word on an order is the last one."""
        if not self.done.is_set():
            self.result = result
            self.done.set()


class Writing:
    """Orders that wait, and batches under way. Belongs to the event loop."""

    def __init__(
        self,
        storage: Storage,
        written: Callable[[list[tuple[Order, Written]], float], Awaitable[None]],
        abandon: Callable[[WrittenPage], None],
        bytes_per_second: Callable[[], float],
    ) -> None:
        """``written`` is told what became of a batch, and in how many seconds, and decides its orders. What
        is written when the mount ends is left to ``abandon``. A batch is so small that at
        ``bytes_per_second`` it is written long before the disk counts as hanging."""
        self._storage = storage
        self._written = written
        self._abandon = abandon
        self._bytes_per_second = bytes_per_second
        self._orders: deque[Order] = deque()
        self._idle_orders: deque[Order] = deque()
        self._slots = trio.Semaphore(WRITERS)
        self._threads = trio.CapacityLimiter(math.inf)  # how many may be stuck is up to `Jobs`
        self._batches = 0

    async def write(self, order: Order) -> bool:
        """Has a page written and given its names, and says whether it has its copy then. The descriptor and
        the reservation end in any case.

        Raises what `SsdPages` raises, TimedOut, TierFailed, and OSError where the disk fails.
        """
        orders = self._idle_orders if order.idle else self._orders
        orders.append(order)
        if self._batches < _BATCHES:
            self._batches += 1
            self._storage.nursery.start_soon(self._serve)
        try:
            await order.done.wait()
        finally:
            order.is_wanted = False
            if order in orders:  # and nobody waits any more
                orders.remove(order)
                order.drop()
        return order.result.unwrap()

    def fail_all(self, error: Exception) -> None:
        """The disk failed: what waits for it is told so at once."""
        for orders in (self._orders, self._idle_orders):
            while orders:
                order = orders.popleft()
                order.drop()
                order.decide(outcome.Error(error))

    async def _serve(self) -> None:
        """Batch after batch, for as long as there are orders."""
        try:
            while self._orders or self._idle_orders:
                async with self._slots:
                    batch, begun = self._take(), trio.current_time()
                    results = await self._write(batch) if batch else []
                    seconds = trio.current_time() - begun
                await self._written(results, seconds)
        finally:
            self._batches -= 1

    def _take(self) -> list[Order]:
        """The next orders, those that somebody waits for first; not more than leaves as much to each of the
        other threads that are free."""
        orders = self._orders or self._idle_orders
        share = sum(order.page.digest.size for order in orders) // (self._slots.value + 1)
        most = min(share, BATCH_BYTES, self._bytes_per_second() * self._storage.io_timeout / 4)
        batch: list[Order] = []
        size = 0
        while orders and len(batch) < BATCH_PAGES:
            size += orders[0].page.digest.size
            if batch and size > most:
                break
            batch.append(orders.popleft())
        return batch

    async def _write(self, batch: list[Order]) -> list[tuple[Order, Written]]:
        """What became of each order."""
        storage, left_behind = self._storage, threading.Event()
        copy = storage.write if batch[0].idle else storage.write_at_once
        left, handed = deque(batch), deque[tuple[Order, Written]]()
        """What the thread is to write, and what it gives: each belongs to who takes it out."""

        def write() -> None:
            begun: deque[Order] = deque()

            def works() -> Iterator[Work[WrittenPage]]:
                for order in _take_out(left):
                    begun.append(order)
                    yield storage.tier.write_page(order.page, order.fd, copy, order.reservation)

            for result in interleave(works(), INTERLEAVED):
                order = begun.popleft()
                os.close(order.fd)
                handed.append((order, result))
            if left_behind.is_set():
                _drop(handed, storage.tier.abandon_page)

        finished: dict[Order, Written] = {}
        failure = TimedOut(f"a page could not be written within {storage.io_timeout:g} s")
        try:
            job = storage.jobs.new(write)
            try:
                with trio.move_on_after(storage.io_timeout):
                    await trio.to_thread.run_sync(job.run, limiter=self._threads, abandon_on_cancel=True)
                left_behind.set()
                finished.update(_take_out(handed))
            finally:
                job.abandon()
        except TimedOut as error:
            failure = error
        finally:
            left_behind.set()
            _drop(handed, self._abandon)
            for order in _take_out(left):
                order.drop()
        return [(order, finished.get(order, outcome.Error(failure))) for order in batch]


def _take_out(items: deque[Item]) -> Iterator[Item]:
    with suppress(IndexError):
        while True:
            yield items.popleft()


def _drop(handed: deque[tuple[Order, Written]], abandon: Callable[[WrittenPage], None]) -> None:
    """Nobody wants what was written."""
    for _, result in _take_out(handed):
        if isinstance(result, outcome.Value):
            abandon(result.value)
