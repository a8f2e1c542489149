"""What the tests of a pool with an SSD share: making one, and what must hold of both tiers together."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from contextlib import suppress

from kvfs.errors import TierFailed
from kvfs.index import SEALED, STORED, UNCHECKED, Entry
from kvfs.page import Digest, digest_of
from kvfs.pool import Pool
from kvfs.storage.described import RESIDENT
from kvfs.storage.storage import Storage
from kvfs.tiers.ssd import SsdTier
from kvfs.tiers.ssd_directory import is_ours
from kvfs.tiers.ssd_names import is_reserved
from tests.pool import files
from tests.tiers.ssds import copy


def copy_up(source_fd: int, target_fd: int, size: int) -> Digest:
    """Fills a file in DRAM, through the page cache."""
    with os.fdopen(os.open(f"/proc/self/fd/{source_fd}", os.O_RDONLY), "rb") as source:
        content = source.read()
    os.pwrite(target_fd, content, 0)
    return digest_of(content)


def storage_of(pool: Pool, ssd: SsdTier) -> Storage:
    return Storage(pool, ssd, write=copy, read=copy_up, settle_seconds=0.0, io_timeout=5.0)


async def stored(pool: Pool, name: bytes, data: bytes) -> Entry:
    """A page in DRAM that has its copy on the SSD."""
    entry = await files.page(pool, name, data)
    await files.wait_until(lambda: entry.stored == RESIDENT)
    return entry


async def demoted(pool: Pool, name: bytes, data: bytes) -> Entry:
    """A page that is only on the SSD."""
    entry = await stored(pool, name, data)
    await empty_dram(pool)
    assert entry.state == STORED
    return entry


async def empty_dram(pool: Pool) -> None:
    """Every page that nobody uses leaves DRAM, once the SSD has it under its name."""
    assert pool.storage is not None
    with suppress(TierFailed):
        await pool.storage.history.caught_up()
    await pool.evictor.free(sum(pool.status(entry).st_blocks * 512 for entry in pool.policy.victims()))


def on_ssd(pool: Pool, path: bytes) -> bytes | None:
    """The bytes that the SSD has under a path."""
    assert pool.storage is not None
    try:
        fd = pool.storage.tier.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        return file.read()


def _wait(is_over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_over():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def let_threads_end(storage: Storage) -> None:
    """The loop has ended; what it left behind in threads gives back what it has."""
    _wait(lambda: not (storage.history.is_busy or storage.jobs.abandoned))
    storage.demotions.close()
    _wait(lambda: not storage.tier.accounts.reserved_bytes)
    gc.collect()  # an error from a thread and its trace hold each other, and a directory with them


def check_storage(pool: Pool) -> None:
    """The SSD has exactly the files that the index says it has."""
    storage = pool.storage
    assert storage is not None
    if len(storage.history) or storage.demotions.unstored:
        return  # the test ended before the SSD had followed
    told = set()
    for entry in pool.index.entries():
        if entry.stored is not None and entry.parent is not None:
            assert entry.state in (SEALED, UNCHECKED, STORED)
            told |= {parent.child_path(name) for parent, name in entry.names()}
        if entry.state == STORED:
            assert entry.holding is None
            assert (entry in storage.order) == (entry.parent is not None)
    walked = (one.path for one in storage.tier.walk() if not one.is_directory)
    found = {path for path in walked if not is_reserved(path) and is_ours(storage.tier.stat(path))}
    assert found == told
    assert storage.tier.accounts.reserved_bytes == 0
