from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvfs.errors import KvfsError
from kvfs.tiers import ssd_directory, ssd_following
from kvfs.tiers.ssd import SsdTier
from tests.conftest import LogGuard
from tests.tiers.conftest import needs_root
from tests.tiers.ssds import (
    MEBIBYTE,
    attach,
    check_accounts,
    lose_power,
    make_disk,
    mounted,
    read,
    scan,
    store,
    temporaries,
)

SIZES = [5000, 65536, 1 << 20, (1 << 20) + 7]


def order_of_calls(tier: SsdTier, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What storing a page does to a file, in order."""
    calls: list[str] = []

    def note(name: str) -> None:
        genuine: Callable[..., object] = getattr(os, name)

        def call(*arguments: object, **named_arguments: object) -> object:
            calls.append(name)
            return genuine(*arguments, **named_arguments)

        monkeypatch.setattr(os, name, call)

    for name in ("pwrite", "ftruncate", "fdatasync", "setxattr", "rename"):
        note(name)
    store(tier, b"page", b"x" * 5000)
    monkeypatch.undo()
    return calls


def test_past_the_cache_a_name_comes_after_everything_else(
    ssd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = attach(ssd)
    assert order_of_calls(tier, monkeypatch) == ["pwrite", "ftruncate", "setxattr", "rename"]
    tier.close()


@pytest.mark.parametrize("why", ["page cache", "other filesystem"])
def test_elsewhere_bytes_are_synced_before_they_have_a_name(
    ssd: Path, monkeypatch: pytest.MonkeyPatch, expect_log: LogGuard, why: str
) -> None:
    if why == "other filesystem":
        monkeypatch.setattr(ssd_directory, "filesystem_of", lambda _fd: "f2fs")
    else:
        expect_log("pages go through the page cache: for a test")
    tier = attach(ssd)
    if why == "page cache":
        tier.lose_direct("for a test")
    assert order_of_calls(tier, monkeypatch) == ["pwrite", "ftruncate", "fdatasync", "setxattr", "rename"]
    check_accounts(tier)
    tier.close()


@needs_root
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
@pytest.mark.parametrize("seed", range(3))
def test_after_a_loss_of_power_every_page_that_has_a_name_is_whole(
    tmp_path: Path, kind: str, seed: int
) -> None:
    """The filesystem is cut off from its disk while threads store, rename and remove pages; what it had
    written down by then is what the next mount finds."""
    image, directory = make_disk(tmp_path / "disk", kind, 320)
    randomly = random.Random(seed)
    with mounted(image, directory):
        tier = attach(directory / "tier", 200 * MEBIBYTE)
        stop = threading.Event()
        stored = [0, 0]

        def work(number: int) -> None:
            thread_randomly = random.Random(1000 * seed + number)
            for turn in itertools.count():
                path = b"%d/%d/page" % (number, turn % 40)
                try:
                    store(
                        tier, path, os.urandom(thread_randomly.choice([5000, 65536, 1 << 20, (1 << 20) + 7]))
                    )
                    if turn % 5 == 0:
                        ssd_following.rename(tier, path, b"%d/%d/moved" % (number, turn % 40))
                    if turn % 11 == 0:
                        os.sync()
                except (OSError, KvfsError):
                    return
                stored[number] += 1
                if stop.is_set():
                    return

        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        stop.wait(1.0 + randomly.random())
        lose_power(directory)
        stop.set()
        for thread in threads:
            thread.join(timeout=60)
        tier.close()
    with mounted(image, directory):
        tier = attach(directory / "tier", 200 * MEBIBYTE)
        assert tier.suspect
        stored_pages, findings = scan(tier)
        assert findings.damaged == {}
        assert min(stored) > 20
        found = [one.path for one in stored_pages if not one.is_directory]
        assert len(found) > 10
        for path in found:
            read(tier, path)
        assert temporaries(directory / "tier") == []
        check_accounts(tier)
        tier.close()
