"""Filesystems whose disk is full, read-only, failing or hanging."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.faults.sick_device import MOODS, NAME
from tests.mounted.running import MIB, environment_for_kvfs, wait_until

MAKE = {
    "ext4": ["mkfs.ext4", "-q", "-F", "-m", "0"],
    # Without a journal, which would end the filesystem at the first error.
    "ext4-without-journal": ["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal"],
    "xfs": ["mkfs.xfs", "-q", "-f"],
}


def _run(*command: str | Path) -> str:
    ended = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True, timeout=60)
    return ended.stdout.strip()


def make_image(image: Path, kind: str, megabytes: int) -> None:
    """A file with a filesystem in it; XFS wants at least 300 MiB."""
    with image.open("wb") as file:
        file.truncate(megabytes * MIB)
    _run(*MAKE[kind], image)


@contextlib.contextmanager
def mounted(source: Path, directory: Path, options: str) -> Iterator[Path]:
    directory.mkdir(exist_ok=True)
    _run("mount", "-o", options, source, directory)
    try:
        yield directory
    finally:
        _run("umount", directory)


@contextlib.contextmanager
def small_disk(base: Path, kind: str, megabytes: int) -> Iterator[Path]:
    """A filesystem of its own, mounted at ``base/disk``."""
    make_image(base / "image", kind, megabytes)
    with mounted(base / "image", base / "disk", "loop") as directory:
        yield directory
    (base / "image").unlink()


class Sickness:
    """What a disk suffers from; the words are those of ``sick_device.MOODS``."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._confirm()

    def _confirm(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "so it is\n"

    def be(self, mood: str) -> None:
        assert mood in MOODS
        assert self._process.stdin is not None
        self._process.stdin.write(f"{mood}\n")
        self._process.stdin.flush()
        self._confirm()

    @contextlib.contextmanager
    def during(self, mood: str) -> Iterator[None]:
        """The disk is like that, and well again afterwards."""
        self.be(mood)
        try:
            yield
        finally:
            self.be("well")


@contextlib.contextmanager
def _sick_device(base: Path) -> Iterator[tuple[Path, Sickness]]:
    below = base / "below"
    below.mkdir()
    command = [sys.executable, "-m", "tests.faults.sick_device", str(below), str(base / "image")]
    with subprocess.Popen(
        command, env=environment_for_kvfs(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            sickness = Sickness(process)
            device = _run("losetup", "--find", "--show", "--direct-io=on", below / NAME.decode())
            try:
                yield Path(device), sickness
            finally:
                _run("losetup", "--detach", device)
                wait_until(lambda: not _run("losetup", "--associated", below / NAME.decode()), 10, "detached")
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(20)
    assert process.returncode == 0


@contextlib.contextmanager
def sick_disk(base: Path, megabytes: int = 256) -> Iterator[tuple[Path, Sickness]]:
    """An ext4 filesystem at ``base/disk`` on a disk that is well at first."""
    make_image(base / "image", "ext4-without-journal", megabytes)
    with (
        _sick_device(base) as (device, sickness),
        mounted(device, base / "disk", "errors=continue") as directory,
    ):
        yield directory, sickness
    (base / "image").unlink()
