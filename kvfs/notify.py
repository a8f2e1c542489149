"""Telling a service manager how the daemon does: sd_notify(3), a datagram with one variable a line."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, MutableMapping

from kvfs.counters import LimitedLog
from kvfs.errors import ConfigError


class ServiceManager:
    """Whoever started this process and wants to hear of it: systemd, or what speaks as it does.

    ``watchdog_seconds``: how long it waits for a sign of life; 0 where it waits for none. Without an address
    nobody listens, and nothing is sent.
    """

    def __init__(self, address: str = "", watchdog_seconds: float = 0.0) -> None:
        if address and address[0] not in "/@":
            raise ConfigError(
                f"NOTIFY_SOCKET: {address!r} is neither a path nor the name of an abstract socket"
            )
        # An abstract socket is written with @ in place of the zero byte that its name begins with.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._log = LimitedLog(logging.getLogger(__name__))
        self.watchdog_seconds = watchdog_seconds

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> ServiceManager:
        """Takes the variables out of ``environment``: what is started later does not speak for this process.

        Raises ConfigError where they make no sense.
        """
        address = environment.pop("NOTIFY_SOCKET", "")
        microseconds = environment.pop("WATCHDOG_USEC", "0")
        process = environment.pop("WATCHDOG_PID", str(os.getpid()))
        if not microseconds.isdecimal():
            raise ConfigError(f"WATCHDOG_USEC: {microseconds!r} is not a number of microseconds")
        return cls(address, int(microseconds) / 1e6 if process == str(os.getpid()) else 0.0)

    @property
    def is_listening(self) -> bool:
        """Whether there is one."""
        return bool(self._address)

    def tell(self, **variables: object) -> None:
        """Sends the variables in one message: ``tell(READY=1, STATUS="serving")``.

        Never waits. Where nobody receives it, the log says so: the mount serves without a manager too.
        """
        if not self._address:
            return
        message = "\n".join(f"{name}={value}" for name, value in variables.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(message.encode(), self._address)
        except OSError as error:
            words = ", ".join(variables)
            self._log.warning("unheard", f"the service manager does not hear {words}: {error.strerror}")


def notes_the_time(descriptor: int, environment: Mapping[str, str]) -> bool:
    """Whether what is written to a descriptor goes to the journal of systemd, which knows when it came."""
    status = os.fstat(descriptor)
    return environment.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
