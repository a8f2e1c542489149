"""The batch socket in process: a service on a pool without a mount, asked by a thread."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Iterator

import pytest
import trio

from kvfs.opening import Openings
from kvfs.pool import Pool
from kvfs.service.messages import Welcome
from kvfs.service.server import Service
from tests.batches.asking import Asking
from tests.pool.conftest import (  # noqa: F401
    _root_and_lease_breaks,
    face,
    open_files,
    openings,
    place,
    pool,
    pytest_pyfunc_call,
    tier,
)

Script = Callable[[Asking], None]
Ask = Callable[[Script], Awaitable[None]]


@pytest.fixture
def service(pool: Pool, openings: Openings) -> Iterator[Service]:  # noqa: F811
    service = Service(pool, openings, lambda: None)
    yield service
    service.close()
    assert service.connections == 0
    statistics = service.statistics()
    assert (statistics["drafts"], statistics["draft_bytes"], statistics["waiting"]) == (0, 0, 0)


@pytest.fixture
def ask(service: Service) -> Ask:
    """Runs a script that has said hello to the service, as a client in a thread."""

    async def run(script: Script) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def client() -> None:
            with Asking(theirs) as asking:
                assert isinstance(asking.greet(), Welcome)
                script(asking)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(service.serve, ours)
            await trio.to_thread.run_sync(client)

    return run
