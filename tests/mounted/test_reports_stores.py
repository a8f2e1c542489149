"""What has gone wrong elsewhere while pages were stored: torn pages, racing writers, odd names, O_DIRECT."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import signal
import time
from pathlib import Path

import pytest

from tests.mounted.children import start, together, wait
from tests.mounted.operations import pattern
from tests.mounted.running import MIB, KvfsMount, digest, wait_sealed, wait_until

DATA = pattern(11, 200_000)


def publish(path: Path, data: bytes, temporary: Path) -> None:
    """What engines do: write under a temporary name, then rename."""
    temporary.write_bytes(data)
    temporary.rename(path)


def failures(mount: KvfsMount) -> int:
    return sum(mount.status()["failures"].values())


def test_a_store_that_is_killed_half_way_leaves_no_name(mount: KvfsMount, directory: Path) -> None:
    """Ten kills at moments that nobody chose; whatever is published is whole."""
    path, temporary = directory / "key", directory / "key.tmp"
    before = failures(mount)

    def store_for_ever() -> None:
        while True:
            with open(temporary, "wb", buffering=0) as file:
                for offset in range(0, len(DATA), 10_000):
                    file.write(DATA[offset : offset + 10_000])
            temporary.rename(path)

    for number in range(10):
        child = start(store_for_ever)
        time.sleep(0.05 + 0.003 * number)
        os.kill(child, signal.SIGKILL)
        wait(child)
        time.sleep(0.1)
        if path.exists():
            assert path.read_bytes() == DATA
            path.unlink()
        if temporary.exists():
            assert temporary.read_bytes() == DATA, "a torn temporary is left"
            temporary.unlink()
        assert os.listdir(directory) == []
    assert failures(mount) > before
    publish(path, DATA, temporary)
    assert path.read_bytes() == DATA


def test_a_store_that_meets_a_full_pool_leaves_no_name_and_can_be_repeated(
    mount: KvfsMount, directory: Path
) -> None:
    path, temporary = directory / "key", directory / "key.tmp"
    before = failures(mount)
    ballast = []
    for number in range(3):
        ballast.append(os.open(directory / f"ballast-{number}", os.O_RDWR | os.O_CREAT, 0o644))
        os.ftruncate(ballast[-1], mount.pool_bytes // 4)
    try:
        with pytest.raises(OSError, match="No space left"):
            publish(path, bytes(mount.pool_bytes // 2), temporary)
        wait_until(lambda: not temporary.exists(), 10, "the half-written temporary has been dropped")
        assert not path.exists()
        assert failures(mount) > before
    finally:
        for descriptor in ballast:
            os.close(descriptor)
        for number in range(3):
            (directory / f"ballast-{number}").unlink(missing_ok=True)
    publish(path, DATA, temporary)
    wait_sealed(path)
    assert path.read_bytes() == DATA


@pytest.mark.deadline(120)
def test_eight_writers_of_one_key_publish_one_whole_copy(directory: Path, mode: str) -> None:
    """Each with a temporary name of its own: nobody fails, readers see a whole copy, no temporary stays."""
    path = directory / "key"
    payload = pattern(0, 16_384)
    rounds = 1000 if mode == "passthrough" else 250

    def write(number: int) -> None:
        for round_number in range(rounds):
            data = bytes([number, round_number % 256]) + payload
            publish(path, hashlib.md5(data).digest() + data, directory / f"key.{number}.tmp")
            if round_number % 8 == number:
                seen = path.read_bytes()
                assert len(seen) == 16 + 2 + len(payload)
                assert hashlib.md5(seen[16:]).digest() == seen[:16]

    together(8, write)
    assert os.listdir(directory) == ["key"]
    wait_sealed(path)
    seen = path.read_bytes()
    assert hashlib.md5(seen[16:]).digest() == seen[:16]


def test_eight_writers_through_one_temporary_name_behave_as_on_any_filesystem(directory: Path) -> None:
    """The same key has the same bytes; whoever comes late finds the temporary gone, and that is all."""
    path, temporary = directory / "key", directory / "key.tmp"

    def write(number: int) -> None:
        for _ in range(150):
            try:
                publish(path, DATA, temporary)
            except FileNotFoundError:
                continue

    together(8, write)
    assert "key" in os.listdir(directory)
    publish(path, DATA, temporary)
    assert os.listdir(directory) == ["key"]
    assert path.read_bytes() == DATA


def test_eight_processes_make_the_same_directories(directory: Path) -> None:
    def make(number: int) -> None:
        for round_number in range(100):
            path = directory / f"{round_number}/pages/ab/cd"
            path.mkdir(parents=True, exist_ok=True)
            (path / f"{number}").write_bytes(DATA[:5000])

    together(8, make)
    for round_number in range(100):
        assert len(os.listdir(directory / f"{round_number}/pages/ab/cd")) == 8


def test_eight_processes_create_and_remove_in_one_directory(directory: Path) -> None:
    def work(number: int) -> None:
        for round_number in range(100):
            path = directory / f"{number}-{round_number}"
            path.write_bytes(DATA[: 4096 + round_number])
            assert path.stat().st_size == 4096 + round_number
            if round_number % 2:
                path.unlink()
            if round_number % 10 == 0:
                assert path.name in os.listdir(directory)

    together(8, work)
    expected = {f"{number}-{even}" for number in range(8) for even in range(0, 100, 2)}
    assert set(os.listdir(directory)) == expected


def test_only_one_of_eight_creates_with_o_excl(directory: Path) -> None:
    def create(number: int) -> None:
        for round_number in range(100):
            try:
                descriptor = os.open(directory / f"{round_number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                continue
            os.write(descriptor, bytes([number]) * 10)
            os.close(descriptor)

    together(8, create)
    for round_number in range(100):
        assert len(set((directory / f"{round_number}").read_bytes())) == 1


def test_readers_and_overwriters_race_without_errors(directory: Path) -> None:
    """Opening a page for writing while others open it for reading never fails and never mixes bytes."""
    path = directory / "key"
    size = 8192
    path.write_bytes(bytes(size))
    wait_sealed(path)

    def work(number: int) -> None:
        for round_number in range(300):
            if number % 4 == 0:
                descriptor = os.open(path, os.O_WRONLY)
                os.pwrite(descriptor, bytes([round_number % 256]) * size, 0)
                os.close(descriptor)
            else:
                assert len(path.read_bytes()) == size

    together(8, work)
    wait_sealed(path)


def test_names_as_long_as_the_filesystem_allows(directory: Path) -> None:
    """A model name of a kibibyte and a salt, in parts of 255 bytes; one byte more is refused."""
    model = [letter * 255 for letter in "abcd"]
    path = directory.joinpath(*model, "s" * 128)
    path.mkdir(parents=True)
    page = path / ("p" * 255)
    page.write_bytes(DATA)
    wait_sealed(page)
    assert page.read_bytes() == DATA
    for make in (Path.touch, Path.mkdir):
        with pytest.raises(OSError, match="File name too long") as caught:
            make(path / ("p" * 256))
        assert caught.value.errno == errno.ENAMETOOLONG


def test_paths_deeper_than_path_max_work_or_are_refused(directory: Path) -> None:
    """Reached step by step, as find and rm do. What cannot be is ENAMETOOLONG, and nothing is in the way."""
    name = "n" * 255
    steps = [os.open(directory, os.O_RDONLY | os.O_DIRECTORY)]
    made = 0
    try:
        for _ in range(20):
            try:
                os.mkdir(name, dir_fd=steps[-1])
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG:
                    raise
                break
            made += 1
            steps.append(os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=steps[-1]))
        assert made >= 14
        for step in reversed(range(made)):
            os.rmdir(name, dir_fd=steps[step])
    finally:
        for step in steps:
            os.close(step)


@pytest.mark.parametrize("size", [4096, 100_000, 2 * MIB])
def test_o_direct_writes_and_reads(directory: Path, size: int) -> None:
    """What open accepts, write does: an unaligned length too."""
    path = directory / "direct"
    with mmap.mmap(-1, size) as aligned:
        aligned[:] = pattern(5, 4096)[:4096] * (size // 4096) + bytes(size % 4096)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return
        assert os.write(descriptor, aligned) == size
        os.close(descriptor)
        wait_sealed(path)
        with mmap.mmap(-1, size) as target:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            assert os.preadv(descriptor, [target], 0) == size
            os.close(descriptor)
            assert target[:] == aligned[:]
        assert path.read_bytes() == aligned[:]


@pytest.mark.parametrize("flags", [0, os.O_DIRECT])
@pytest.mark.parametrize("size", [1, 4095, 300_000, 3 * MIB])
def test_mappings_equal_reads(directory: Path, size: int, flags: int) -> None:
    path = directory / "page"
    data = (pattern(size, MIB) * 4)[:size]
    path.write_bytes(data)
    wait_sealed(path)
    for access in (mmap.MAP_SHARED, mmap.MAP_PRIVATE):
        descriptor = os.open(path, os.O_RDONLY | flags)
        with mmap.mmap(descriptor, 0, flags=access, prot=mmap.PROT_READ) as mapping:
            assert mapping[:] == data
        os.close(descriptor)
    assert path.read_bytes() == data


def test_a_page_mapped_for_writing_and_only_read_stays_what_it_is(directory: Path) -> None:
    """So does torch.from_file: it opens for reading and writing, whatever comes then."""
    path = directory / "page"
    path.write_bytes(DATA)
    wait_sealed(path)
    before = digest(path)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        assert mapping[:] == DATA
        assert path.read_bytes() == DATA
    wait_sealed(path)
    assert digest(path) == before
    with open(path, "rb") as reader, open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        assert mapping[:] == reader.read() == DATA


def test_a_private_mapping_changes_nothing(directory: Path) -> None:
    path = directory / "page"
    path.write_bytes(DATA)
    wait_sealed(path)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapping:
        mapping[:5] = b"other"
        assert mapping[:6] == b"other" + DATA[5:6]
    assert path.read_bytes() == DATA


def test_two_mappings_of_a_draft_see_each_other(directory: Path) -> None:
    path = directory / "draft"
    with open(path, "w+b") as file:
        file.truncate(MIB)
        with mmap.mmap(file.fileno(), MIB) as first, mmap.mmap(file.fileno(), MIB) as second:
            first[1000:1005] = b"bytes"
            assert second[1000:1005] == b"bytes"
            first.flush()
            assert os.pread(file.fileno(), 5, 1000) == b"bytes"
