"""What asks the disk at idle priority has it while it asks, and no longer."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from kvfs.copies.buffers import CHUNK
from kvfs.copies.direct import DirectCopier
from kvfs.copies.uring import UringCopier, _Ring
from kvfs.interleaved import finish
from tests.copies.files import in_memory, on_disk

ORDINARY = "none: prio 0"


def priority(thread: int) -> str:
    command = ["ionice", "-p", str(thread)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()


@pytest.mark.parametrize("size", [100, 3 * CHUNK])
def test_direct(disk: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, str] = {}
    original = os.pwritev

    def note(fd: int, buffers: list[memoryview], offset: int) -> int:
        seen[threading.get_native_id()] = priority(threading.get_native_id())
        return original(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", note)
    with in_memory(bytes(size)) as source, on_disk(disk) as target:
        finish(DirectCopier().write(source, target, size, idle=True))
        assert set(seen.values()) == {"idle"}
        assert {priority(thread) for thread in seen} == {ORDINARY}
        seen.clear()
        finish(DirectCopier().write(source, target, size))
        assert set(seen.values()) == {ORDINARY}


def test_uring(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("liburing")
    seen: list[str] = []
    original = _Ring.submit

    def note(ring: _Ring, fd: int, memory: memoryview, offset: int, *, writing: bool) -> int:
        seen.append(priority(threading.get_native_id()))
        return original(ring, fd, memory, offset, writing=writing)

    monkeypatch.setattr(_Ring, "submit", note)
    copier = UringCopier()
    with in_memory(bytes(100)) as source, on_disk(disk) as target:
        finish(copier.write(source, target, 100, idle=True))
        finish(copier.write(source, target, 100))
    copier.close()
    assert seen == ["idle", ORDINARY]
