"""What the client does on a mount: the same for threads, trio and asyncio, with the socket and without."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.errors import NoSuchPage, PageInUse, UsageError, WrongSize
from tests.mounted.running import MIB, KvfsMount, digest, wait_sealed, wait_until
from tests.service.faces import FACES, Scenario

PAGE = os.urandom(2 * MIB)
OTHER = os.urandom(2 * MIB)

Run = Callable[[Scenario], None]


@pytest.fixture(scope="module")
def mount(scratch: Path) -> Iterator[KvfsMount]:
    with KvfsMount(scratch / "faces", 256 * MIB, "--mode", "0755") as shared:
        yield shared
        shared.umount()


@pytest.fixture(params=FACES)
def run(request: pytest.FixtureRequest, mount: KvfsMount) -> Run:
    """Runs a scenario with a client of the mount."""
    return partial(FACES[request.param], mount.path)


def test_what_was_put_is_got(run: Run, mount: KvfsMount) -> None:
    async def scenario(kv: Any) -> None:
        await kv.put("model/ab/page", PAGE)
        assert await kv.get("model/ab/page") == PAGE
        assert (mount.path / "model/ab/page").read_bytes() == PAGE
        memory = bytearray(len(PAGE))
        assert await kv.get_into("model/ab/page", memory) == len(PAGE)
        assert memory == PAGE

    run(scenario)


def test_what_is_put_again_replaces_it(run: Run) -> None:
    async def scenario(kv: Any) -> None:
        await kv.put("again", PAGE)
        with await kv.open_batch(["again"]) as pages:
            before = pages["again"]
            await kv.put("again", OTHER)
            assert await kv.get("again") == OTHER
            assert before == PAGE

    run(scenario)


def test_a_missing_page_is_a_miss(run: Run) -> None:
    async def scenario(kv: Any) -> None:
        for call in (kv.get("missing"), kv.get_into("missing", bytearray(1)), kv.stat("missing")):
            with pytest.raises(NoSuchPage, match="missing"):
                await call
        assert not await kv.exists("missing")
        assert await kv.stat(["missing"]) == {}
        assert await kv.delete(["missing"]) == 0
        with await kv.open_batch(["missing"]) as pages:
            assert dict(pages) == {}
            assert pages.missing == ("missing",)

    run(scenario)


def test_looking_up_many(run: Run) -> None:
    async def scenario(kv: Any) -> None:
        keys = [f"chain/{number}" for number in range(8)]
        for key in keys[:3] + keys[4:]:
            await kv.put(key, b"x")
        assert await kv.exists(keys) == [True] * 3 + [False] + [True] * 4
        assert await kv.exists("chain/0") is True
        assert await kv.match_prefix(keys) == 3
        assert await kv.match_prefix(keys[4:]) == 4
        assert await kv.match_prefix([]) == 0
        assert await kv.delete(keys) == 7
        assert await kv.exists(keys) == [False] * 8

    run(scenario)


def test_pages_are_views_that_cannot_be_written(run: Run) -> None:
    async def scenario(kv: Any) -> None:
        sizes = {"batch/small": 10, "batch/large": len(PAGE), "batch/odd": 4097}
        for key, size in sizes.items():
            await kv.put(key, PAGE[:size])
        with await kv.open_batch([*sizes, "batch/missing"]) as pages:
            assert list(pages) == list(sizes)
            assert pages.missing == ("batch/missing",)
            for key, size in sizes.items():
                assert pages.size(key) == size
                memory = bytearray(size)
                pages.read_into(key, memory)
                assert memory == PAGE[:size]
                assert pages[key] == PAGE[:size]
                assert pages[key].readonly
                pages.read_into(key, memory := bytearray(size))
                assert memory == PAGE[:size]
        await kv.delete(list(sizes))
        with pytest.raises(KeyError):
            pages["batch/small"]

    run(scenario)


def test_a_view_outlives_the_batch_and_the_page(run: Run) -> None:
    async def scenario(kv: Any) -> None:
        await kv.put("outlives", PAGE)
        with await kv.open_batch(["outlives"]) as pages:
            view = pages["outlives"]
        await kv.delete(["outlives"])
        assert view == PAGE

    run(scenario)


def test_memory_of_another_size_is_refused(run: Run) -> None:
    async def scenario(kv: Any) -> None:
        await kv.put("sized", b"12345")
        for size in (4, 6):
            with pytest.raises(WrongSize, match=f"5 bytes.*{size}"):
                await kv.get_into("sized", bytearray(size))
        with await kv.open_batch(["sized"]) as pages:
            with pytest.raises(WrongSize):
                pages.read_into("sized", bytearray(4))
            pages.map()
            with pytest.raises(WrongSize):
                pages.read_into("sized", bytearray(4))
        drafts = await kv.create_batch({"draft": 5})
        with pytest.raises(WrongSize):
            drafts.write("draft", b"1234")
        await drafts.abort()

    run(scenario)


def test_drafts_become_pages_together(run: Run, mount: KvfsMount) -> None:
    async def scenario(kv: Any) -> None:
        drafts = await kv.create_batch({"made/mapped": len(PAGE), "made/written": 5})
        assert await kv.exists(["made/mapped", "made/written"]) == [False, False]
        drafts["made/mapped"][:] = PAGE
        drafts.write("made/written", b"hello")
        assert await kv.exists(["made/mapped", "made/written"]) == [False, False]
        await drafts.commit()
        assert await kv.get("made/mapped") == PAGE
        assert await kv.get("made/written") == b"hello"
        with pytest.raises(ValueError, match="committed"):
            await drafts.commit()
        wait_sealed(mount.path / "made/mapped", mount.path / "made/written")
        await kv.delete(["made/mapped", "made/written"])

    run(scenario)


def test_drafts_that_are_aborted_leave_nothing(run: Run, mount: KvfsMount) -> None:
    async def scenario(kv: Any) -> None:
        class Left(Exception):
            pass

        async def leave() -> None:
            async with await kv.create_batch({"kept": 4 * MIB, "unmade/new": 4 * MIB}) as drafts:
                drafts.write("kept", bytes(4 * MIB))
                raise Left

        await kv.put("kept", b"before")
        used = mount.used_bytes()
        with pytest.raises(Left):
            await leave()
        assert await kv.get("kept") == b"before"
        assert not await kv.exists("unmade/new")
        wait_until(lambda: mount.used_bytes() <= used, 5, "the drafts are gone")

    run(scenario)


def test_drafts_are_not_committed_under_views_of_them(run: Run) -> None:
    async def scenario(kv: Any) -> None:
        drafts = await kv.create_batch({"viewed": 4})
        view = drafts["viewed"]
        view[:] = b"text"
        part = view[1:]
        del view
        with pytest.raises(PageInUse, match="views"):
            await drafts.commit()
        part.release()
        await drafts.commit()
        assert await kv.get("viewed") == b"text"

    run(scenario)


def test_pages_that_are_still_made_are_waited_for(run: Run, mount: KvfsMount) -> None:
    async def scenario(kv: Any) -> None:
        await kv.put("waited/first", b"first")
        with kvfs.connect(mount.path) as other:
            later = threading.Timer(0.2, other.put, ("waited/second", b"second"))
            later.start()
            with await kv.open_batch(["waited/first", "waited/second"], wait_seconds=10) as pages:
                assert [bytes(page) for page in pages.values()] == [b"first", b"second"]
            later.join()
        begin = time.monotonic()
        with await kv.open_batch(["waited/first", "missing"], wait_seconds=0.1) as pages:
            assert pages.missing == ("missing",)
        assert 0.1 <= time.monotonic() - begin < 5
        await kv.delete(["waited/first", "waited/second"])

    run(scenario)


def test_what_is_no_key_is_refused(run: Run) -> None:
    async def scenario(kv: Any) -> None:
        for key in (
            "",
            "/",
            "/a",
            "a/",
            "a//b",
            ".",
            "..",
            "../a",
            "a/../b",
            "a/./b",
            ".kvfs/socket",
            "a\0b",
        ):
            with pytest.raises(UsageError):
                await kv.put(key, b"x")
            with pytest.raises(UsageError):
                await kv.exists([key])
            with pytest.raises(UsageError):
                await kv.open_batch(["fine", key])
        with pytest.raises(UsageError, match="one key"):
            await kv.open_batch("key")
        with pytest.raises(UsageError, match="no bytes"):
            await kv.put("empty", b"")
        with pytest.raises(UsageError, match="at least one"):
            await kv.create_batch({"empty": 0})

    run(scenario)


def test_what_is_known_of_a_page(run: Run, mount: KvfsMount) -> None:
    async def scenario(kv: Any) -> None:
        await kv.put("known", PAGE)
        wait_sealed(mount.path / "known")
        status = await kv.stat("known")
        assert status.size == len(PAGE)
        assert status.tier == "dram"
        assert status.digest == digest(mount.path / "known")
        assert not status.pinned
        assert await kv.pin(["known", "missing"]) == 1
        assert (await kv.stat(["known", "missing"]))["known"].pinned
        assert await kv.unpin(["known"]) == 1
        assert not (await kv.stat("known")).pinned
        assert await kv.touch(["known", "missing"]) == 1
        assert await kv.prefetch(["known", "missing"]) == 1

    run(scenario)
