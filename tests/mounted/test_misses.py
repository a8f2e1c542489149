"""Misses: what a program looks for in vain is counted, and what a program is about to store is not."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.mounted.conftest import MODES, MakeMount
from tests.mounted.operations import pattern
from tests.mounted.running import MIB, KvfsMount, wait_sealed

SETTLED = 0.2
"""Seconds after which every search is counted, or was found to be the beginning of a store."""


@pytest.fixture
def mount(make_mount: MakeMount, mode: str) -> KvfsMount:
    mount = make_mount(64 * MIB, environment=MODES[mode])
    mount.mount()
    return mount


def misses(mount: KvfsMount) -> dict[str, int]:
    time.sleep(SETTLED)
    found: dict[str, int] = mount.status()["misses"]
    return found


def look(path: Path) -> None:
    """As engines do: by opening, or by asking whether it is there."""
    with pytest.raises(FileNotFoundError):
        path.read_bytes()


def store(path: Path, content: bytes) -> None:
    """As engines do: under another name first."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    temporary.write_bytes(content)
    temporary.rename(path)


def test_a_cold_start_misses_and_storing_does_not(mount: KvfsMount) -> None:
    pages = [mount.path / f"page-{number}" for number in range(20)]
    for number, page in enumerate(pages):
        if number % 2:
            look(page)
        else:
            assert not os.access(page, os.R_OK)
    assert misses(mount) == {"absent": 20}
    for page in pages:
        store(page, b"bytes")
    (mount.path / "directory").mkdir()
    (mount.path / "directory/stored at once").write_bytes(b"bytes")
    (mount.path / "link").symlink_to("page-0")
    os.link(pages[0], mount.path / "second name")
    os.mkfifo(mount.path / "fifo")
    store(mount.path / "directory/never looked for", b"bytes")
    for name in (".git", "page-0.tmp", ".kvfs"):
        os.access(mount.path / name, os.R_OK)
    assert misses(mount) == {"absent": 20}
    hits = mount.status()["hits"]["dram"]
    wait_sealed(*pages)
    for page in pages:
        assert page.read_bytes() == b"bytes"
    status = mount.status()
    assert status["hits"]["dram"] == hits + 20
    assert status["misses"] == {"absent": 20}


def test_what_was_evicted_is_missed_as_such(mount: KvfsMount) -> None:
    pages = [mount.path / f"page-{number}" for number in range(100)]
    for number, page in enumerate(pages):
        store(page, pattern(number, MIB))
    look(mount.path / "never stored")
    gone = 0
    for page in pages:
        try:
            page.read_bytes()
        except FileNotFoundError:
            gone += 1
    assert gone > 30
    assert misses(mount) == {"absent": 1, "evicted": gone}
    text = (mount.path / ".kvfs/status").read_text()
    assert f"\nmisses:             1 absent, {gone} evicted\n" in text
    families = {
        family.name: family
        for family in text_string_to_metric_families((mount.path / ".kvfs/metrics").read_text())
    }
    values = {sample.labels["reason"]: sample.value for sample in families["kvfs_misses"].samples}
    assert values == {"absent": 1, "evicted": gone}


def test_what_a_program_removes_is_absent(mount: KvfsMount) -> None:
    page = mount.path / "page"
    page.write_bytes(b"bytes")
    page.unlink()
    look(page)
    look(page)  # the kernel remembers that there is none, and does not ask
    assert misses(mount) == {"absent": 1}


def test_what_is_made_right_after_it_was_looked_for_is_no_miss(mount: KvfsMount) -> None:
    """With O_EXCL the kernel looks for it a second time."""
    names = [mount.path / f"page-{number}" for number in range(10)]
    for name in names:
        assert not name.exists()
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    source = mount.path / "page-0"
    source.write_bytes(b"bytes")
    subprocess.run(["cp", source, mount.path / "copy"], check=True, timeout=60)
    first, second = mount.path / "first", mount.path / "second"
    assert not first.exists()
    assert not second.exists()
    second.write_bytes(b"bytes")
    first.write_bytes(b"bytes")
    assert misses(mount) == {}
