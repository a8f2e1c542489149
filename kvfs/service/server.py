"""The service: takes connections, knows who answers which request, and tells how it does."""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import trio

from kvfs.counters import LimitedLog
from kvfs.errors import Busy, ConnectionLost, KvfsError, UsageError
from kvfs.service import messages
from kvfs.service.changing import Changing
from kvfs.service.connection import Connection
from kvfs.service.describing import Describing
from kvfs.service.drafts import Drafts
from kvfs.service.finding import Finder
from kvfs.service.messages import MOST_DESCRIPTORS, MOST_KEYS, Failed, Request
from kvfs.service.prefetching import Prefetches
from kvfs.service.reading import Reading
from kvfs.service.replies import Reply, code_of
from kvfs.service.session import Session
from kvfs.tiers.read_only import ReadOnlyView

if TYPE_CHECKING:
    from kvfs.opening import Openings
    from kvfs.pool import Pool
    from kvfs.service.peers import Peer

log = logging.getLogger("kvfs.service")

MOST_CONNECTIONS = 1024
MOST_WAITING = 4096
"""Requests of all connections that wait for something."""

_LIMITS: Final[dict[type, int]] = dict.fromkeys(
    (messages.Open, messages.Create, messages.Stat, messages.OpenStored), MOST_DESCRIPTORS
)
"""How many keys a request may name, where that is not `MOST_KEYS`."""


class Service:
    """All connections; belongs to the event loop. No failure of one may end the mount."""

    def __init__(self, pool: Pool, openings: Openings, catch_up: Callable[[], None]) -> None:
        """``catch_up`` hears of what programs have closed on the mount: before every request, which came
        later."""
        self._pool = pool
        self._catch_up = catch_up
        self._log = LimitedLog(log)
        self._view = ReadOnlyView(pool.tier)
        reading = Reading(pool, openings, self._view)
        self._drafts = drafts = Drafts(pool, openings)
        self._prefetches = Prefetches(openings)
        changing = Changing(pool, reading, self._prefetches)
        describing = Describing(pool, reading)
        self._at_once: dict[type, Callable[[Any, Session], Reply | None]] = {
            messages.Exists: reading.exists_now,
            messages.MatchPrefix: reading.match_prefix_now,
            messages.Open: reading.open_now,
            messages.Touch: reading.touch_now,
            messages.Create: drafts.create_now,
            messages.Abort: drafts.abort_now,
        }
        """What is tried without waiting; None where that cannot be done."""
        self._waiting: dict[type, Callable[[Any, Session], Awaitable[Reply]]] = {
            messages.Exists: reading.exists,
            messages.MatchPrefix: reading.match_prefix,
            messages.Open: reading.open,
            messages.Touch: reading.touch,
            messages.Create: drafts.create,
            messages.Commit: drafts.commit,
            messages.Prefetch: changing.prefetch,
            messages.Pin: changing.pin,
            messages.Delete: changing.delete,
            messages.Stat: describing.stat,
            messages.OpenStored: describing.open_stored,
        }
        self.connections = 0
        self.waiting = 0
        self.requests: Counter[str] = Counter()
        self.failures = 0
        """Requests of which nothing was done."""

    @property
    def is_read_only(self) -> bool:
        return not self._view.missing

    def degraded(self) -> list[str]:
        """What is off, each with its reason."""
        if self.is_read_only:
            return []
        return [
            f"pages are given to other processes without a read-only mount ({self._view.missing}): root and "
            "the user of the daemon could open them for writing"
        ]

    async def run(self, listener: socket.socket) -> None:
        """Serves until it is cancelled; takes the listening socket over."""
        with listener:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._prefetches.run)
                while True:
                    await trio.lowlevel.wait_readable(listener)
                    try:
                        connected, _ = listener.accept()
                    except BlockingIOError:
                        continue
                    except OSError as error:  # no descriptor left, say: it may pass
                        self._log.warning("accept", f"a connection cannot be taken: {error.strerror}")
                        self._pool.idle.give_up_descriptors()
                        await trio.sleep(0.1)
                        continue
                    nursery.start_soon(self.serve, connected)

    async def serve(self, connected: socket.socket) -> None:
        """One connection, from its hello to its end."""
        self.connections += 1
        try:
            with connected:
                if self.connections > MOST_CONNECTIONS:
                    self._log.warning("connections", f"a connection beyond {MOST_CONNECTIONS} is refused")
                    return
                connected.setblocking(False)
                await Connection(self, connected).run()
        except Exception as error:
            self._note_end(error)
        finally:
            self.connections -= 1

    def _note_end(self, error: Exception) -> None:
        """A connection ended otherwise than by the client's own wish."""
        while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if isinstance(error, ConnectionLost | OSError):
            log.debug("a connection ended: %s", error)
        else:
            self._log.warning("bug", "a connection failed", error)

    # What connections ask

    def begin(self, peer: Peer) -> Session:
        """Somebody has connected."""
        return Session(peer, Finder(self._pool.index, peer))

    def answer_now(self, request: Request, session: Session) -> Reply | None:
        """The reply, where none has to be waited for."""
        self._catch_up()
        kind = type(request)
        self.requests[kind.__name__] += 1
        try:
            _require_limit(request)
            answer = self._at_once.get(kind)
            if answer is not None:
                return answer(request, session)
            if kind not in self._waiting:
                raise UsageError(f"{kind.__name__} is for the beginning of a connection")
        except Exception as error:
            return self.failed(request.number, error)
        return None

    async def answer(self, request: Request, session: Session) -> Reply:
        """The reply, whatever becomes of it."""
        if self.waiting >= MOST_WAITING:
            return self.failed(request.number, Busy("too many requests wait: ask again later"))
        self.waiting += 1
        try:
            return await self._waiting[type(request)](request, session)
        except Exception as error:
            return self.failed(request.number, error)
        finally:
            self.waiting -= 1

    def failed(self, number: int, error: Exception) -> Reply:
        """What a client is told of an error; one that is a bug is logged."""
        self.failures += 1
        while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if isinstance(error, OSError):
            return Reply(Failed(number, code_of(error), error.strerror or str(error)))
        if isinstance(error, KvfsError):
            return Reply(Failed(number, code_of(error), " ".join(str(error).split())))
        self._log.warning("bug", "a request failed: its client is told of an I/O error", error)
        return Reply(Failed(number, KvfsError.errno, "a bug of the daemon: its log says more"))

    def sent(self, reply: Reply, session: Session) -> None:
        """Counts what the client has by now."""
        if reply.used:
            self._pool.uses.note_later(reply.used)
        for key in reply.missed:
            self._pool.uses.note_missed(key, session.peer.pid)

    def ended(self, session: Session) -> None:
        """The client has gone."""
        self._drafts.ended(session)

    # What is told of it

    def statistics(self) -> dict[str, Any]:
        """For status."""
        return {
            "connections": self.connections,
            "requests": dict(self.requests),
            "failed": self.failures,
            "waiting": self.waiting,
            **self._drafts.statistics(),
            "prefetches": self._prefetches.statistics(),
        }

    def close(self) -> None:
        """Nobody is connected any more."""
        self._view.close()


def _require_limit(request: Request) -> None:
    """UsageError for a request that names more than it may, which a client would have split."""
    most = _LIMITS.get(type(request), MOST_KEYS)
    for named in ("keys", "sizes", "drafts"):
        if len(getattr(request, named, ())) > most:
            raise UsageError(f"{type(request).__name__} takes at most {most} at once: split the request")
