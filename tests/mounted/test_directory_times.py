"""tar, cp and rsync over a mount whose pages leave DRAM and come back: no directory seems to have changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.mounted.conftest import MODES
from tests.mounted.operations import pattern
from tests.mounted.running import MIB, KvfsMount, wait_sealed, wait_until

pytestmark = [pytest.mark.as_root, pytest.mark.deadline(180)]

POOL = 32 * MIB
DIRECTORIES = ["a", "a/b", "c"]
COUNT = 14
"""Pages in each directory: together more than DRAM holds."""


@contextmanager
def mounted(base: Path, number: int, mode: str) -> Iterator[KvfsMount]:
    disk = str(base / "disk")
    arguments = ("--ssd", disk, "--ssd-capacity", str(512 * MIB), "--settle", "0s", "--ssd-write-delay", "0s")
    with KvfsMount(base / f"mount-{number}", POOL, *arguments, environment=MODES[mode]) as mount:
        yield mount


@pytest.fixture
def base(scratch: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    base = scratch / "".join(c if c.isalnum() else "-" for c in request.node.name)
    (base / "disk").mkdir(parents=True)
    yield base
    shutil.rmtree(base / "disk")


def fill(mount: KvfsMount) -> list[Path]:
    paths = []
    for number, name in enumerate(DIRECTORIES):
        directory = mount.path / name
        directory.mkdir()
        for place in range(COUNT):
            paths.append(directory / f"page-{place}")
            paths[-1].write_bytes(pattern(number * COUNT + place, MIB))
    wait_sealed(*paths, seconds=60)
    for number, name in enumerate(DIRECTORIES):
        os.utime(mount.path / name, ns=(5, (10 + number) * 10**9 + 123_456_789))
    wait_until(lambda: not mount.status()["tiers"]["ssd"]["unstored"], 60, "all is on the SSD")
    return paths


def times(mount: KvfsMount) -> dict[str, tuple[int, int, int]]:
    found = {}
    for name in (".", *DIRECTORIES):
        status = (mount.path / name).stat()
        found[name] = (status.st_mtime_ns, status.st_ctime_ns, status.st_size)
    return found


@contextmanager
def pages_move(mount: KvfsMount, paths: list[Path]) -> Iterator[None]:
    """Somebody reads all pages again and again: each brings one up, for which others leave."""
    stop = threading.Event()
    failures: list[OSError] = []

    def read() -> None:
        while not stop.is_set():
            for path in paths:
                if stop.is_set():
                    break
                try:
                    path.read_bytes()
                except OSError as error:
                    failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    before = mount.status()
    try:
        yield
    finally:
        stop.set()
        reader.join()
    after = mount.status()
    assert after["tiers"]["ssd"]["read"] > before["tiers"]["ssd"]["read"]
    assert after["evictions"] > before["evictions"]
    assert not failures


def run(*command: str | Path, cwd: Path) -> str:
    ended = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
    return ended.stdout


def test_tools_see_no_change_where_none_is(base: Path, mode: str) -> None:
    with mounted(base, 0, mode) as mount:
        paths = fill(mount)
        before = times(mount)
        copy, backup = base / "copy", base / "backup"
        with pages_move(mount, paths):
            for _ in range(2):
                run("tar", "--create", "--file", base / "all.tar", ".", cwd=mount.path)
                assert times(mount) == before
            run("cp", "-a", f"{mount.path}/.", copy, cwd=base)
            run("rsync", "-a", f"{mount.path}/", backup, cwd=base)
            changed = run("rsync", "-a", "--itemize-changes", f"{mount.path}/", backup, cwd=base)
        assert changed == ""
        for name in DIRECTORIES:
            for where in (copy, backup):
                assert (where / name).stat().st_mtime_ns == before[name][0]
        assert times(mount) == before
        for where in (copy, backup):
            shutil.rmtree(where)


@pytest.mark.parametrize("end", ["kill", "umount --keep", "reboot"])
def test_times_outlive_the_daemon(base: Path, mode: str, end: str) -> None:
    with mounted(base, 0, mode) as mount:
        fill(mount)
        before = times(mount)
        mount.path.joinpath("torn").open("wb").close()  # will be dropped
        before["."] = times(mount)["."]
        if end == "reboot":
            mount.path.joinpath("torn").unlink()
            before["."] = times(mount)["."]
            mount.umount()
        elif end == "kill":
            mount.kill_daemon()
        else:
            mount.umount("--keep")
        if end != "reboot":
            mount.remount()
            after = times(mount)
    if end == "reboot":
        with mounted(base, 1, mode) as other:
            wait_until(lambda: (other.path / "a/b").exists(), 10, "the SSD was walked")
            after = times(other)
    for name in (".", *DIRECTORIES):
        assert after[name][0] == before[name][0], name
        assert after[name][1] == after[name][0], "the time of change is that of the names again"
