"""When a file becomes a page, and when it is dropped instead."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from tests.mounted import libc
from tests.mounted.children import start, wait
from tests.mounted.operations import pattern
from tests.mounted.running import MIB, KvfsMount, digest, wait_sealed, wait_until

DATA = pattern(7, 300_000)


def write_and_stay(path: Path, data: bytes = DATA) -> int:
    """Open for writing, write, and leave open."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    os.write(descriptor, data)
    return descriptor


def write_without_end(path: Path, size: int) -> None:
    """Write one file larger than the whole pool; it is closed normally when that fails."""
    with open(path, "wb", buffering=0) as file:
        done = 0
        while done < size:
            done += file.write(bytes(MIB))


def vanishes(path: Path) -> None:
    wait_until(lambda: not os.path.lexists(path), 10, f"{path} has been dropped")
    assert path.name not in os.listdir(path.parent)


def failures(mount: KvfsMount) -> int:
    return sum(mount.status()["failures"].values())


@pytest.mark.parametrize("size", [1, 4096, 300_000, 2 * MIB, 5 * MIB + 1])
def test_a_closed_file_becomes_a_page_with_the_digest_of_its_bytes(directory: Path, size: int) -> None:
    path = directory / "page"
    data = pattern(size, min(size, MIB)) * (size // MIB + 1)
    path.write_bytes(data[:size])
    wait_sealed(path)
    hexadecimal = xxhash.xxh3_128_hexdigest(data[:size])
    assert digest(path) == f"xxh3-128:{hexadecimal}:{size}"
    assert path.read_bytes() == data[:size]


def test_a_draft_can_be_read_while_it_is_written(directory: Path) -> None:
    path = directory / "draft"
    descriptor = write_and_stay(path)
    assert path.read_bytes() == DATA
    assert digest(path) is None
    os.write(descriptor, DATA)
    assert path.read_bytes() == DATA + DATA
    os.close(descriptor)
    wait_sealed(path)


def test_the_last_of_several_writers_seals(directory: Path) -> None:
    path = directory / "page"
    first, second = write_and_stay(path), os.open(path, os.O_RDWR)
    os.close(first)
    time.sleep(0.3)
    assert digest(path) is None
    os.pwrite(second, b"changed", 100)
    os.close(second)
    wait_sealed(path)
    changed = DATA[:100] + b"changed" + DATA[107:]
    assert digest(path) == f"xxh3-128:{xxhash.xxh3_128_hexdigest(changed)}:{len(DATA)}"


def test_a_file_that_is_still_mapped_for_writing_is_not_sealed(directory: Path, mode: str) -> None:
    path = directory / "page"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    os.ftruncate(descriptor, 2 * MIB)
    address = libc.map_shared(descriptor, 2 * MIB)
    os.close(descriptor)
    libc.store(address, DATA)
    time.sleep(0.5)
    assert digest(path) is None
    libc.store(address + len(DATA), DATA)
    libc.unmap(address, 2 * MIB)
    wait_sealed(path)
    whole = (DATA + DATA).ljust(2 * MIB, b"\0")
    assert path.read_bytes() == whole
    assert digest(path) == f"xxh3-128:{xxhash.xxh3_128_hexdigest(whole)}:{2 * MIB}"


def test_an_overwritten_page_is_sealed_anew(directory: Path) -> None:
    path = directory / "page"
    path.write_bytes(DATA)
    wait_sealed(path)
    inode, first = path.stat().st_ino, digest(path)
    path.write_bytes(DATA[::-1])
    assert digest(path) != first
    wait_sealed(path)
    assert path.stat().st_ino == inode
    assert digest(path) == f"xxh3-128:{xxhash.xxh3_128_hexdigest(DATA[::-1])}:{len(DATA)}"


def test_a_page_changed_in_its_middle_is_sealed_anew(directory: Path) -> None:
    path = directory / "page"
    path.write_bytes(DATA)
    wait_sealed(path)
    with open(path, "r+b") as file:
        file.seek(5000)
        file.write(b"other")
        file.flush()
        assert digest(path) is None
    wait_sealed(path)
    changed = DATA[:5000] + b"other" + DATA[5005:]
    assert digest(path) == f"xxh3-128:{xxhash.xxh3_128_hexdigest(changed)}:{len(DATA)}"


def test_opening_a_page_for_writing_and_writing_nothing_keeps_it(directory: Path) -> None:
    path = directory / "page"
    path.write_bytes(DATA)
    wait_sealed(path)
    first = digest(path)
    os.close(os.open(path, os.O_RDWR))
    wait_sealed(path)
    assert digest(path) == first


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1])
def test_the_draft_of_a_killed_writer_vanishes(
    mount: KvfsMount, directory: Path, signal_number: signal.Signals
) -> None:
    path = directory / "half"
    before = failures(mount)

    def write_half() -> None:
        write_and_stay(path)
        os.kill(os.getpid(), signal_number)
        time.sleep(60)

    assert wait(start(write_half)) == -signal_number
    vanishes(path)
    assert failures(mount) == before + 1
    path.write_bytes(DATA)
    wait_sealed(path)
    assert path.read_bytes() == DATA


def test_the_draft_of_a_killed_writer_vanishes_under_its_new_name(directory: Path) -> None:
    """Published too early: renamed before all was written."""
    path = directory / "half"

    def write_half() -> None:
        write_and_stay(path)
        path.rename(directory / "published")
        os.kill(os.getpid(), signal.SIGKILL)

    wait(start(write_half))
    vanishes(directory / "published")


def test_a_killed_writer_through_a_mapping_leaves_nothing(directory: Path) -> None:
    path = directory / "half"

    def write_half() -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(descriptor, 2 * MIB)
        with mmap.mmap(descriptor, 2 * MIB) as mapping:
            mapping[: len(DATA)] = DATA
            os.kill(os.getpid(), signal.SIGKILL)

    wait(start(write_half))
    vanishes(path)


def exit_without_close(path: Path) -> None:
    write_and_stay(path)
    os._exit(0)


def exit_with_failure(path: Path) -> None:
    write_and_stay(path)
    os._exit(3)


@pytest.mark.parametrize("leave", [exit_without_close, exit_with_failure])
def test_a_writer_that_ends_by_itself_without_closing_keeps_its_file(
    directory: Path, leave: Callable[[Path], None]
) -> None:
    """So do programs whose output a shell redirects."""
    path = directory / "page"
    wait(start(lambda: leave(path)))
    wait_sealed(path)
    assert path.read_bytes() == DATA


def test_a_killed_reader_takes_nothing_with_it(mount: KvfsMount, directory: Path) -> None:
    path = directory / "page"
    path.write_bytes(DATA)
    wait_sealed(path)
    before = failures(mount)

    def read() -> None:
        with open(path, "rb") as file:
            file.read(10)
            os.kill(os.getpid(), signal.SIGKILL)

    wait(start(read))
    time.sleep(0.3)
    assert path.read_bytes() == DATA
    assert digest(path)
    assert failures(mount) == before


def test_a_draft_that_met_a_full_pool_is_dropped_and_room_comes_back(
    mount: KvfsMount, directory: Path
) -> None:
    path = directory / "too-much"
    before = failures(mount)
    with pytest.raises(OSError, match="No space left") as caught:
        write_without_end(path, mount.pool_bytes + MIB)
    assert caught.value.errno == errno.ENOSPC
    vanishes(path)
    assert failures(mount) > before
    wait_until(lambda: mount.used_bytes() < 16 * MIB, 10, "the room has come back")
    path.write_bytes(DATA)
    wait_sealed(path)


def test_a_page_whose_overwriter_ends_inside_open_goes(mount: KvfsMount, directory: Path) -> None:
    """Its name is given to an empty draft, and the kernel is to open that. Here it looks up a descriptor
    again instead of the name, and so never finds it: as if the program had been killed in between."""
    path = directory / "page"
    path.write_bytes(DATA)
    wait_sealed(path)
    before = failures(mount)
    with open(path, "rb", buffering=0) as reader:
        with pytest.raises(OSError, match="Stale file handle"):
            os.open(f"/proc/self/fd/{reader.fileno()}", os.O_WRONLY | os.O_TRUNC)
        vanishes(path)
        assert reader.read() == DATA
    assert failures(mount) == before + 1
    path.write_bytes(DATA)
    wait_sealed(path)


def test_an_empty_file_stays(mount: KvfsMount, directory: Path) -> None:
    path = directory / "lock"
    path.touch()
    time.sleep(0.3)
    assert path.stat().st_size == 0
    assert digest(path) is None


def test_a_page_written_in_small_pieces_is_moved_into_hugepages(mount: KvfsMount, directory: Path) -> None:
    status = mount.status()
    if not (status["hugepages"]["active"] and status["passthrough"]["active"]):
        pytest.skip("mappings through the mount consist of hugepages only with passthrough and hugepages")
    path = directory / "page"
    with open(path, "wb", buffering=0) as writer:
        for _ in range(16):
            writer.write(os.urandom(MIB // 2))
    wait_sealed(path)
    with open(path, "rb") as reader, mmap.mmap(reader.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        total = sum(mapping[offset] for offset in range(0, 8 * MIB, 4096))
        assert total >= 0
        smaps = Path("/proc/self/smaps").read_text()
    (entry,) = (part for part in smaps.split("VmFlags") if str(path) in part)
    mapped = [int(line.split()[1]) for line in entry.splitlines() if "PmdMapped" in line]
    assert max(mapped) == 8 * 1024, entry


@pytest.mark.deadline(30)
def test_a_program_that_executes_another_while_it_writes_does_not_wait_for_ever(mount: KvfsMount) -> None:
    """execve closes files under a lock that looking at the process needs."""
    path = mount.path / "written by a program that becomes another"
    source = (
        f"import os; f = os.open({str(path)!r}, os.O_CREAT | os.O_WRONLY); os.write(f, b'x' * 5000); {{}}"
    )
    for ending in ("os.execv('/bin/true', ['true'])", "os.system('true')"):
        subprocess.run([sys.executable, "-c", source.format(ending)], check=True, timeout=20)
        wait_sealed(path)
        assert path.read_bytes() == b"x" * 5000
        path.unlink()


def occupy(processor: int, ready: int) -> None:
    """Leave a processor to nobody else for a tenth of a second."""
    os.sched_setaffinity(0, {processor})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    os.write(ready, b".")
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        pass


def test_the_draft_of_a_killed_writer_vanishes_though_the_machine_is_busy(
    mount: KvfsMount, directory: Path
) -> None:
    """The thread that looks whether a signal ended the writer finds no processor for a while."""
    path = directory / "empty"
    *others, processor = sorted(os.sched_getaffinity(0))
    tasks = Path(f"/proc/{mount.daemon_pid}/task")
    (looking,) = (int(task.name) for task in tasks.iterdir() if "flushes" in (task / "comm").read_text())
    os.sched_setaffinity(looking, {processor})
    is_open, opened = os.pipe()
    is_busy, busy = os.pipe()

    def open_and_stay() -> None:
        os.sched_setaffinity(0, others or {processor})
        os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.write(opened, b".")
        time.sleep(60)

    try:
        writer = start(open_and_stay)
        os.read(is_open, 1)
        occupant = start(lambda: occupy(processor, busy))
        os.read(is_busy, 1)
        os.kill(writer, signal.SIGKILL)
        assert wait(writer) == -signal.SIGKILL
        assert wait(occupant) == 0
    finally:
        os.sched_setaffinity(looking, {*others, processor})
        for descriptor in (is_open, opened, is_busy, busy):
            os.close(descriptor)
    vanishes(path)
