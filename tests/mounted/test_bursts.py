"""A program that writes files one after the other, each of which takes much of a small pool."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mounted.children import start, wait
from tests.mounted.conftest import MODES, MakeMount
from tests.mounted.operations import pattern
from tests.mounted.running import MIB, KvfsMount, wait_sealed, wait_until

DATA = pattern(41, MIB)

Write = Callable[[Path, int], None]


def in_chunks(path: Path, size: int) -> None:
    with open(path, "wb", buffering=0) as file:
        for _ in range(size // MIB):
            assert file.write(DATA) == MIB


def mapped(path: Path, size: int) -> None:
    with open(path, "w+b", buffering=0) as file:
        file.truncate(size)
        with mmap.mmap(file.fileno(), size) as mapping:
            for offset in range(0, size, MIB):
                mapping[offset : offset + MIB] = DATA


def allocated(path: Path, size: int) -> None:
    with open(path, "wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        for _ in range(size // MIB):
            assert file.write(DATA) == MIB


WAYS: list[Write] = [in_chunks, mapped, allocated]


def is_whole(path: Path, size: int) -> bool:
    return path.read_bytes() == DATA * (size // MIB)


def assert_served(mount: KvfsMount, write: Write, size: int, count: int) -> None:
    paths = [mount.path / f"{number}" for number in range(count)]
    for path in paths:
        write(path, size)
        assert mount.used_bytes() <= mount.pool_bytes
    wait_sealed(paths[-1])
    status = mount.status()
    assert status["failures"] == {}
    assert status["evictions"] >= count - mount.pool_bytes // size
    assert is_whole(paths[-1], size)
    assert "ENOSPC" not in mount.log


@pytest.mark.deadline(120)
@pytest.mark.parametrize("write", WAYS)
@pytest.mark.parametrize(("pool", "size", "count"), [(64, 30, 20), (64, 32, 10), (64, 17, 20), (512, 200, 6)])
def test_none_is_refused(
    make_mount: MakeMount, mode: str, write: Write, pool: int, size: int, count: int
) -> None:
    mount = make_mount(pool * MIB, environment=MODES[mode])
    mount.mount()
    assert_served(mount, write, size * MIB, count)
    mount.umount()


@pytest.mark.parametrize("write", WAYS)
def test_overwriting_what_is_read(make_mount: MakeMount, mode: str, write: Write) -> None:
    mount = make_mount(64 * MIB, environment=MODES[mode])
    mount.mount()
    path = mount.path / "page"
    for _ in range(8):
        write(path, 20 * MIB)
        wait_sealed(path)
        with open(path, "rb", buffering=0) as reader:
            write(path, 20 * MIB)
            assert reader.read(MIB) == DATA
    wait_sealed(path)
    assert is_whole(path, 20 * MIB)
    assert mount.status()["failures"] == {}
    mount.umount()


@pytest.mark.parametrize("write", [mapped, allocated])
def test_a_size_is_given_in_a_pool_of_small_files(make_mount: MakeMount, mode: str, write: Write) -> None:
    mount = make_mount(64 * MIB, environment=MODES[mode])
    mount.mount()
    for number in range(60):
        (mount.path / f"small-{number}").write_bytes(DATA)
    # The pages that were sealed last stay for a while: no small one is to come after the large one.
    wait_until(lambda: not mount.status()["unsealed"], 10, "the small ones are sealed")
    write(mount.path / "large", 30 * MIB)
    wait_sealed(mount.path / "large")
    assert is_whole(mount.path / "large", 30 * MIB)
    assert mount.status()["failures"] == {}
    mount.umount()


def test_what_cannot_be_had_evicts_nothing(make_mount: MakeMount, mode: str) -> None:
    mount = make_mount(64 * MIB, environment=MODES[mode])
    mount.mount()
    for number in range(10):
        (mount.path / f"{number}").write_bytes(DATA)
    wait_sealed(*(mount.path / f"{number}" for number in range(10)))
    held = [os.open(mount.path / f"held-{number}", os.O_RDWR | os.O_CREAT) for number in range(2)]
    os.ftruncate(held[0], 20 * MIB)
    os.ftruncate(held[1], 14 * MIB)
    refused = os.open(mount.path / "refused", os.O_RDWR | os.O_CREAT)
    with pytest.raises(OSError, match="No space left"):
        os.ftruncate(refused, 31 * MIB)
    with pytest.raises(OSError, match="No space left"):
        os.posix_fallocate(refused, 0, 31 * MIB)
    assert os.fstat(refused).st_size == 0
    assert all((mount.path / f"{number}").exists() for number in range(10))
    os.posix_fallocate(refused, 0, 20 * MIB)
    os.posix_fallocate(refused, 20 * MIB, 9 * MIB)
    assert os.fstat(refused).st_size == 29 * MIB
    for descriptor in (*held, refused):
        os.close(descriptor)
    mount.umount()


def test_two_programs_whose_files_together_fit_are_served(make_mount: MakeMount, mode: str) -> None:
    mount = make_mount(128 * MIB, environment=MODES[mode])
    mount.mount()

    def program(number: int) -> None:
        for part in range(10):
            in_chunks(mount.path / f"{number}-{part}", 20 * MIB)

    in_chunks(mount.path / "first", 20 * MIB)
    children = [start(lambda number=number: program(number)) for number in range(2)]  # type: ignore[misc]
    assert [wait(child) for child in children] == [0, 0]
    assert mount.status()["failures"] == {}
    mount.umount()
