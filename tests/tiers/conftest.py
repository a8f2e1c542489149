"""Real filesystems for tiers: tmpfs mounts, and ext4 in a loop-mounted file."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from kvfs import mounts, syscalls
from kvfs.tiers import base
from kvfs.tiers.attributes import KernelAttributes, MemoryAttributes
from kvfs.tiers.base import Tier
from tests.tiers.ssds import mounted_disk

NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts filesystems, and so must run as root")


@contextmanager
def mounted_tmpfs(directory: Path, options: str = "size=64m") -> Iterator[Path]:
    """A tmpfs on ``directory``, which is made where it is missing."""
    directory.mkdir(exist_ok=True)
    syscalls.mount("kvfs-test", directory, "tmpfs", 0, options)
    try:
        yield directory
    finally:
        syscalls.umount2(directory, syscalls.MNT_DETACH)


@contextmanager
def mounted_ext4(directory: Path, megabytes: int = 64) -> Iterator[Path]:
    """An ext4 filesystem in a file beside ``directory``."""
    image = directory.with_suffix(".ext4")
    with image.open("wb") as file:
        file.truncate(megabytes << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    directory.mkdir()
    subprocess.run(["mount", "-o", "loop", image, directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", directory], check=True)


def open_root(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


@pytest.fixture(params=["trusted", "user", "memory", "ext4"])
def tier(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tier]:
    """A tier on tmpfs with each kind of attributes, and one on ext4."""
    if os.geteuid() != 0:
        pytest.skip("mounts filesystems, and so must run as root")
    kind = request.param
    place = mounted_ext4(tmp_path / "tier") if kind == "ext4" else mounted_tmpfs(tmp_path / "tier")
    if kind == "user":
        monkeypatch.setattr(base, "choose_attributes", lambda _fd: KernelAttributes("user.kvfs."))
    elif kind == "memory":
        monkeypatch.setattr(base, "choose_attributes", lambda _fd: MemoryAttributes())
    with place as directory:
        if kind == "ext4":
            (directory / "lost+found").rmdir()
        made = Tier("test", open_root(directory))
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """Where a DRAM tier may be mounted; nothing may be left there at the end."""
    directory = tmp_path / "state" / "dram"
    try:
        yield directory
        assert mounts.find(directory) == []
    finally:
        while mounts.find(directory):
            syscalls.umount2(directory, syscalls.MNT_DETACH)


@pytest.fixture(scope="session", params=["ext4", "xfs"])
def disk(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A filesystem in a file, for all tests together; each uses a directory of its own."""
    if os.geteuid() != 0:
        pytest.skip("mounts filesystems, and so must run as root")
    with tempfile.TemporaryDirectory(prefix="kvfs-disk-") as home:
        os.chmod(home, 0o755)  # ordinary users have their tests too
        with mounted_disk(Path(home, "disk"), request.param, 512) as directory:
            yield directory


@pytest.fixture
def ssd(disk: Path) -> Iterator[Path]:
    """Where an SSD tier may be; nothing is there yet."""
    home = Path(tempfile.mkdtemp(dir=disk))
    yield home / "tier"
    shutil.rmtree(home)


@pytest.fixture
def as_nobody() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Runs a function in a child process without any privilege; it fails the test as it would here."""
    before = set(os.listdir("/dev/shm"))
    yield run_as_nobody
    for left in set(os.listdir("/dev/shm")) - before:
        if left.startswith(f"kvfs-{NOBODY}-"):
            shutil.rmtree(f"/dev/shm/{left}")


def run_as_nobody(function: Callable[[], None]) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _become_nobody_and_run(function, writing)
    os.close(writing)
    with open(reading) as pipe:
        problem = pipe.read()
    os.waitpid(child, 0)
    if problem:
        pytest.fail(problem, pytrace=False)


def _become_nobody_and_run(function: Callable[[], None], writing: int) -> NoReturn:
    try:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        function()
    except BaseException:
        os.write(writing, traceback.format_exc().encode())
    os._exit(0)
