"""What a service manager hears, over a socket like its own."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.errors import ConfigError
from kvfs.notify import ServiceManager, notes_the_time
from tests.conftest import LogGuard


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """What NOTIFY_SOCKET says, and the socket behind it."""
    address = str(tmp_path / "notify") if request.param == "path" else f"@kvfs-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address.replace("@", "\0") if request.param == "abstract" else address)
        listener.settimeout(5)
        yield address, listener


def test_variables_arrive_in_one_message(manager: tuple[str, socket.socket]) -> None:
    address, listener = manager
    told = ServiceManager.from_environment({"NOTIFY_SOCKET": address})
    assert told.is_listening
    told.tell(READY=1, STATUS="schön, so far")
    assert listener.recv(4096).decode() == "READY=1\nSTATUS=schön, so far"


def test_nobody_listens() -> None:
    manager = ServiceManager.from_environment({})
    assert not manager.is_listening
    assert manager.watchdog_seconds == 0
    manager.tell(READY=1)


def test_children_do_not_inherit_the_variables() -> None:
    environment = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "5", "WATCHDOG_PID": "1", "PATH": "/bin"}
    ServiceManager.from_environment(environment)
    assert environment == {"PATH": "/bin"}


def test_the_watchdog_is_for_the_process_that_it_names() -> None:
    ours = {"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": str(os.getpid())}
    assert ServiceManager.from_environment(ours).watchdog_seconds == 1.5
    assert ServiceManager.from_environment({"WATCHDOG_USEC": "1500000"}).watchdog_seconds == 1.5
    others = {"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": str(os.getppid())}
    assert ServiceManager.from_environment(others).watchdog_seconds == 0


@pytest.mark.parametrize(
    "environment", [{"NOTIFY_SOCKET": "vsock:2:1"}, {"WATCHDOG_USEC": "soon"}, {"WATCHDOG_USEC": "-1"}]
)
def test_variables_that_make_no_sense(environment: dict[str, str]) -> None:
    (name,) = environment
    with pytest.raises(ConfigError, match=name):
        ServiceManager.from_environment(environment)


def test_a_manager_that_is_gone_is_no_reason_to_stop(tmp_path: Path, expect_log: LogGuard) -> None:
    expect_log("the service manager does not hear READY, STATUS: No such file")
    ServiceManager(str(tmp_path / "gone")).tell(READY=1, STATUS="serving")


def test_a_manager_that_does_not_read_is_not_waited_for(
    manager: tuple[str, socket.socket], expect_log: LogGuard
) -> None:
    expect_log("the service manager does not hear WATCHDOG: Resource temporarily unavailable")
    told = ServiceManager(manager[0])
    for _ in range(100_000):
        told.tell(WATCHDOG=1)
        if expect_log.lines:
            return
    pytest.fail("the queue of the socket never fills")


def test_only_the_journal_notes_the_time(tmp_path: Path) -> None:
    with (tmp_path / "journal").open("w") as journal, (tmp_path / "other").open("w") as other:
        status = os.fstat(journal.fileno())
        environment = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        assert notes_the_time(journal.fileno(), environment)
        assert not notes_the_time(journal.fileno(), {})
        assert not notes_the_time(other.fileno(), environment), "standard error was redirected"
