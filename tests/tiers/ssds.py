"""What the tests of the SSD tier share: disks in loop-mounted files, pages, and a plain way to copy them."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import mmap
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kvfs.interleaved import at_once, finish
from kvfs.page import OWNER, Digest, digest_of
from kvfs.tiers.ssd import SsdPlace, SsdTier
from kvfs.tiers.ssd_directory import ALIGNMENT
from kvfs.tiers.ssd_pages import Name, NewPage, WrittenPage
from kvfs.tiers.ssd_scan import Findings, Scan, Stored

MEBIBYTE = 1 << 20
FILE = {OWNER: b"100640 1000 1001"}
DIRECTORY = {OWNER: b"40750 1000 1001"}

_SHUTDOWN = 0x8004587D
"""The ioctl of ext4 and XFS that cuts a filesystem off from its disk, as a loss of power does."""
_WITHOUT_THE_LOG = 2


def make_disk(directory: Path, kind: str, megabytes: int, *options: str) -> tuple[Path, Path]:
    """A filesystem ("ext4" or "xfs") in a file beside ``directory``: both. XFS wants at least 300 MiB."""
    image = directory.with_suffix(f".{kind}")
    with image.open("wb") as file:
        file.truncate(megabytes << 20)
    make = ["mkfs.ext4", "-q", "-F"] if kind == "ext4" else ["mkfs.xfs", "-q", "-f"]
    subprocess.run([*make, *options, image], check=True)
    directory.mkdir(exist_ok=True)
    return image, directory


@contextmanager
def mounted(image: Path, directory: Path) -> Iterator[Path]:
    subprocess.run(["mount", "-o", "loop", image, directory], check=True)
    try:
        yield directory
    finally:
        gc.collect()  # an error that a test caught holds the frames, and so descriptors, that it passed
        if subprocess.run(["umount", directory], check=False).returncode:
            subprocess.run(["umount", "-l", directory], check=True)
            raise AssertionError(f"something in {directory} is still open")


@contextmanager
def mounted_disk(directory: Path, kind: str, megabytes: int, *options: str) -> Iterator[Path]:
    """A filesystem in a file beside ``directory``, as long as it is needed."""
    image, _ = make_disk(directory, kind, megabytes, *options)
    with mounted(image, directory):
        yield directory
    image.unlink()


def lose_power(directory: Path) -> None:
    """What is not on the disk of a mounted filesystem now never will be."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _SHUTDOWN, _WITHOUT_THE_LOG.to_bytes(4, "little"))
    finally:
        os.close(fd)


def place(directory: Path, capacity_bytes: int = 64 * MEBIBYTE, **others: object) -> SsdPlace:
    states = Path("/run/of-a-test")
    made = SsdPlace(directory, capacity_bytes, Path("/mnt/of-a-test"), states / "dram", states)
    return replace(made, **others)  # type: ignore[arg-type]


def attach(directory: Path, capacity_bytes: int = 64 * MEBIBYTE, **others: object) -> SsdTier:
    return SsdTier.attach(place(directory, capacity_bytes, **others))


@at_once
def copy(source_fd: int, target_fd: int, size: int) -> Digest:
    """Copies a page past the cache or through it, all at once."""
    length = -(-size // ALIGNMENT) * ALIGNMENT
    with mmap.mmap(-1, max(length, ALIGNMENT)) as buffer:
        content = os.pread(source_fd, size, 0)
        buffer[: len(content)] = content
        with memoryview(buffer) as view:
            written = 0
            while written < length:
                written += os.pwrite(target_fd, view[written:length], written)
    return digest_of(content)


@contextmanager
def source(content: bytes) -> Iterator[int]:
    """A descriptor of a file in memory."""
    fd = os.memfd_create("page")
    try:
        os.write(fd, content)
        yield fd
    finally:
        os.close(fd)


def new_page(
    content: bytes, attributes: Mapping[str, bytes] = FILE, atime_ns: int = 1_000_000_000
) -> NewPage:
    return NewPage(digest_of(content), attributes, atime_ns, 2_000_000_001)


def named(*paths: bytes) -> list[Name]:
    return [(path, [DIRECTORY] * path.count(b"/")) for path in paths]


def write(tier: SsdTier, content: bytes, attributes: Mapping[str, bytes] = FILE) -> WrittenPage:
    with source(content) as fd:
        return finish(tier.write_page(new_page(content, attributes), fd, copy))


def store(tier: SsdTier, path: bytes, content: bytes, attributes: Mapping[str, bytes] = FILE) -> int:
    written = write(tier, content, attributes)
    try:
        return tier.publish_page(written, named(path))
    finally:
        tier.abandon_page(written)


def read(tier: SsdTier, path: bytes) -> bytes:
    """The bytes of a page, compared with its digest."""
    opened = tier.open_page(path)
    try:
        content = os.pread(opened.fd, opened.status.st_size, 0)
    finally:
        os.close(opened.fd)
    assert digest_of(content) == opened.digest
    return content


def scan(tier: SsdTier) -> tuple[list[Stored], Findings]:
    """Everything that a walk gives, and what it found."""
    walk = Scan(tier)
    stored: list[Stored] = []
    with contextlib.closing(walk):
        while batch := walk.next_batch():
            stored += batch
    return stored, walk.findings


def pages(tier: SsdTier) -> set[bytes]:
    return {one.path for one in scan(tier)[0] if not one.is_directory}


def disk_usage(directory: Path) -> int:
    """What du says of a tier, but for temporaries, in bytes."""
    words = ["du", "-s", "-B1", "--exclude=.kvfs-temporary", "--exclude=lost+found", str(directory)]
    return int(subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()[0])


def tree(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything in a directory: inode, mode, content."""
    found = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (status.st_ino, status.st_mode, content)
    return found


def temporaries(directory: Path) -> list[str]:
    return os.listdir(directory / ".kvfs-temporary")


def check_accounts(tier: SsdTier) -> None:
    """The accounts are what du says, and what counting anew gives; nothing is reserved."""
    assert tier.accounts.reserved_bytes == 0
    assert tier.accounts.used_bytes == disk_usage(tier.directory)
    used = tier.accounts.used_bytes
    assert scan(tier)[1].drift_bytes == 0
    assert tier.accounts.used_bytes == used
    room = tier.room()
    assert 0 <= room.used_bytes <= room.total_bytes
