"""Everything at once: publishers, readers, overwriters, kills, renames of directories, in too small a pool.

Every file carries the digest of its own bytes, so that whoever reads one knows whether it is whole.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.mounted.children import start, wait
from tests.mounted.operations import pattern
from tests.mounted.running import MIB, KvfsMount, is_alive, wait_until
from tests.mounted.test_reports_room import assert_accounts_agree

SECONDS = 8
SIZES = [100, 5000, 70_000, 300_000, 2 * MIB, 3 * MIB + 17]
#: What a program must be ready for on a cache that others use too.
ORDINARY = {
    errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR, errno.ENOSPC, errno.EINVAL,
    errno.EBUSY,
}  # fmt: skip
DATA = pattern(41, MIB) * 4


def whole(chance: random.Random) -> bytes:
    """Bytes that begin with their own digest."""
    start_at = chance.randrange(10_000)
    body = DATA[start_at : start_at + chance.choice(SIZES)]
    return hashlib.md5(body).digest() + body


def check(data: bytes, path: Path) -> None:
    if hashlib.md5(data[16:]).digest() != data[:16]:
        raise AssertionError(f"{path}: {len(data)} bytes that nobody wrote as a whole")


class Worker:
    """One process's random doings, each chosen anew."""

    def __init__(self, top: Path, seed: int) -> None:
        self.top = top
        self.chance = random.Random(seed)
        self.doings = [
            self.publish, self.publish, self.publish, self.read, self.read, self.read, self.map,
            self.replace_in_place, self.remove, self.link, self.move_directory, self.look, self.be_killed,
        ]  # fmt: skip

    def run(self) -> None:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            try:
                self.chance.choice(self.doings)()
            except OSError as error:
                if error.errno not in ORDINARY:
                    raise

    def directory(self) -> Path:
        return self.top / f"directory-{self.chance.randrange(4)}"

    def page(self) -> Path:
        return self.directory() / f"page-{self.chance.randrange(40)}"

    def temporary(self, directory: Path) -> Path:
        return directory / f"temporary-{os.getpid()}-{self.chance.randrange(10**9)}"

    def publish(self) -> None:
        path = self.page()
        path.parent.mkdir(exist_ok=True)
        temporary = self.temporary(path.parent)
        temporary.write_bytes(whole(self.chance))
        temporary.rename(path)

    def read(self) -> None:
        path = self.page()
        check(path.read_bytes(), path)

    def map(self) -> None:
        path = self.page()
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
            time.sleep(self.chance.random() * 0.01)
            check(mapping[:], path)

    def replace_in_place(self) -> None:
        """A file of this process's own, overwritten while it reads it itself."""
        path = self.top / f"own-{os.getpid()}"
        first, second = whole(self.chance), whole(self.chance)
        path.write_bytes(first)
        with open(path, "rb") as reader:
            path.write_bytes(second)
            if self.chance.random() < 0.5:
                check(path.read_bytes(), path)
            reader.read(10)

    def remove(self) -> None:
        self.page().unlink()

    def link(self) -> None:
        os.link(self.page(), self.page())

    def move_directory(self) -> None:
        self.directory().rename(self.directory())

    def look(self) -> None:
        with os.scandir(self.directory()) as entries:
            for entry in entries:
                if not entry.name.startswith("temporary-"):
                    entry.stat()

    def be_killed(self) -> None:
        """A child that is killed somewhere in the middle of publishing."""
        child = start(self.publish_for_ever)
        time.sleep(self.chance.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        wait(child)

    def publish_for_ever(self) -> None:
        self.chance.seed(os.getpid())
        while True:
            try:
                self.publish()
            except OSError as error:
                if error.errno not in ORDINARY:
                    raise


@pytest.mark.deadline(90)
def test_everything_at_once(empty_pool: KvfsMount) -> None:
    mount = empty_pool
    top = mount.path / "torture"
    top.mkdir()
    children = [start(Worker(top, seed).run) for seed in range(6)]
    ended = [wait(child) for child in children]
    assert not any(ended), ended
    assert is_alive(mount.daemon_pid)
    wait_until(lambda: not mount.status()["unsealed"], 20, "everything is sealed")
    for path in top.rglob("page-*"):
        check(path.read_bytes(), path)
    torn = [path for path in top.rglob("temporary-*") if path.stat().st_size == 0]
    for path in set(top.rglob("temporary-*")) - set(torn):
        check(path.read_bytes(), path)
    assert not torn, f"{len(torn)} empty temporaries of killed writers"
    assert_accounts_agree(mount)
    shutil.rmtree(top)
    wait_until(lambda: mount.used_bytes() < MIB, 10, "all room is back")
