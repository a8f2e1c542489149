"""Mounts whose pages are looked after, and what a person can do to those behind the mount's back."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.mounted.operations import pattern
from tests.mounted.running import MIB, KvfsMount, run_kvfs, wait_sealed, wait_until

OK, USAGE, BUSY, NOT_MOUNTED, NOT_PERMITTED, DAMAGED, INTERRUPTED = 0, 2, 7, 8, 9, 12, 130
SIZE = 100_000
COUNT = 6


def data(number: int) -> bytes:
    return pattern(number, SIZE)


class Mount(KvfsMount):
    """A mount with a few pages in one directory, and what a person can do to them behind its back."""

    def fill(self, count: int = COUNT) -> list[Path]:
        pages = [self.path / "pages" / str(number) for number in range(count)]
        pages[0].parent.mkdir(exist_ok=True)
        for number, page in enumerate(pages):
            page.write_bytes(data(number))
        wait_sealed(*pages)
        if self.has_ssd:
            wait_until(lambda: not self.status()["tiers"]["ssd"]["unstored"], 20, "all is on the SSD")
        return pages

    @property
    def has_ssd(self) -> bool:
        return "ssd" in self.status()["tiers"]

    @property
    def ssd(self) -> Path:
        return Path(self.status()["tiers"]["ssd"]["directory"])

    def harm(self, tier: Path, page: Path) -> None:
        """One bit of one byte."""
        with (tier / page.relative_to(self.path)).open("r+b") as file:
            file.seek(5000)
            byte = file.read(1)[0]
            file.seek(5000)
            file.write(bytes([byte ^ 1]))

    def run(self, verb: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return run_kvfs(verb, *arguments)

    def verify(self, *arguments: str) -> dict[str, Any]:
        """The report; the exit code is that of damage or of none."""
        ended = run_kvfs("verify", self.path, "--json", *arguments)
        report: dict[str, Any] = json.loads(ended.stdout)
        assert ended.returncode == (DAMAGED if report["damaged"] else OK), ended
        assert len(ended.stderr.splitlines()) == bool(report["damaged"])
        return report


def tiers(pages: list[Path]) -> list[str]:
    return [os.getxattr(page, "user.kvfs.tier").decode() for page in pages]


@contextmanager
def mounted_with_ssd(base: Path) -> Iterator[Mount]:
    """A mount with an SSD tier, on the disk of the tests; no bug may show in its log."""
    at_once = ("--settle", "0s", "--ssd-write-delay", "0s")
    options = ("--ssd", str(base / "disk"), "--ssd-capacity", "512M", *at_once, "--mode", "0755")
    with Mount(base, 128 * MIB, *options) as mount:
        yield mount
        log = mount.log
        mount.umount()
    assert "Traceback" not in log, log


def place(scratch: Path, name: str) -> Path:
    """A directory for the mount of a test."""
    return scratch / "".join(c if c.isalnum() else "-" for c in name)[:60]
