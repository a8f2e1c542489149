"""Bytes arrive as they were, whatever their number, and by every way."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvfs.copies.buffers import CHUNK, IDLE
from kvfs.copies.copier import ALIGNMENT, DEPTH, Copier
from kvfs.interleaved import finish
from kvfs.page import digest_of
from tests.copies.files import MIB, SIZES, cached_pages, content_of, in_memory, on_disk

both = pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])


@both
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("descriptors")
def test_a_page_is_read(copier: Copier, disk: Path, size: int, direct: bool) -> None:
    content = os.urandom(size)
    with on_disk(disk, content, direct=direct) as source, in_memory(bytes(size)) as target:
        assert copier.read(source, target, size) == digest_of(content)
        assert content_of(target) == content
        assert cached_pages(source) == 0


@both
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("descriptors")
def test_a_page_is_written(copier: Copier, disk: Path, size: int, direct: bool) -> None:
    content = os.urandom(size)
    with in_memory(content) as source, on_disk(disk, direct=direct) as target:
        assert finish(copier.write(source, target, size)) == digest_of(content)
        assert cached_pages(target) == 0
        assert content_of(target) == content


def test_a_file_that_was_allocated_gets_its_size(copier: Copier, disk: Path) -> None:
    with in_memory(b"page") as source, on_disk(disk) as target:
        os.posix_fallocate(target, 0, ALIGNMENT)
        assert finish(copier.write(source, target, 4)) == digest_of(b"page")
        assert content_of(target) == b"page"


@pytest.mark.parametrize("size", [3, 2 * CHUNK, 7 * CHUNK + 5])
def test_a_shorter_source_has_another_digest(copier: Copier, disk: Path, size: int) -> None:
    content = os.urandom(size)
    for wanted in (size + 1, size + ALIGNMENT, size + 9 * CHUNK):
        with on_disk(disk, content) as source, in_memory(bytes(wanted)) as target:
            assert copier.read(source, target, wanted) == digest_of(content)
        with in_memory(content) as source, on_disk(disk) as target:
            assert finish(copier.write(source, target, wanted)) == digest_of(content)


@pytest.mark.parametrize("longer_by", [1, ALIGNMENT, 3 * CHUNK])
def test_of_a_longer_source_no_more_is_moved_than_was_asked_for(
    copier: Copier, disk: Path, longer_by: int
) -> None:
    content = os.urandom(CHUNK + 77)
    more = content + bytes(longer_by)
    with on_disk(disk, more) as source, in_memory(bytes(len(content))) as target:
        assert copier.read(source, target, len(content)) == digest_of(content)
        assert content_of(target) == content
    with in_memory(more) as source, on_disk(disk) as target:
        assert finish(copier.write(source, target, len(content))) == digest_of(content)
        assert content_of(target) == content


def test_several_pages_at_once(copier: Copier, disk: Path) -> None:
    def there_and_back(number: int) -> None:
        content = os.urandom(number * CHUNK // 2 + number)
        with in_memory(content) as source, on_disk(disk) as page, in_memory(bytes(len(content))) as target:
            assert finish(copier.write(source, page, len(content))) == digest_of(content)
            assert copier.read(page, target, len(content)) == digest_of(content)
            assert content_of(target) == content

    with ThreadPoolExecutor(6) as threads:
        for _ in threads.map(there_and_back, list(range(10)) * 3):
            pass
    assert len(copier._buffers._idle) <= IDLE


def test_other_threads_run_meanwhile(copier: Copier, disk: Path) -> None:
    """The interpreter is let go of while a disk is waited for, and while the digest is computed."""
    counted = 0
    over = threading.Event()

    def count() -> None:
        nonlocal counted
        while not over.wait(0.0002):
            counted += 1

    content = os.urandom(16 * MIB)
    with on_disk(disk, content) as source, in_memory(bytes(len(content))) as target:
        counter = threading.Thread(target=count)
        counter.start()
        try:
            for _ in range(5):
                copier.read(source, target, len(content))
        finally:
            over.set()
            counter.join()
    assert counted > 5


class _InParts(Copier):
    """Moves at most so many bytes at a time, as a disk may."""

    name = "in parts"

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    @contextlib.contextmanager
    def open_lane(self, fd: int, size: int, *, writing: bool, idle: bool):  # type: ignore[no-untyped-def]
        yield _PartLane(fd, self.most, writing=writing)


class _PartLane:
    def __init__(self, fd: int, most: int, *, writing: bool) -> None:
        self.fd, self.most = fd, most
        self.call = os.pwritev if writing else os.preadv

    def start(self, memory: memoryview, offset: int) -> _Done:
        return _Done(self.call(self.fd, [memory[: self.most]], offset))


class _Done:
    def __init__(self, moved: int) -> None:
        self.moved = moved

    def wait(self) -> int:
        return self.moved


@pytest.mark.parametrize("size", [ALIGNMENT, 5 * ALIGNMENT + 3, CHUNK + 1, (DEPTH + 2) * CHUNK + 11])
def test_what_arrives_in_parts_is_put_together(disk: Path, size: int) -> None:
    copier = _InParts(CHUNK // 4)
    content = os.urandom(size)
    with in_memory(content) as source, on_disk(disk) as page, in_memory(bytes(size)) as target:
        assert finish(copier.write(source, page, size)) == digest_of(content)
        assert content_of(page) == content
        assert copier.read(page, target, size) == digest_of(content)
        assert content_of(target) == content
