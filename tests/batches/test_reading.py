"""Which keys have pages, and their descriptors."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from kvfs.errors import NotPermitted, TooManyFiles
from kvfs.index import OTHER, SEALED, Directory, Index
from kvfs.page import Owner
from kvfs.pool import Pool
from kvfs.service.finding import Finder
from kvfs.service.messages import ABSENT, Count, Exists, MatchPrefix, Open, Stat, Stats, Touch
from kvfs.service.peers import Peer
from kvfs.service.server import Service
from kvfs.tiers.read_only import ReadOnlyView
from tests.batches.asking import Asking
from tests.batches.conftest import Ask
from tests.pool.files import create, mkdir, page, pattern, put

MEMBER = Peer(1005, 1006, frozenset((1006, 1002)), 1)
STRANGER = Peer(1005, 1006, frozenset((1006,)), 1)


async def test_a_draft_is_absent_and_a_page_is_there(pool: Pool, ask: Ask) -> None:
    await page(pool, b"page", b"bytes")
    draft = create(pool, b"draft")
    put(draft, b"not whole yet")
    mkdir(pool, b"directory")

    def script(client: Asking) -> None:
        keys = [b"page", b"draft", b"directory", b"absent", b"page/below", b"", b"../page", b"/page"]
        assert client.codes(Exists(client.number(), keys)) == [0] + [ABSENT] * 7
        answer, descriptors = client.open(keys)
        assert answer.codes == [0] + [ABSENT] * 7
        assert answer.sizes == [5] + [0] * 7
        assert os.pread(descriptors[0], 9, 0) == b"bytes"
        os.close(descriptors.pop())
        assert not descriptors

    await ask(script)
    pool.remove_writer(draft)


async def test_the_leading_run_ends_at_the_first_gap(pool: Pool, ask: Ask) -> None:
    keys = [b"%d" % number for number in range(6)]
    for key in keys[:3] + keys[4:]:
        await page(pool, key, key)

    def script(client: Asking) -> None:
        for asked, count in ((keys, 3), (keys[4:], 2), ([b"absent"], 0), ([], 0)):
            number = client.number()
            assert client.ask(MatchPrefix(number, asked)) == (Count(number, count), [])

    await ask(script)


async def test_nobody_can_write_through_a_descriptor_for_reading(pool: Pool, ask: Ask) -> None:
    await page(pool, b"page", b"bytes")

    def script(client: Asking) -> None:
        _, [fd] = client.open([b"page"])
        again = f"/proc/self/fd/{fd}"
        for attempt in (
            lambda: os.open(again, os.O_RDWR),
            lambda: os.truncate(again, 0),
            lambda: os.setxattr(fd, "trusted.kvfs.digest", b""),
            lambda: os.fchmod(fd, 0o777),
        ):
            with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
                attempt()
        os.close(fd)

    await ask(script)


async def test_hits_and_misses_count_as_opens_do(pool: Pool, ask: Ask) -> None:
    one = await page(pool, b"one", b"1")
    await page(pool, b"other", b"2")

    def script(client: Asking) -> None:
        for fd in client.open([b"one", b"other", b"absent/absent"])[1]:
            os.close(fd)
        client.codes(Exists(client.number(), [b"one", b"absent/too"]))
        client.codes(Touch(client.number(), [b"one", b"absent/three"]))
        number = client.number()
        answer, _ = client.ask(Stat(number, [b"one", b"absent"]))
        assert isinstance(answer, Stats)
        assert answer.codes == [0, ABSENT]
        assert answer.pages[0] is not None
        assert (answer.pages[0].size, answer.pages[0].hits, answer.pages[0].tier) == (1, 2, "dram")
        assert answer.pages[1] is None

    await ask(script)
    pool.uses.collect()
    assert (one.hits, pool.counters.hits) == (2, 3)
    assert pool.counters.misses["absent"] == 2  # to touch is not to look for


async def test_an_open_waits_for_a_page_that_is_being_made(pool: Pool, ask: Ask) -> None:
    draft = create(pool, b"draft")
    put(draft, b"whole")

    async def finish() -> None:
        await trio.sleep(0.05)
        pool.remove_writer(draft)

    def script(client: Asking) -> None:
        assert client.open([b"draft"])[0].codes == [ABSENT]
        answer, descriptors = client.open([b"draft"], wait_seconds=10)
        assert answer.codes == [0]
        assert os.pread(descriptors[0], 9, 0) == b"whole"
        os.close(descriptors[0])
        assert client.open([b"never"], wait_seconds=0.05)[0].codes == [ABSENT]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(finish)
        await ask(script)


async def test_a_request_that_waits_holds_up_no_other_of_its_connection(ask: Ask) -> None:
    def script(client: Asking) -> None:
        slow, quick = client.number(), client.number()
        client.send(Open(slow, [b"never"], 0.3))
        client.send(Exists(quick, [b"never"]))
        assert [client.receive()[0].number for _ in range(2)] == [quick, slow]

    await ask(script)


async def test_deep_pipelines_never_mix_keys(pool: Pool, ask: Ask) -> None:
    for number in range(40):
        await page(pool, b"%d" % number, pattern(number + 1, number))

    def script(client: Asking) -> None:
        asked: dict[int, list[int]] = {}
        for turn in range(400):
            named = [(turn * 7 + step) % 40 for step in range(3)]
            number = client.number()
            asked[number] = named
            client.send(Open(number, [b"%d" % one for one in named], 0.01 * (turn % 2)))
            while len(asked) > 20:
                check(client, asked)
        while asked:
            check(client, asked)

    def check(client: Asking, asked: dict[int, list[int]]) -> None:
        answer, descriptors = client.receive()
        for named, fd in zip(asked.pop(answer.number), descriptors, strict=True):
            assert os.pread(fd, 100, 0) == pattern(named + 1, named)
            os.close(fd)

    await ask(script)


async def test_without_descriptors_fewer_keys_are_answered(
    pool: Pool, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [b"%d" % number for number in range(4)]
    for key in keys:
        await page(pool, key, key)
    left = 2
    open_file = ReadOnlyView.open

    def scarce(view: ReadOnlyView, path: bytes) -> int:
        if not left:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return open_file(view, path)

    def counted(view: ReadOnlyView, path: bytes) -> int:
        nonlocal left
        fd = scarce(view, path)
        left -= 1
        return fd

    monkeypatch.setattr(ReadOnlyView, "open", counted)

    def script(client: Asking) -> None:
        answer, descriptors = client.open(keys)
        assert answer.codes == [0, 0]
        assert answer.sizes == [1, 1]
        for fd in descriptors:
            os.close(fd)
        assert client.failure(Open(client.number(), keys[2:])).code == TooManyFiles.errno

    await ask(script)


async def test_a_page_that_vanished_behind_our_back_is_absent(
    pool: Pool, ask: Ask, expect_log: object
) -> None:
    await page(pool, b"page", b"bytes")
    pool.tier.unlink(b"page")
    assert callable(expect_log)
    expect_log("page is gone from the tier")

    def script(client: Asking) -> None:
        assert client.open([b"page"])[0].codes == [ABSENT]

    await ask(script)


async def test_permission_is_checked_for_each_key(pool: Pool) -> None:
    directory = mkdir(pool, b"d")  # 0750 of 1001:1002
    entry = await page(pool, b"page", b"1", directory)  # 0640 of 1001:1002
    forbidden = NotPermitted.errno
    pool.index.root.owner = Owner(stat.S_IFDIR | 0o755, 0, 0)
    keys = [b"d/page", b"d/absent", b"d/e/f", b"page"]
    assert Finder(pool.index, STRANGER).find(keys) == [forbidden, forbidden, forbidden, ABSENT]
    assert Finder(pool.index, STRANGER).directory(b"d") == forbidden
    assert Finder(pool.index, MEMBER).find_readable(keys) == [entry, ABSENT, ABSENT, ABSENT]
    pool.set_owner(directory, Owner(stat.S_IFDIR | 0o711, 1001, 1002))
    assert Finder(pool.index, STRANGER).find(keys[:1]) == [entry]
    assert Finder(pool.index, STRANGER).find_readable(keys[:1]) == [forbidden]
    assert Finder(pool.index, STRANGER).directory(b"d") is directory
    pool.set_owner(pool.index.root, Owner(stat.S_IFDIR | 0o700, 0, 0))
    assert Finder(pool.index, MEMBER).find(keys) == [forbidden] * 4


@given(st.text("ab/.", max_size=6))
def test_a_key_is_found_where_it_lies_and_nowhere_else(key: str) -> None:
    """Whatever the slashes: what is found must be at that very path of the tier."""
    index = Index(Owner(stat.S_IFDIR | 0o755, 0, 0))
    paths = {}
    for path in (b"a", b"b/a", b"b/b/a"):
        *directories, name = path.split(b"/")
        parent = index.root
        for directory in directories:
            found = parent.children.get(directory) or index.add(
                parent, directory, Owner(stat.S_IFDIR | 0o755, 0, 0), OTHER
            )
            assert isinstance(found, Directory)
            parent = found
        paths[path] = index.add(parent, name, Owner(stat.S_IFREG | 0o644, 0, 0), SEALED)
    wanted = paths.get(key.encode(), ABSENT)
    assert Finder(index, STRANGER).find([key.encode()]) == [wanted]


def test_a_view_without_the_right_to_mount_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvfs.tiers.base import Tier

    def refuse(dir_fd: int, *, read_only: bool) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr("kvfs.syscalls.clone_mount", refuse)
    (tmp_path / "file").write_bytes(b"bytes")
    tier = Tier("dram", os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY))
    view = ReadOnlyView(tier)
    fd = view.open(b"file")
    assert os.read(fd, 9) == b"bytes"
    os.close(fd)
    assert view.missing == "Operation not permitted"
    view.close()
    tier.close()


async def test_status_tells_of_the_service(service: Service, ask: Ask) -> None:
    await ask(lambda client: None)
    assert service.degraded() == []
    assert service.statistics()["failed"] == 0
