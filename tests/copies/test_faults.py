"""A copy that fails says what the kernel said, leaves nothing behind, and the next one works."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.copies.buffers import CHUNK
from kvfs.copies.copier import ALIGNMENT, DEPTH, Copier, Lane, Pending
from kvfs.errors import TierFailed
from kvfs.interleaved import finish
from kvfs.page import digest_of
from tests.copies.conftest import NoDescriptors
from tests.copies.disks import disk_that_takes, mounted_image, unreadable_beyond
from tests.copies.files import MIB, content_of, in_memory, on_disk

pytestmark = [
    pytest.mark.usefixtures("descriptors"),
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts filesystems, and so must run as root"),
]

CONTENT = os.urandom((DEPTH + 3) * CHUNK + 77)


@contextlib.contextmanager
def raises(*numbers: int) -> Iterator[None]:
    """OSError with one of these numbers."""
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the number says which
        yield
    assert caught.value.errno in numbers, caught.value


def works(copier: Copier, directory: Path) -> None:
    """A page goes there and back."""
    size = len(CONTENT)
    with in_memory(CONTENT) as source, on_disk(directory) as page, in_memory(bytes(size)) as target:
        assert finish(copier.write(source, page, size)) == digest_of(CONTENT)
        assert copier.read(page, target, size) == digest_of(CONTENT)
        assert content_of(target) == CONTENT


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])
@pytest.mark.parametrize("offset", [0, CHUNK + 3 * ALIGNMENT, (DEPTH + 1) * CHUNK])
def test_a_disk_that_cannot_be_read(
    copier: Copier, disk: Path, tmp_path: Path, offset: int, direct: bool
) -> None:
    image, directory = tmp_path / "image", tmp_path / "mounted"
    size = len(CONTENT)
    with (
        mounted_image(directory, image, 64),
        in_memory(bytes(size)) as target,
        on_disk(directory, CONTENT, direct=direct) as source,
        unreadable_beyond(image, source, offset),
        raises(errno.EIO),
    ):
        copier.read(source, target, size)
    works(copier, disk)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])
def test_a_disk_that_cannot_be_written(copier: Copier, disk: Path, tmp_path: Path, direct: bool) -> None:
    with (
        disk_that_takes(tmp_path, 4) as directory,
        in_memory(CONTENT) as source,
        on_disk(directory, direct=direct) as target,
        raises(errno.EIO, errno.ENOSPC),
    ):
        finish(copier.write(source, target, len(CONTENT)))
    works(copier, disk)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])
def test_a_disk_that_is_full(copier: Copier, disk: Path, direct: bool) -> None:
    free = os.statvfs(disk)
    filler = os.open(disk, os.O_TMPFILE | os.O_RDWR)
    try:
        os.posix_fallocate(filler, 0, free.f_bavail * free.f_frsize - CHUNK)
        with in_memory(CONTENT) as source, on_disk(disk, direct=direct) as target, raises(errno.ENOSPC):
            finish(copier.write(source, target, len(CONTENT)))
    finally:
        os.close(filler)
    works(copier, disk)


def test_a_target_in_memory_that_cannot_be_written(copier: Copier, disk: Path) -> None:
    """What is on its way from the disk meanwhile still arrives, in memory that nobody else gets."""
    with on_disk(disk, CONTENT) as source, in_memory(b"") as target:
        read_only = os.open(f"/proc/self/fd/{target}", os.O_RDONLY)
        try:
            with raises(errno.EBADF):
                copier.read(source, read_only, len(CONTENT))
        finally:
            os.close(read_only)
    works(copier, disk)


NEEDS_A_DESCRIPTOR = ("cufile",)


def test_no_descriptors_left(copier: Copier, disk: Path, no_descriptors: NoDescriptors) -> None:
    """A way that needs one says so; all work again as soon as there are some."""
    size = len(CONTENT)
    with on_disk(disk, CONTENT) as source, in_memory(bytes(size)) as target, no_descriptors(0):
        if copier.name in NEEDS_A_DESCRIPTOR:
            with raises(errno.EMFILE):
                copier.read(source, target, size)
        else:
            assert copier.read(source, target, size) == digest_of(CONTENT)
    works(copier, disk)


class _Meddling:
    """A lane that lets something happen before a chunk is moved."""

    def __init__(self, lane: Lane, offset: int, happen: Callable[[], None]) -> None:
        self.lane, self.offset, self.happen = lane, offset, happen

    def start(self, memory: memoryview, offset: int) -> Pending:
        if offset == self.offset:
            self.happen()
        return self.lane.start(memory, offset)


@pytest.fixture
def meddle(copier: Copier, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], None]:
    """``meddle(offset, happen)``: calls ``happen`` when the next copy begins to move this offset."""

    def arrange(wanted: int, happen: Callable[[], None]) -> None:
        original = copier.open_lane

        @contextlib.contextmanager
        def open_lane(fd: int, size: int, *, writing: bool, idle: bool) -> Iterator[Lane]:
            with original(fd, size, writing=writing, idle=idle) as lane:
                yield _Meddling(lane, wanted, happen)

        monkeypatch.setattr(copier, "open_lane", open_lane)

    return arrange


Meddle = Callable[[int, Callable[[], None]], None]


@pytest.mark.parametrize("left", [0, 100, CHUNK, (DEPTH + 2) * CHUNK + 5])
def test_a_file_that_is_cut_short_while_it_is_read(
    copier: Copier, disk: Path, meddle: Meddle, left: int
) -> None:
    size = len(CONTENT)
    with on_disk(disk, CONTENT) as source, in_memory(bytes(size)) as target:
        meddle((DEPTH + 2) * CHUNK, lambda: os.ftruncate(source, left))
        digest = copier.read(source, target, size)
        assert digest.size < size
        assert digest == digest_of(CONTENT[: digest.size])


def test_a_file_that_grows_while_it_is_read(copier: Copier, disk: Path, meddle: Meddle) -> None:
    size = len(CONTENT)
    with on_disk(disk, CONTENT) as source, in_memory(bytes(size)) as target:
        meddle(0, lambda: os.ftruncate(source, size + 10 * CHUNK))
        assert copier.read(source, target, size) == digest_of(CONTENT)
        assert content_of(target) == CONTENT


def test_a_page_in_memory_that_is_cut_short_while_it_is_written(
    copier: Copier, disk: Path, meddle: Meddle
) -> None:
    size = len(CONTENT)
    with in_memory(CONTENT) as source, on_disk(disk) as target:
        meddle(CHUNK, lambda: os.ftruncate(source, 2 * CHUNK + 9))
        assert finish(copier.write(source, target, size)) == digest_of(CONTENT[: 2 * CHUNK + 9])


def test_a_page_in_memory_that_changes_while_it_is_written(
    copier: Copier, disk: Path, meddle: Meddle
) -> None:
    """The digest is that of what is on the disk then, whatever is in memory."""
    with in_memory(CONTENT) as source, on_disk(disk) as target:

        def change() -> None:
            for offset in (0, CHUNK + 5, 3 * CHUNK):
                os.pwrite(source, b"changed", offset)

        meddle(CHUNK, change)
        digest = finish(copier.write(source, target, len(CONTENT)))
        assert digest != digest_of(CONTENT)
        assert digest == digest_of(content_of(target))


def test_a_disk_that_takes_a_part_and_does_not_say_why(
    copier: Copier, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nothing:
        def start(self, memory: memoryview, offset: int) -> Nothing:
            return self

        def wait(self) -> int:
            return 0

    @contextlib.contextmanager
    def open_lane(fd: int, size: int, *, writing: bool, idle: bool) -> Iterator[Lane]:
        yield Nothing()

    monkeypatch.setattr(copier, "open_lane", open_lane)
    with (
        in_memory(bytes(MIB)) as source,
        on_disk(disk) as target,
        pytest.raises(TierFailed, match="took 0 of 1048576 bytes"),
    ):
        finish(copier.write(source, target, MIB))
