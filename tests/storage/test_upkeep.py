"""What is left over on the SSD is shown and deleted, and everything is counted anew, while pages move."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import trio

from kvfs.errors import TimedOut
from kvfs.pool import Pool
from kvfs.storage import upkeep
from kvfs.storage.described import RESIDENT
from kvfs.storage.set_aside import copies_were_set_aside
from kvfs.storage.storage import Storage
from kvfs.storage.upkeep import leftovers_text
from kvfs.tiers import ssd_scan
from kvfs.tiers.ssd_directory import MARK
from kvfs.tiers.ssd_scan import Scan, Stored
from tests.conftest import LogGuard
from tests.pool import files
from tests.pool.files import MIB, page, pattern
from tests.storage.disks import demoted, on_ssd, stored

DATA = pattern(100_000)


def leave_behind(storage: Storage) -> list[Path]:
    """A temporary, a damaged page, and a file of somebody else."""
    root = storage.tier.directory
    temporary = root / ".kvfs-temporary/left"
    temporary.write_bytes(DATA)
    temporary.chmod(0o600 | MARK)
    assert storage.tier.set_aside(b"page", "bytes")
    (root / "notes.txt").write_bytes(DATA)
    return [temporary, root / "notes.txt"]


async def test_each_kind_is_counted_and_named(pool: Pool, storage: Storage, expect_log: LogGuard) -> None:
    expect_log("quarantined")
    entry = await demoted(pool, b"page", DATA)
    temporary, theirs = leave_behind(storage)
    found = json.loads(await leftovers_text(pool))["ssd"]
    assert found["directory"] == str(storage.tier.directory)
    for kind, path, occupied in (
        ("temporaries", ".kvfs-temporary/left", temporary.stat().st_blocks * 512),
        ("quarantine", "page", len(DATA)),
        ("foreign", "notes.txt", theirs.stat().st_blocks * 512),
    ):
        (row,) = found[kind]["files"]
        assert (row["path"], found[kind]["count"], found[kind]["bytes"]) == (path, 1, row["bytes"])
        assert occupied <= row["bytes"] < occupied + 16384
        assert 0 <= row["age_seconds"] < 60
    assert found["quarantine"]["files"][0]["reason"] == "bytes"
    await storage.upkeep.delete_leftovers()
    found = await storage.upkeep.leftovers()
    assert [found[kind]["count"] for kind in ("temporaries", "quarantine", "foreign")] == [0, 0, 1]
    assert not temporary.exists()
    assert theirs.read_bytes() == DATA
    theirs.unlink()
    pool.remove_everywhere(entry)


async def test_without_an_ssd_there_is_nothing(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "storage", None)
    found = json.loads(await leftovers_text(pool))
    assert found == {"ssd": None, "expired": {"count": 0, "bytes": 0, "files": []}}
    monkeypatch.undo()


async def test_names_that_are_not_text_are_shown(pool: Pool, storage: Storage) -> None:
    await storage.walked.wait()
    name = b"\xff\n"
    path = Path(os.fsdecode(name))
    (storage.tier.directory / path).touch()
    (row,) = json.loads(await leftovers_text(pool))["ssd"]["foreign"]["files"]
    assert os.fsencode(row["path"]) == name
    (storage.tier.directory / path).unlink()


async def test_of_very_many_only_some_are_named(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    await storage.walked.wait()
    monkeypatch.setattr(upkeep, "MOST_LISTED", 3)
    for number in range(10):
        (storage.tier.directory / f"{number}").touch()
    found = (await storage.upkeep.leftovers())["foreign"]
    assert (found["count"], len(found["files"])) == (10, 3)


async def test_what_is_being_written_is_not_left_over(pool: Pool, storage: Storage) -> None:
    copy, begun, go_on = storage.write, threading.Event(), threading.Event()

    def held(source: int, target: int, size: int) -> object:
        begun.set()
        go_on.wait(10)
        return copy(source, target, size)

    storage.write = held  # type: ignore[assignment]
    await page(pool, b"page", DATA)
    await files.wait_until(begun.is_set)
    assert len(os.listdir(storage.tier.directory / ".kvfs-temporary")) == 1
    assert (await storage.upkeep.leftovers())["temporaries"]["count"] == 0
    await storage.upkeep.delete_leftovers()
    go_on.set()
    entry = files.find(pool, b"page")
    await files.wait_until(lambda: entry.stored == b"")
    assert storage.demotions.written == 1


# Counting anew


async def test_the_accounts_become_right(pool: Pool, storage: Storage) -> None:
    await stored(pool, b"page", pattern(MIB))
    right = storage.tier.accounts.used_bytes
    storage.tier.accounts.changed(0, 0, 12345)
    findings = await storage.upkeep.recount()
    assert (findings.pages, findings.drift_bytes) == (1, 12345)
    assert storage.tier.accounts.used_bytes == right


async def test_pages_come_and_go_while_it_counts(
    pool: Pool, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssd_scan, "BATCH", 2)
    for number in range(20):
        await stored(pool, b"%d" % number, DATA)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(storage.upkeep.recount)
        for number in range(20, 40):
            await stored(pool, b"%d" % number, DATA)
            pool.names.rename(pool.index.root, b"%d" % (number - 20), pool.index.root, b"r%d" % number, 0)
            pool.remove_everywhere(files.find(pool, b"%d" % (number - 19)))
            await storage.history.settled()
            await page(pool, b"%d" % (number - 19), DATA)
    await storage.demotions.finish()
    used = storage.tier.accounts.used_bytes
    assert (await storage.upkeep.recount()).drift_bytes == 0
    assert storage.tier.accounts.used_bytes == used


async def test_there_is_one_walk_at_a_time(
    pool: Pool, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stored(pool, b"page", DATA)
    walks = []
    begin = Scan.__init__

    def counted(self: Scan, *arguments: object) -> None:
        walks.append(self)
        begin(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Scan, "__init__", counted)
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(storage.upkeep.recount)
    assert len(walks) == 1
    await storage.upkeep.recount()
    assert len(walks) == 2


async def test_a_walk_that_does_not_get_on_is_not_waited_for(
    pool: Pool, storage: Storage, monkeypatch: pytest.MonkeyPatch, expect_log: LogGuard
) -> None:
    expect_log("the SSD tier fails: counting it found nothing new")
    await stored(pool, b"page", DATA)
    go_on, walk = threading.Event(), Scan.next_batch

    def stuck(self: Scan) -> list[Stored]:
        go_on.wait(10)
        return walk(self)

    monkeypatch.setattr(Scan, "next_batch", stuck)
    storage.io_timeout = 0.2
    with pytest.raises(TimedOut):
        await storage.upkeep.recount()
    go_on.set()
    await files.wait_until(lambda: storage.tier.walker is None and not storage.health.is_failed)
    assert (await storage.upkeep.recount()).pages == 1


async def test_a_disk_that_fails_while_it_is_counted(
    pool: Pool, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stored(pool, b"page", DATA)
    used = storage.tier.accounts.used_bytes

    def fail(self: Scan) -> list[Stored]:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as failing:
        failing.setattr(Scan, "next_batch", fail)
        with pytest.raises(OSError, match="Input/output error"):
            await storage.upkeep.recount()
    assert storage.tier.accounts.used_bytes == used
    assert (await storage.upkeep.recount()).drift_bytes == 0


async def test_a_recount_tells_of_copies_that_it_sets_aside(
    pool: Pool, storage: Storage, expect_log: LogGuard
) -> None:
    expect_log("quarantined")
    there = await demoted(pool, b"there", DATA)
    both = await stored(pool, b"both", DATA)
    for name in ("there", "both"):
        os.truncate(storage.tier.directory / name, 10)
    await storage.upkeep.recount()
    await storage.history.settled()
    await files.wait_until(lambda: both.stored == RESIDENT)
    assert there.parent is None
    assert on_ssd(pool, b"both") == DATA, "DRAM has it, and so it is copied again"
    assert pool.counters.misses == {"corrupt": 2}


async def test_a_page_stored_again_while_its_copy_is_set_aside_stays(
    pool: Pool, storage: Storage, expect_log: LogGuard
) -> None:
    expect_log("quarantined")
    await demoted(pool, b"page", DATA)
    os.truncate(storage.tier.directory / "page", 10)
    assert storage.tier.set_aside(b"page", "size")
    pool.remove_everywhere(files.find(pool, b"page"))
    again = await stored(pool, b"page", DATA)
    copies_were_set_aside(storage, [b"page"])
    await storage.history.settled()
    assert again.stored == RESIDENT
    assert on_ssd(pool, b"page") == DATA
