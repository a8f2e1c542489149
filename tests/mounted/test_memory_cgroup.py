"""Writers in a memory-limited control group, as in a container."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounted.children import start, wait
from tests.mounted.operations import pattern
from tests.mounted.running import MIB, KvfsMount, is_alive, wait_sealed, wait_until

pytestmark = pytest.mark.as_root
LIMIT = 64 * MIB
V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")


@pytest.fixture
def limited() -> Iterator[Path]:
    """A control group whose members may hold 64 MiB; joined by writing to its cgroup.procs."""
    name = f"kvfs-test-{os.getpid()}"
    if (V1 / "memory.limit_in_bytes").exists():
        group, limit = V1 / name, "memory.limit_in_bytes"
    elif "memory" in (V2 / "cgroup.subtree_control").read_text().split():
        group, limit = V2 / name, "memory.max"
    else:
        pytest.skip("the memory controller is given to no control group here")
    try:
        group.mkdir()
        (group / limit).write_text(str(LIMIT))
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    with contextlib.suppress(OSError):
        (group / "memory.swap.max").write_text("0")
    yield group
    wait_until(lambda: not (group / "cgroup.procs").read_text(), 5, "the group is empty")
    group.rmdir()


def write(path: Path, size: int) -> None:
    with open(path, "wb", buffering=0) as file:
        for _ in range(size // MIB):
            file.write(pattern(1, MIB))


def test_a_writer_within_its_limit_succeeds(mount: KvfsMount, directory: Path, limited: Path) -> None:
    path = directory / "page"

    def work() -> None:
        (limited / "cgroup.procs").write_text(str(os.getpid()))
        write(path, 16 * MIB)

    assert wait(start(work)) == 0
    wait_sealed(path)
    assert path.read_bytes() == pattern(1, MIB) * 16


def test_a_writer_above_its_limit_leaves_nothing_and_the_mount_goes_on(
    mount: KvfsMount, directory: Path, limited: Path
) -> None:
    """The kernel kills it, or refuses memory; where the daemon does the writing, it has no limit."""
    path = directory / "page"

    def work() -> None:
        (limited / "cgroup.procs").write_text(str(os.getpid()))
        write(path, 100 * MIB)

    ended = wait(start(work))
    if ended == 0:
        wait_sealed(path)
        assert path.stat().st_size == 100 * MIB
    else:
        assert ended in (-signal.SIGKILL, 1)
        wait_until(lambda: not path.exists(), 10, "the half-written file has been dropped")
    assert is_alive(mount.daemon_pid)
    (directory / "other").write_bytes(pattern(2, MIB))
    wait_sealed(directory / "other")
    assert (directory / "other").read_bytes() == pattern(2, MIB)


def test_a_file_given_its_size_is_charged_to_the_daemon(
    mount: KvfsMount, directory: Path, limited: Path
) -> None:
    """So a container with a small limit can fill a large page through a mapping."""
    path = directory / "page"
    size = 96 * MIB

    def work() -> None:
        (limited / "cgroup.procs").write_text(str(os.getpid()))
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(descriptor, size)
        with mmap.mmap(descriptor, size) as mapping:
            for offset in range(0, size, MIB):
                mapping[offset : offset + MIB] = pattern(3, MIB)
        os.close(descriptor)

    if not mount.passthrough:
        pytest.skip("without passthrough a mapping lives in the kernel's page cache, charged to the writer")
    assert wait(start(work)) == 0
    wait_sealed(path)
    assert path.read_bytes() == pattern(3, MIB) * 96
