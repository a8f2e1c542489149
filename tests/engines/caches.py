"""The directory that an engine caches in: a kvfs mount, or a plain tmpfs to tell its faults from ours."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.engines.running import User
from tests.mounted.running import MIB, KvfsMount, raw_tmpfs, wait_sealed, wait_until

POOL_BYTES = 1024 * MIB


class PlainCache:
    """A tmpfs with hugepages and nothing above it."""

    def __init__(self, path: Path, user: User) -> None:
        self.path = path
        self.user = user

    def files(self, pattern: str) -> list[Path]:
        return sorted(path for path in self.path.rglob(pattern) if path.is_file())

    def assert_pages(self, pattern: str, count: int) -> None:
        """What matches is ``count`` files of the ordinary user."""
        wait_until(lambda: len(self.files(pattern)) == count, 20, f"{count} files {pattern}")
        assert {path.stat().st_uid for path in self.files(pattern)} == {self.user.uid}

    def hits(self) -> int | None:
        return None

    def remount(self) -> None:
        """A tmpfs that was unmounted is empty: it stays."""

    def kill_and_remount(self) -> None:
        """There is no process to kill."""


class MountedCache(PlainCache):
    """A kvfs mount whose root belongs to the ordinary user."""

    def __init__(self, mount: KvfsMount, user: User) -> None:
        super().__init__(mount.path, user)
        self.mount = mount

    def assert_pages(self, pattern: str, count: int) -> None:
        """What matches is ``count`` files of the ordinary user, all of them sealed."""
        super().assert_pages(pattern, count)
        for path in self.files(pattern):
            wait_sealed(path)
            assert os.getxattr(path, "user.kvfs.sealed") == b"1", path

    def hits(self) -> int:
        """How many opens for reading the mount has served since it was mounted."""
        hits: dict[str, int] = self.mount.status()["hits"]
        return sum(hits.values())

    def remount(self) -> None:
        """A planned restart of the daemon: the memory is kept."""
        self.mount.umount("--keep")
        self.mount.mount()

    def kill_and_remount(self) -> None:
        """The daemon is killed without warning, and mounted anew on the same path."""
        self.mount.kill_daemon()
        self.mount.mount()


@contextmanager
def open_cache(
    directory: Path,
    user: User,
    *,
    plain: bool,
    pool_bytes: int = POOL_BYTES,
    environment: Mapping[str, str] | None = None,
) -> Iterator[PlainCache]:
    """An empty cache directory below ``directory`` that ``user`` may write in."""
    if plain:
        options = f"size={pool_bytes},huge=within_size,noatime,mode=0770,uid={user.uid},gid={user.gid}"
        with raw_tmpfs(directory / "mnt", options) as path:
            yield PlainCache(path, user)
        return
    owner = f"{user.uid}:{user.gid}"
    with KvfsMount(directory, pool_bytes, "--owner", owner, environment=environment) as mount:
        yield MountedCache(mount, user)
