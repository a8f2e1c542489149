"""What a daemon finds of an earlier one: pages to serve again, drafts to drop."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trio

from kvfs import adoption, opening
from kvfs.errors import StalePage
from kvfs.index import DRAFT, OTHER, SEALED, UNCHECKED
from kvfs.opening import Openings
from kvfs.page import DIGEST, OWNER, SPARSE, Digest, Owner, digest_of
from kvfs.pool import Pool
from kvfs.tiers.dram import DramTier
from tests.conftest import LogGuard
from tests.pool import files
from tests.pool.checks import check_pool
from tests.pool.conftest import ROOT_OWNER
from tests.pool.faces import KernelFace
from tests.pool.files import MIB, find, pattern, read, settled

DATA = pattern(100_000)
SECOND = 10**9


class Left:
    """Files as an earlier daemon left them on its tier."""

    def __init__(self, tier: DramTier) -> None:
        self.tier = tier

    def page(
        self,
        path: bytes,
        data: bytes = DATA,
        *,
        digest: bytes | None = None,
        used: int = 1,
        owner: Any = None,
    ) -> None:
        """``used``: seconds since 1970 of its last use. An empty ``digest`` is none."""
        fd = self.tier.create(path)
        os.write(fd, data)
        text = digest_of(data).format().encode() if digest is None else digest
        if text:
            self.tier.set_attribute(fd, DIGEST, text)
        self.tier.set_attribute(fd, OWNER, files.OWNER.format().encode() if owner is None else owner)
        os.close(fd)
        self.tier.utime(path, (used * SECOND, used * SECOND))

    def directory(self, path: bytes, owner: bytes | None = None) -> None:
        self.tier.mkdir(path)
        if owner is not None:
            self.tier.set_attribute(path, OWNER, owner)

    def damage(self, path: bytes, offset: int = 0) -> None:
        fd = self.tier.open(path, os.O_RDWR)
        byte = os.pread(fd, 1, offset)
        os.pwrite(fd, bytes([byte[0] ^ 1]), offset)
        os.close(fd)


@pytest.fixture
def left(tier: DramTier) -> Left:
    return Left(tier)


@pytest.fixture
def adopted(left: Left, pool: Pool, face: KernelFace) -> Callable[[], Pool]:
    """Adopts what was left, as a daemon does before anybody asks."""

    def adopt() -> Pool:
        adoption.adopt(pool)
        pool.attach_face(face)
        return pool

    return adopt


@pytest.fixture
def pool(tier: DramTier, face: KernelFace) -> Iterator[Pool]:
    """Not yet told of the kernel."""
    pool = Pool(tier, ROOT_OWNER)
    yield pool
    try:
        check_pool(pool, face)
    finally:
        pool.close()
        face.end()


async def test_names_sizes_and_owners_are_as_before(left: Left, adopted: Callable[[], Pool]) -> None:
    left.directory(b"d", b"40711 5 6")
    left.directory(b"d/e", b"42770 7 8")
    left.page(b"d/e/page")
    left.page(b"top", pattern(2 * MIB, 9))
    pool = adopted()
    assert find(pool, b"d").owner == Owner(stat.S_IFDIR | 0o711, 5, 6)
    assert find(pool, b"d/e").owner == Owner(stat.S_IFDIR | 0o2770, 7, 8)
    entry = find(pool, b"d/e/page")
    assert (entry.state, entry.size, entry.owner) == (UNCHECKED, len(DATA), files.OWNER)
    assert pool.status(entry).st_size == len(DATA)
    assert pool.counters.adopted == pool.pages == 2
    assert pool.counters.dropped_at_start == 0
    assert pool.evictor._largest == 2 * MIB


async def test_a_page_is_checked_at_its_first_open_and_only_then(
    left: Left, adopted: Callable[[], Pool], openings: Openings, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = 0
    well = opening.digest_file  # type: ignore[attr-defined]

    def count(fd: int) -> Digest:
        nonlocal checked
        checked += 1
        digest: Digest = well(fd)
        return digest

    monkeypatch.setattr(opening, "digest_file", count)
    left.page(b"page")
    pool = adopted()
    entry = find(pool, b"page")
    results: list[bytes] = []

    async def read_it() -> None:
        results.append(await read(openings, entry))

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(read_it)
    assert results == [DATA] * 5
    assert await read(openings, entry) == DATA
    assert entry.state == SEALED
    assert checked == 1
    assert pool.counters.hits == 6


@pytest.mark.parametrize("offset", [0, 50_000, len(DATA) - 1])
@pytest.mark.parametrize("writing", [False, True])
async def test_damaged_bytes_are_never_given(
    left: Left,
    adopted: Callable[[], Pool],
    openings: Openings,
    face: KernelFace,
    expect_log: LogGuard,
    offset: int,
    writing: bool,
) -> None:
    expect_log("page is damaged and dropped: its bytes are xxh3-128")
    left.page(b"page")
    left.directory(b"d")
    left.tier.link(b"page", b"d/link")
    left.damage(b"page", offset)
    pool = adopted()
    entry = find(pool, b"page")
    entry.lookups = 1
    for _ in range(2):
        call = openings.open_writing(entry, truncate=False) if writing else openings.open_reading(entry)
        with pytest.raises(StalePage):
            await call
    assert pool.tier.list(b"") == [b"d"]
    assert pool.tier.list(b"d") == []
    assert pool.counters.misses["corrupt"] == 1
    assert pool.counters.hits == 0
    assert pool.tier.room().used_bytes == 0
    assert len(face.invalidated) == 2
    files.forget(pool, entry.number, 1)


async def test_a_damaged_page_that_is_written_anew_need_not_be_checked(
    left: Left, adopted: Callable[[], Pool], openings: Openings
) -> None:
    left.page(b"page")
    left.damage(b"page")
    pool = adopted()
    await files.rewrite(openings, find(pool, b"page"), b"new bytes")
    await settled(pool)
    assert files.is_intact(pool, b"page", b"new bytes")


@pytest.mark.parametrize(
    "digest",
    [
        b"",
        b"garbage",
        b"xxh3-128:0:5",
        b"\xff\xfe",
        Digest("0" * 32, len(DATA) - 1).format().encode(),
        b"md5:" + b"0" * 32 + b":100000",
    ],
)
async def test_a_file_without_a_digest_of_its_own_is_dropped(
    left: Left, adopted: Callable[[], Pool], digest: bytes
) -> None:
    left.page(b"draft", digest=digest)
    left.page(b"page")
    pool = adopted()
    assert pool.tier.list(b"") == [b"page"]
    assert pool.counters.dropped_at_start == 1
    assert pool.counters.adopted == 1


@pytest.mark.parametrize(
    "owner", [b"garbage", b"", b"644 1 2", b"40755 1 2", b"100644 1 99999999999", b"\xff"]
)
async def test_a_file_without_an_owner_is_dropped(
    left: Left, adopted: Callable[[], Pool], owner: bytes
) -> None:
    left.page(b"page", owner=owner)
    pool = adopted()
    assert pool.tier.list(b"") == []
    assert len(pool.index) == 1


async def test_a_directory_without_an_owner_belongs_to_the_daemon(
    left: Left, adopted: Callable[[], Pool]
) -> None:
    for name, owner in ((b"none", None), (b"garbage", b"garbage"), (b"file", b"100644 1 2")):
        left.directory(name, owner)
        left.page(name + b"/page")
    pool = adopted()
    for name in (b"none", b"garbage", b"file"):
        assert find(pool, name).owner == Owner(stat.S_IFDIR | 0o755, 0, 0)
        assert find(pool, name + b"/page").state == UNCHECKED


async def test_things_that_no_daemon_made_are_dropped(
    left: Left, adopted: Callable[[], Pool], tier: DramTier
) -> None:
    os.mkfifo(tier.directory / "fifo")
    os.symlink("/etc/passwd", tier.directory / "symlink")
    os.mknod(tier.directory / "device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    left.directory(b"d")
    os.symlink("/etc", tier.directory / "d" / "symlink")
    left.page(b".kvfs-draft-7", digest=b"")
    pool = adopted()
    assert pool.tier.list(b"") == [b"d"]
    assert pool.tier.list(b"d") == []
    assert pool.counters.dropped_at_start == 5


async def test_what_has_a_name_of_our_own_in_the_root_is_dropped(
    left: Left, adopted: Callable[[], Pool], tier: DramTier
) -> None:
    left.page(b".kvfs-owner")
    left.page(b"page")
    tier.link(b"page", b".kvfs-draft-3")
    left.directory(b".kvfs-quarantine")
    left.page(b".kvfs-quarantine/page")
    left.directory(b"d")
    left.page(b"d/.kvfs-owner")
    pool = adopted()
    assert set(pool.index.root.children) == {b"page", b"d"}
    assert find(pool, b"d/.kvfs-owner").state == UNCHECKED
    assert pool.status(find(pool, b"page")).st_nlink == 1
    assert pool.counters.adopted == 2


async def test_symlinks_and_fifos_of_users_are_kept(left: Left, adopted: Callable[[], Pool]) -> None:
    left.page(b"symlink", b"/target", digest=b"", owner=b"120777 1 2")
    left.page(b"fifo", b"", digest=b"", owner=b"10600 1 2")
    left.tier.link(b"fifo", b"fifo link")
    pool = adopted()
    assert find(pool, b"symlink").state == find(pool, b"fifo").state == OTHER
    assert find(pool, b"fifo link") is find(pool, b"fifo")
    assert pool.counters.adopted == 0


async def test_hard_links_are_one_page(left: Left, adopted: Callable[[], Pool], openings: Openings) -> None:
    left.directory(b"d")
    left.page(b"page")
    for name in (b"link", b"d/link"):
        left.tier.link(b"page", name)
    left.page(b"draft", digest=b"")
    left.tier.link(b"draft", b"d/draft")
    pool = adopted()
    entry = find(pool, b"page")
    assert find(pool, b"link") is find(pool, b"d/link") is entry
    assert len(entry.names()) == 3
    assert pool.pages == pool.counters.adopted == 1
    assert pool.index.find(b"d/draft") is None
    assert await read(openings, entry) == DATA


async def test_pages_leave_in_the_order_of_their_last_use(left: Left, adopted: Callable[[], Pool]) -> None:
    left.directory(b"d")
    for name, used in ((b"c", 30), (b"a", 10), (b"d/d", 40), (b"b", 20)):
        left.page(name, pattern(MIB), used=used)
    left.page(b"small", used=1)
    left.page(b"tiny", b"tiny", used=2)
    left.tier.utime(b"a", (50 * SECOND, 10 * SECOND))  # read again later
    pool = adopted()
    assert [entry.name for entry in pool.policy.victims()] == [b"small", b"b", b"c", b"d", b"a", b"tiny"]
    await pool.evictor.free(2 * MIB)
    assert pool.index.find(b"b") is pool.index.find(b"small") is None


async def test_reading_a_page_is_seen_in_the_order_of_the_next_daemon(
    left: Left, adopted: Callable[[], Pool], openings: Openings, tier: DramTier
) -> None:
    for number in range(5):
        left.page(b"%d" % number, used=number + 1)
    pool = adopted()
    await read(openings, find(pool, b"1"))
    again = Pool(tier, ROOT_OWNER)
    adoption.adopt(again)
    assert [entry.name for entry in again.policy.victims()] == [b"0", b"2", b"3", b"4", b"1"]


async def test_meant_holes_are_still_meant(
    left: Left, adopted: Callable[[], Pool], openings: Openings
) -> None:
    left.page(b"sparse")
    left.tier.set_attribute(b"sparse", SPARSE, b"1")
    pool = adopted()
    entry = find(pool, b"sparse")
    await openings.open_writing(entry, truncate=False)
    files.put(entry, b"far away", 4 * MIB)
    pool.remove_writer(entry)
    await settled(pool)
    assert entry.state == SEALED


async def test_an_unchecked_page_can_be_evicted_renamed_linked_and_removed(
    left: Left, adopted: Callable[[], Pool], openings: Openings
) -> None:
    for number, name in enumerate((b"evicted", b"renamed", b"linked", b"removed")):
        left.page(name, used=number + 1)
    pool = adopted()
    root = pool.index.root
    await pool.evictor.free(1)
    pool.names.rename(root, b"renamed", root, b"new name", 0)
    pool.names.link(find(pool, b"linked"), root, b"link")
    assert pool.names.unlink(root, b"removed") == -1
    assert sorted(pool.tier.list(b"")) == [b"link", b"linked", b"new name"]
    for name in (b"new name", b"link"):
        assert await read(openings, find(pool, name)) == DATA


async def test_opens_that_are_refused_hold_nothing(
    left: Left,
    adopted: Callable[[], Pool],
    openings: Openings,
    face: KernelFace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A first open fails half-way, for want of a descriptor, say; the next one works."""
    left.page(b"page")
    pool = adopted()
    entry = find(pool, b"page")

    def fail(_path: bytes, _flags: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(pool.tier, "open", fail)
        with pytest.raises(OSError, match="Too many"):
            await openings.open_reading(entry)
    check_pool(pool, face)
    assert await read(openings, entry) == DATA


async def test_an_empty_tier_is_no_news(
    adopted: Callable[[], Pool], caplog: pytest.LogCaptureFixture
) -> None:
    pool = adopted()
    assert len(pool.index) == 1
    assert caplog.messages == []
    assert DRAFT not in {entry.state for entry in pool.index.entries()}
