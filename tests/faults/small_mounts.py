"""A mount with a small pool on a disk of a test's own, and pages to put there."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.mounted.operations import pattern
from tests.mounted.running import MIB, KvfsMount, wait_sealed, wait_until

IO_TIMEOUT = 1.0
SIZE = 2 * MIB


def data(number: int) -> bytes:
    return pattern(number, MIB) * (SIZE // MIB)


class Mount(KvfsMount):
    """A small pool on a disk of a test's own."""

    def __init__(
        self, base: Path, disk: Path, *arguments: str, number: int = 1, pool_bytes: int = 64 * MIB
    ) -> None:
        ssd = ("--ssd", str(disk / "kvfs"), "--ssd-capacity", "200M", "--ssd-read-path", "direct")
        super().__init__(
            *(base / f"mount-{number}", pool_bytes),
            *(*ssd, "--settle", "0s", "--ssd-write-delay", "0s"),
            *("--io-timeout", f"{IO_TIMEOUT}s", "--flush-timeout", "2s"),
            *arguments,
        )

    def store(self, name: str, number: int) -> Path:
        """A page that both tiers have."""
        path = self.path / name
        path.write_bytes(data(number))
        wait_sealed(path)
        self.wait_stored()
        return path

    def wait_stored(self) -> None:
        wait_until(lambda: not self.tier("ssd")["unstored"], 30, "the SSD has everything")
        wait_until(lambda: not self.tier("ssd")["waiting_changes"], 30, "the SSD follows")

    def store_cold(self, name: str, number: int) -> Path:
        """A page that only the SSD has."""
        path = self.store(name, number)
        os.setxattr(path, "user.kvfs.evict", b"1")
        return path

    def tier(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.status()["tiers"][name]
        return found

    def is_troubled(self) -> bool:
        return any("SSD" in line for line in self.status()["degraded"])

    def wait_recovered(self) -> None:
        """The SSD is tried again and again, and works at last."""
        wait_until(lambda: not self.is_troubled(), 40, "the SSD works again")


@contextlib.contextmanager
def serving(
    base: Path, disk: Path, *arguments: str, number: int = 1, pool_bytes: int = 64 * MIB
) -> Iterator[Mount]:
    """A mount that must end in order, and in whose log no bug may show. ``number`` tells it from others on
    the same disk."""
    with Mount(base, disk, *arguments, number=number, pool_bytes=pool_bytes) as mount:
        yield mount
        log = mount.log
        mount.umount()
    assert "Traceback" not in log, log


def reads(path: Path, number: int) -> bool:
    """Whether a page can be read now; other bytes than were stored are never an answer."""
    try:
        content = path.read_bytes()
    except OSError as error:
        if error.errno not in (errno.EIO, errno.ETIMEDOUT):
            raise
        return False
    assert content == data(number)
    return True


def evicts(path: Path) -> bool:
    try:
        os.setxattr(path, "user.kvfs.evict", b"1")
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EBUSY):
            raise
        return False
    return True
