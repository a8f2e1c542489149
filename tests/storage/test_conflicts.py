"""A daemon that was killed before the SSD had followed: the next one moves the copies, and loses none."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvfs.index import Entry
from kvfs.opening import Openings
from kvfs.pool import Pool
from kvfs.storage import adoption
from kvfs.storage.described import RESIDENT
from kvfs.storage.history import Step
from kvfs.syscalls import RENAME_EXCHANGE
from tests.pool import files
from tests.pool.files import pattern, read
from tests.storage.disks import on_ssd, stored
from tests.storage.test_restart import base, daemon, storage  # noqa: F401

CONTENTS = {name: pattern(50_000 + number, number) for number, name in enumerate((b"a", b"b", b"c", b"d"))}


def stop_following(pool: Pool) -> None:
    """From now on the SSD stays as it is, as if the daemon were killed before its next step."""
    history: Any = storage(pool).history
    history._steps.append(Step(lambda: None, None))  # one that it never comes to
    history.append = lambda *_, **__: None


def rename(pool: Pool, old: bytes, new: bytes, flags: int = 0) -> None:
    root = pool.index.root
    fd = pool.names.rename(root, old, root, new, flags)
    assert fd == -1


def is_stored(entry: Entry) -> bool:
    return entry.stored == RESIDENT


async def moved_copies(pool: Pool, expected: dict[bytes, bytes]) -> None:
    """Both tiers have exactly this, and nothing was written for it."""
    await storage(pool).history.settled()
    openings = Openings(pool)
    for name, content in expected.items():
        entry = files.find(pool, name)
        assert entry.stored == RESIDENT, name
        assert on_ssd(pool, name) == content, name
        assert await read(openings, entry) == content, name
    assert storage(pool).demotions.written == 0
    assert set(pool.index.root.children) == set(expected)


async def test_two_names_were_exchanged(base: Path) -> None:  # noqa: F811
    async with daemon(base, keep_dram=True) as pool:
        for name in (b"a", b"b"):
            await stored(pool, name, CONTENTS[name])
        stop_following(pool)
        rename(pool, b"a", b"b", RENAME_EXCHANGE)
    async with daemon(base) as pool:
        await moved_copies(pool, {b"a": CONTENTS[b"b"], b"b": CONTENTS[b"a"]})


async def test_four_names_went_round(base: Path) -> None:  # noqa: F811
    async with daemon(base, keep_dram=True) as pool:
        for name, content in CONTENTS.items():
            await stored(pool, name, content)
        stop_following(pool)
        for old, new in ((b"a", b"b"), (b"b", b"c"), (b"c", b"d")):
            rename(pool, old, new, RENAME_EXCHANGE)
    async with daemon(base) as pool:
        b, c, d, a = CONTENTS[b"b"], CONTENTS[b"c"], CONTENTS[b"d"], CONTENTS[b"a"]
        await moved_copies(pool, {b"a": b, b"b": c, b"c": d, b"d": a})


async def test_what_was_overwritten_goes(base: Path) -> None:  # noqa: F811
    async with daemon(base, keep_dram=True) as pool:
        await stored(pool, b"a", CONTENTS[b"a"])
        stop_following(pool)
        storage(pool).demotions.unstored.settle_seconds = 1000
        await files.rewrite(Openings(pool), files.find(pool, b"a"), CONTENTS[b"b"])
        await files.settled(pool)
    async with daemon(base) as pool:
        await files.wait_until(lambda: files.find(pool, b"a").stored == RESIDENT)
        assert on_ssd(pool, b"a") == CONTENTS[b"b"]


@pytest.mark.parametrize("looks", [0, adoption.MOST_LOOKS])
async def test_a_new_link_is_there_too(
    base: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    looks: int,
) -> None:
    """Also where names change faster than one can look at them."""
    async with daemon(base, keep_dram=True) as pool:
        entry = await stored(pool, b"a", CONTENTS[b"a"])
        stop_following(pool)
        pool.names.link(entry, pool.index.root, b"b")
    monkeypatch.setattr(adoption, "MOST_LOOKS", looks)
    async with daemon(base) as pool:
        await moved_copies(pool, {b"a": CONTENTS[b"a"], b"b": CONTENTS[b"a"]})


async def test_a_link_where_another_page_lies(base: Path) -> None:  # noqa: F811
    """The link is made once what lies there has gone to its own name."""
    async with daemon(base, keep_dram=True) as pool:
        for name in (b"a", b"b"):
            await stored(pool, name, CONTENTS[name])
        stop_following(pool)
        rename(pool, b"b", b"c")
        pool.names.link(files.find(pool, b"a"), pool.index.root, b"b")
    async with daemon(base) as pool:
        a, b = CONTENTS[b"a"], CONTENTS[b"b"]
        await moved_copies(pool, {b"a": a, b"b": a, b"c": b})


@pytest.mark.parametrize("looks", [0, adoption.MOST_LOOKS])
async def test_names_that_change_during_the_walk(
    base: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    looks: int,
) -> None:
    """Pages that DRAM kept are removed and renamed before the walk has come to their copies."""
    async with daemon(base, keep_dram=True) as pool:
        for name, content in CONTENTS.items():
            await stored(pool, name, content)
    monkeypatch.setattr(adoption, "MOST_LOOKS", looks)
    begin = adoption.Adoption._adopt_root

    async def change_names_first(self: adoption.Adoption) -> None:
        pool = self._storage.pool
        rename(pool, b"a", b"e")
        rename(pool, b"b", b"c", RENAME_EXCHANGE)
        if (fd := pool.names.unlink(pool.index.root, b"d")) >= 0:
            os.close(fd)
        await begin(self)

    monkeypatch.setattr(adoption.Adoption, "_adopt_root", change_names_first)
    async with daemon(base) as pool:
        expected = {b"e": CONTENTS[b"a"], b"b": CONTENTS[b"c"], b"c": CONTENTS[b"b"]}
        if looks:
            await moved_copies(pool, expected)
        for name, content in expected.items():
            entry = files.find(pool, name)
            await files.wait_until(partial(is_stored, entry))
            assert on_ssd(pool, name) == content
        assert set(pool.index.root.children) == set(expected)
        assert on_ssd(pool, b"d") is None
