"""New pages: drafts, batch commits, and clients that end in between."""

from __future__ import annotations

import errno
import mmap
import os
import socket
import stat

import pytest
import trio

from kvfs.errors import FileTooLarge, NotPermitted, OutOfRoom, PageInUse, UsageError
from kvfs.opening import Openings
from kvfs.page import DIGEST, Digest, Owner, digest_of
from kvfs.pool import Pool
from kvfs.service.drafts import Drafts
from kvfs.service.messages import (
    ABSENT,
    MOST_DESCRIPTORS,
    Abort,
    Commit,
    Create,
    Created,
    Delete,
    Exists,
)
from kvfs.service.peers import Peer
from kvfs.service.places import Place, Places
from kvfs.service.server import Service
from tests.batches.asking import Asking
from tests.batches.conftest import Ask
from tests.pool.files import MIB, create, left, mkdir, page, pattern, put, wait_until

BUSY = PageInUse.errno
WRONG = UsageError.errno


async def test_a_batch_becomes_pages_under_their_keys(pool: Pool, ask: Ask) -> None:
    contents = {b"a/b/%d" % number: pattern(MIB + number, number) for number in range(5)}

    def script(client: Asking) -> None:
        assert client.put(contents, 0o640) == [0] * 5
        for key, content in contents.items():
            assert client.read(key) == content

    await ask(script)
    assert left(pool) == [b"a"]
    for key, content in contents.items():
        entry = pool.index.find(key)
        assert entry is not None
        assert entry.owner == Owner(stat.S_IFREG | 0o640, os.getuid(), os.getgid())
        assert Digest.parse(pool.tier.get_attribute(key, DIGEST)) == digest_of(content)
    directory = pool.index.find(b"a/b")
    assert directory is not None
    assert stat.S_IMODE(directory.owner.mode) == 0o750
    assert pool.counters.sealed == 5


async def test_a_draft_has_no_name_before_it_is_committed(pool: Pool, ask: Ask) -> None:
    def script(client: Asking) -> None:
        client.create([b"bytes"])
        assert client.codes(Exists(client.number(), [b".kvfs-batch-1"])) == [ABSENT]
        assert pool.index.root.children == {}
        assert left(pool) == [b".kvfs-batch-1"]

    await ask(script)
    assert left(pool) == []


async def test_nothing_is_committed_while_somebody_can_write_it(ask: Ask) -> None:
    def script(client: Asking) -> None:
        answer, [first, second] = client.ask(Create(client.number(), [4096, 4096]))
        assert isinstance(answer, Created)
        memory = mmap.mmap(first, 4096)
        memory[:5] = b"bytes"
        os.close(first)
        commit = Commit(client.number(), answer.drafts, [b"first", b"second"])
        assert client.codes(commit) == [BUSY, BUSY]
        memory.close()
        assert client.codes(commit) == [BUSY, BUSY]
        os.close(second)
        assert client.read(b"first") is None
        assert client.codes(commit) == [0, 0]
        assert client.read(b"first") == b"bytes".ljust(4096, b"\0")
        assert client.failure(commit).code == WRONG  # they are pages by now

    await ask(script)


async def test_a_draft_of_another_size_is_no_page(ask: Ask) -> None:
    def script(client: Asking) -> None:
        answer, [fd] = client.ask(Create(client.number(), [4096]))
        assert isinstance(answer, Created)
        os.ftruncate(fd, 4095)
        os.close(fd)
        assert client.codes(Commit(client.number(), answer.drafts, [b"page"])) == [WRONG]

    await ask(script)


async def test_a_page_that_is_replaced_stays_for_its_readers(pool: Pool, ask: Ask) -> None:
    await page(pool, b"page", b"old bytes")

    def script(client: Asking) -> None:
        _, [fd] = client.open([b"page"])
        memory = mmap.mmap(fd, 9, prot=mmap.PROT_READ)
        for turn in range(20):
            assert client.put({b"page": b"new %d" % turn}) == [0]
            assert client.read(b"page") == b"new %d" % turn
        assert memory[:] == b"old bytes"
        memory.close()
        os.close(fd)

    await ask(script)
    assert left(pool) == [b"page"]


async def test_a_commit_replaces_what_is_being_written(pool: Pool, ask: Ask) -> None:
    draft = create(pool, b"page")
    put(draft, b"half")

    def script(client: Asking) -> None:
        assert client.put({b"page": b"whole"}) == [0]
        assert client.read(b"page") == b"whole"

    await ask(script)
    pool.remove_writer(draft)
    found = pool.index.find(b"page")
    assert found is not None
    assert found is not draft


BAD_KEYS = ("", "/", "/a", "a/", "a//b", "..", "a/../b", ".", ".kvfs", ".kvfs-x", "\0", "n" * 256)
TAKEN_KEYS = ("directory", "file/below")


@pytest.mark.parametrize("key", [key.encode() for key in BAD_KEYS + TAKEN_KEYS])
async def test_all_or_nothing_where_a_key_cannot_be(pool: Pool, ask: Ask, key: bytes) -> None:
    mkdir(pool, b"directory")
    await page(pool, b"file", b"bytes")

    def script(client: Asking) -> None:
        drafts = client.create([b"good", b"bad"])
        assert client.codes(Commit(client.number(), drafts, [b"good", key])) == [WRONG, WRONG]
        assert client.read(b"good") is None
        assert client.codes(Commit(client.number(), drafts, [b"good", b"better"])) == [0, 0]

    await ask(script)


async def test_what_a_commit_may_not_name(ask: Ask) -> None:
    def script(client: Asking) -> None:
        one, other = client.create([b"1", b"2"])
        for drafts, keys in (
            ([one], [b"a", b"b"]),
            ([one, one], [b"a", b"b"]),
            ([one, other], [b"a", b"a"]),
            ([one, 99], [b"a", b"b"]),
        ):
            assert client.failure(Commit(client.number(), drafts, keys)).code == WRONG
        assert client.codes(Abort(client.number(), [one, one, 99])) == [0, ABSENT, ABSENT]
        assert client.codes(Commit(client.number(), [other], [b"a"])) == [0]

    await ask(script)


async def test_a_draft_is_of_its_connection_only(ask: Ask) -> None:
    def script(client: Asking) -> None:
        drafts.extend(client.create([b"mine"]))
        held.set()
        done.wait_sync()
        assert client.codes(Commit(client.number(), drafts, [b"page"])) == [0]

    def thief(client: Asking) -> None:
        assert client.failure(Commit(client.number(), drafts, [b"stolen"])).code == WRONG
        assert client.codes(Abort(client.number(), drafts)) == [ABSENT]

    drafts: list[int] = []
    held, done = _Flag(), _Flag()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, script)
        await held.wait()
        await ask(thief)
        done.set()


class _Flag:
    """Set in one thread, waited for in another or by a task."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()

    def set(self) -> None:
        self._theirs.close()

    def wait_sync(self) -> None:
        self._ours.recv(1)
        self._ours.close()

    async def wait(self) -> None:
        await trio.lowlevel.wait_readable(self._ours)
        self._ours.close()


async def test_drafts_are_bounded(pool: Pool, ask: Ask) -> None:
    half = pool.tier.target_bytes // 2

    def script(client: Asking) -> None:
        assert client.failure(Create(client.number(), [half + 1])).code == FileTooLarge.errno
        assert client.failure(Create(client.number(), [half, 1])).code == OutOfRoom.errno
        assert client.failure(Create(client.number(), [])).code == WRONG
        assert client.failure(Create(client.number(), [5, 0])).code == WRONG
        assert client.failure(Create(client.number(), [1] * (MOST_DESCRIPTORS + 1))).code == WRONG
        answer, [fd] = client.ask(Create(client.number(), [half]))
        os.close(fd)
        assert client.failure(Create(client.number(), [1])).code == OutOfRoom.errno
        assert isinstance(answer, Created)
        assert client.codes(Abort(client.number(), answer.drafts)) == [0]
        os.close(client.ask(Create(client.number(), [1]))[1][0])

    await ask(script)


async def test_room_for_drafts_is_made_by_eviction(pool: Pool, ask: Ask) -> None:
    for number in range(7):
        await page(pool, b"%d" % number, pattern(8 * MIB, number))

    def script(client: Asking) -> None:
        assert client.put({b"new": pattern(24 * MIB)}) == [0]
        assert client.read(b"new") == pattern(24 * MIB)

    await ask(script)
    assert pool.counters.evictions >= 2


async def test_a_client_that_dies_leaves_nothing(pool: Pool, service: Service, ask: Ask) -> None:
    before = pool.tier.room().free_bytes

    def script(client: Asking) -> None:
        client.create([pattern(MIB)] * 8)
        number = client.number()
        client.send(Create(number, [20 * MIB]))  # and nobody takes the answer

    await ask(script)
    assert left(pool) == []
    await wait_until(lambda: pool.tier.room().free_bytes == before)


async def test_a_client_that_dies_while_it_commits_leaves_all_or_nothing(pool: Pool, ask: Ask) -> None:
    def script(client: Asking) -> None:
        drafts = client.create([pattern(4 * MIB, number) for number in range(4)])
        client.send(Commit(client.number(), drafts, [b"d/%d" % number for number in range(4)]))

    await ask(script)
    assert len([name for name in left(pool) if name.startswith(b".")]) == 0
    directory = pool.index.find(b"d")
    names = [] if directory is None else pool.tier.list(b"d")
    assert len(names) in (0, 4)


async def test_deleting_takes_names_away(pool: Pool, ask: Ask) -> None:
    await page(pool, b"page", b"bytes")
    mkdir(pool, b"directory")

    def script(client: Asking) -> None:
        keys = [b"page", b"page", b"directory", b"no/where", b"/page"]
        _, [fd] = client.open([b"page"])
        assert client.codes(Delete(client.number(), keys)) == [0, ABSENT, ABSENT, ABSENT, ABSENT]
        assert os.pread(fd, 9, 0) == b"bytes"
        os.close(fd)

    await ask(script)
    assert left(pool) == [b"directory"]


async def test_who_may_put_a_page_where(pool: Pool) -> None:
    forbidden = NotPermitted.errno
    places = Places(pool)
    member, stranger = Peer(5, 6, frozenset((6, 1002)), 1), Peer(5, 6, frozenset((6,)), 1)
    directory = mkdir(pool, b"d")
    existing = await page(pool, b"page", b"bytes", directory)
    pool.index.root.owner = Owner(stat.S_IFDIR | 0o755, 0, 0)
    pool.set_owner(directory, Owner(stat.S_IFDIR | 0o2770, 1001, 1002))
    assert await places.prepare(b"d/page", stranger, 0o644) == forbidden
    assert await places.prepare(b"new", member, 0o644) == forbidden
    assert await places.prepare(b"new/page", member, 0o644) == forbidden
    place = await places.prepare(b"d/page", member, 0o644)
    assert place == Place(directory, b"page", Owner(stat.S_IFREG | 0o644, 5, 1002))
    made = await places.prepare(b"d/deep/page", member, 0o640)
    assert isinstance(made, Place)
    assert made.parent.owner == Owner(stat.S_IFDIR | 0o2750, 5, 1002)
    pool.set_owner(directory, Owner(stat.S_IFDIR | 0o3770, 1001, 1002))  # sticky: not theirs to replace
    assert await places.prepare(b"d/page", member, 0o644) == forbidden
    pool.set_owner(existing, Owner(existing.owner.mode, 5, 6))
    assert isinstance(await places.prepare(b"d/page", member, 0o644), Place)
    pool.names.remove_directory(made.parent.parent or pool.index.root, b"deep")
    assert places.check(made, member) == ABSENT


async def test_a_tier_that_fails_in_the_middle_is_told_key_by_key(
    pool: Pool, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = pool.names.rename

    def failing(*arguments: object) -> int:
        if arguments[3] == b"second":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(pool.names, "rename", failing)

    def script(client: Asking) -> None:
        pages = {b"first": b"1", b"second": b"2", b"third": b"3"}
        assert client.put(pages) == [0, errno.EIO, 0]
        assert [client.read(key) for key in pages] == [b"1", None, b"3"]

    await ask(script)
    assert left(pool) == [b"first", b"third"]


async def test_writers_that_take_the_room_again_and_again(
    pool: Pool, openings: Openings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Drafts, "_allocate", full)
    drafts = Drafts(pool, openings)
    session = object()
    assert drafts.create_now(Create(1, [1]), session) is None  # type: ignore[arg-type]
    with pytest.raises(OutOfRoom):
        await drafts.create(Create(1, [1]), session)  # type: ignore[arg-type]
    assert (drafts.count, drafts.bytes, left(pool)) == (0, 0, [])
