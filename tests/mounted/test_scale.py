"""Many names, and large requests."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounted.conftest import MakeMount
from tests.mounted.operations import pattern
from tests.mounted.running import MIB, KvfsMount, environment_for_kvfs, wait_sealed

NAMES = 100_000


@pytest.mark.deadline(300)
def test_a_directory_of_a_hundred_thousand_names(make_mount: MakeMount) -> None:
    mount = make_mount(512 * MIB)
    mount.mount()
    directory = mount.path / "many"
    directory.mkdir()
    for number in range(NAMES):
        os.mknod(f"{directory}/{number}")
    names = os.listdir(directory)
    assert len(names) == len(set(names)) == NAMES
    assert mount.status()["drafts"] >= 0
    begun = time.monotonic()
    mount.umount()
    assert time.monotonic() - begun < 20


def test_names_that_come_and_go_during_a_listing(mount: KvfsMount, directory: Path) -> None:
    """Whoever was there all the time is listed once."""
    stay = {f"stay-{number}" for number in range(3000)}
    for name in sorted(stay):
        (directory / name).touch()
    with os.scandir(directory) as entries:
        seen = []
        for number, entry in enumerate(entries):
            seen.append(entry.name)
            if number % 10 == 0:
                (directory / f"new-{number}").touch()
            if entry.name.startswith("new-"):
                (directory / entry.name).unlink()
    assert len(seen) == len(set(seen))
    assert stay <= set(seen)


@pytest.fixture
def tracing(scratch: Path, mount: KvfsMount) -> Iterator[Path]:
    """The kernel's trace of the requests to this mount."""
    if os.geteuid() != 0:
        pytest.skip("tracing needs root")
    base = scratch / "tracing"
    base.mkdir()
    mounted = subprocess.run(["mount", "-t", "tracefs", "none", str(base)], check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip("this kernel has no tracefs")
    instance = base / "instances/kvfs-test"
    try:
        instance.mkdir()
        event = instance / "events/fuse/fuse_request_send"
        if not event.exists():
            pytest.skip("this kernel does not trace FUSE requests")
        (event / "filter").write_text(f"connection == {os.minor(mount.path.stat().st_dev)}")
        (event / "enable").write_text("1")
        yield instance / "trace"
    finally:
        if instance.exists():
            instance.rmdir()
        subprocess.run(["umount", str(base)], check=True)
        shutil.rmtree(base)


def requests(trace: Path, name: str) -> int:
    return sum(f"({name})" in line for line in trace.read_text().splitlines())


@pytest.mark.parametrize("size", [64 * MIB])
def test_requests_are_large(mount: KvfsMount, directory: Path, tracing: Path, mode: str, size: int) -> None:
    """Without passthrough at least 512 KiB move with each request; with it, none is made at all."""
    path = directory / "page"
    data = memoryview(pattern(1, MIB) * (size // MIB))
    with open(path, "wb", buffering=0) as writer:
        assert writer.write(data) == size
    writes = requests(tracing, "FUSE_WRITE")
    wait_sealed(path)
    target = bytearray(size)
    with open(path, "rb", buffering=0) as reader:
        os.posix_fadvise(reader.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert reader.readinto(target) == size
    assert target == data
    reads = requests(tracing, "FUSE_READ")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert mapping[:] == data
    mapped = requests(tracing, "FUSE_READ") - reads
    largest = 0 if mode == "passthrough" else size // (MIB // 2)
    assert (writes <= largest, reads <= largest, mapped <= largest) == (True, True, True), (
        writes, reads, mapped,
    )  # fmt: skip
    if mode != "passthrough":
        assert writes
        assert reads


@pytest.mark.deadline(120)
def test_few_descriptors_suffice_for_many_pages(make_mount: MakeMount) -> None:
    """What the daemon keeps open for later it gives up when it needs descriptors now."""
    mount = make_mount()
    arguments = ["mount", mount.path, "--pool", str(mount.pool_bytes), "--state-dir", mount.state_base]
    subprocess.run(
        ["prlimit", "--nofile=1024:1024", sys.executable, "-m", "kvfs", *map(str, arguments)],
        env=environment_for_kvfs(), cwd="/", check=True, capture_output=True,
    )  # fmt: skip
    mount.daemon_pid = mount.status()["pid"]
    mount.pids.append(mount.daemon_pid)
    for number in range(1500):
        (mount.path / f"{number}").write_bytes(b"%d" % number)
    for number in range(1500):
        assert (mount.path / f"{number}").read_bytes() == b"%d" % number
    held = []
    try:
        for number in range(500):
            held.append(os.open(mount.path / f"draft-{number}", os.O_RDWR | os.O_CREAT, 0o644))
            os.write(held[-1], b"draft")
        for number in range(0, 1500, 100):
            assert (mount.path / f"{number}").read_bytes() == b"%d" % number
    finally:
        for descriptor in held:
            os.close(descriptor)
    mount.umount()
