"""Pages that are pinned and pages that expire, as users and their tools meet them on real mounts."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounted.children import as_user, errno_as_user
from tests.mounted.operations import USER_ID, pattern
from tests.mounted.running import MIB, wait_sealed, wait_until
from tests.mounted.upkeep import COUNT, OK, SIZE, Mount, data, mounted_with_ssd, place, tiers

pytestmark = pytest.mark.as_root
PIN, TTL = "user.kvfs.pin", "user.kvfs.ttl"


@pytest.fixture
def base(scratch: Path, request: pytest.FixtureRequest) -> Path:
    return place(scratch, request.node.name)


@pytest.fixture
def mount(base: Path) -> Iterator[Mount]:
    with mounted_with_ssd(base) as mount:
        yield mount


def attribute(path: Path, name: str) -> str | None:
    try:
        return os.getxattr(path, name).decode()
    except OSError as error:
        if error.errno != errno.ENODATA:
            raise
        return None


def call(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def push_out(mount: Mount) -> None:
    """Writes so much that whatever may leave DRAM does."""
    for number in range(20):
        path = mount.path / f"filler-{number}"
        path.write_bytes(pattern(number, MIB) * 8)
        wait_sealed(path, seconds=30)


def test_pinned_pages_stay_in_dram_until_they_are_unpinned(mount: Mount) -> None:
    pages = mount.fill()
    assert mount.run("evict", mount.path / "pages").returncode == OK
    ended = mount.run("pin", mount.path / "pages")
    assert (ended.returncode, ended.stdout) == (OK, f"{COUNT} pages pinned, 585.9 KiB\n")
    assert tiers(pages) == ["dram"] * COUNT
    assert mount.run("pin", pages[0]).stdout == "0 pages pinned, 0 B\n"
    push_out(mount)
    assert tiers(pages) == ["dram"] * COUNT
    assert mount.status()["pinned"] == {"pages": COUNT, "bytes": COUNT * SIZE, "budget_bytes": 32 * MIB}
    ended = mount.run("evict", pages[0])
    assert (ended.returncode, ended.stdout.splitlines()[0]) == (7, f"{pages[0]}: pinned")
    ended = mount.run("unpin", mount.path / "pages")
    assert (ended.returncode, ended.stdout) == (OK, f"{COUNT} pages not pinned any more\n")
    assert mount.run("unpin", pages[0]).stdout == "0 pages not pinned any more\n"
    assert mount.run("evict", mount.path / "pages").returncode == OK
    assert tiers(pages) == ["ssd"] * COUNT


def test_more_than_the_budget_is_refused_before_anything_is_pinned(mount: Mount) -> None:
    pages = [mount.path / f"large-{number}" for number in range(5)]
    for number, page in enumerate(pages):
        page.write_bytes(pattern(number, MIB) * 8)
    wait_sealed(*pages, seconds=30)
    ended = mount.run("pin", *pages)
    assert (ended.returncode, ended.stdout) == (1, "")
    (line,) = ended.stderr.splitlines()
    assert line == (
        f"kvfs: 40.0 MiB more cannot be pinned: {mount.path} allows 32.0 MiB, of which 0 B are taken; unpin "
        "some, or mount it with a larger --pin-percent"
    )
    assert mount.status()["pinned"]["pages"] == 0
    assert mount.run("pin", *pages[:4]).returncode == OK
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        os.setxattr(pages[4], PIN, b"1")
    pages[0].unlink()
    os.setxattr(pages[4], PIN, b"1")
    assert "the pool is full" not in mount.log


def test_only_owners_and_root_decide(mount: Mount) -> None:
    page = mount.fill()[0]
    page.chmod(0o644)
    for name in (PIN, TTL):
        assert errno_as_user(lambda: os.setxattr(page, name, b"1")) == errno.EACCES  # noqa: B023
    page.chmod(0o666)
    for name, value in ((PIN, b"1"), (TTL, b"1h")):
        assert errno_as_user(lambda: os.setxattr(page, name, value)) == errno.EPERM  # noqa: B023
        os.chown(page, USER_ID, USER_ID)
        as_user(lambda: os.setxattr(page, name, value))  # noqa: B023
        os.chown(page, 0, 0)
        assert errno_as_user(lambda: os.removexattr(page, name)) == errno.EPERM  # noqa: B023
    assert (attribute(page, PIN), attribute(page, TTL)) == ("1", "3600s")


def test_tools_set_them_copy_them_and_show_them(mount: Mount, base: Path) -> None:
    page, directory = mount.fill()[0], mount.path / "directory"
    directory.mkdir()
    call("setfattr", "-n", PIN, "-v", "1", page)
    call("setfattr", "-n", TTL, "-v", "30m", page)
    call("setfattr", "-n", TTL, "-v", "1h", directory)
    listed = subprocess.run(["getfattr", "-d", page], capture_output=True, text=True, check=True).stdout
    assert f'{PIN}="1"' in listed
    assert f'{TTL}="1800s"' in listed
    call("cp", "-a", "--preserve=xattr", page, mount.path / "copied")
    call("rsync", "-aX", page, mount.path / "synced")
    call("cp", "-a", "--preserve=xattr", directory, mount.path / "directory-copied")
    wait_sealed(mount.path / "copied", mount.path / "synced")
    for copy in (mount.path / "copied", mount.path / "synced"):
        assert copy.read_bytes() == data(0)
        assert (attribute(copy, PIN), attribute(copy, TTL)) == ("1", "1800s")
    assert attribute(mount.path / "directory-copied", TTL) == "3600s"
    assert mount.status()["pinned"]["pages"] == 3
    call("setfattr", "-x", PIN, page)
    call("setfattr", "-n", PIN, "-v", "0", mount.path / "copied")
    assert mount.status()["pinned"]["pages"] == 1
    assert attribute(page, PIN) is None
    with pytest.raises(subprocess.CalledProcessError):
        call("setfattr", "-n", TTL, "-v", "soon", page)


def test_pages_expire_and_are_misses(mount: Mount) -> None:
    directory = mount.path / "short"
    directory.mkdir()
    os.setxattr(directory, TTL, b"2s")
    pages = [directory / str(number) for number in range(5)]
    for page in pages:
        page.write_bytes(data(1))
    wait_sealed(*pages)
    sealed = time.monotonic()
    wait_until(lambda: not mount.status()["tiers"]["ssd"]["unstored"], 20, "all is on the SSD")
    assert mount.run("evict", pages[0]).returncode == OK
    assert mount.run("pin", pages[1]).returncode == OK
    with pages[2].open("rb") as reader:
        assert attribute(pages[2], TTL) == "2s"
        assert mount.status()["expiring"] == {"pages": 5}
        wait_until(lambda: len(list(directory.iterdir())) == 1, 10, "they expire")
        assert 1.5 < time.monotonic() - sealed < 6
        assert reader.read() == data(1)
    with pytest.raises(FileNotFoundError):
        pages[0].read_bytes()
    assert pages[1].read_bytes() == data(1)
    assert mount.status()["misses"]["expired"] == 4
    assert "1 expired, and kept because they are pinned" in mount.run("gc", mount.path).stdout
    found = json.loads(mount.run("gc", mount.path, "--json").stdout)["expired"]
    assert [row["path"] for row in found["files"]] == ["short/1"]
    assert mount.run("unpin", pages[1]).returncode == OK
    wait_until(lambda: not pages[1].exists(), 10, "it expires")
    directory.rmdir()


@pytest.mark.parametrize("end", ["kill", "umount"])
def test_all_of_it_is_there_after_the_next_mount(base: Path, end: str) -> None:
    with mounted_with_ssd(base) as mount:
        pages = mount.fill()
        os.setxattr(mount.path / "pages", TTL, b"1h")
        late = mount.path / "pages/late"
        late.write_bytes(data(9))
        wait_sealed(late)
        assert mount.run("pin", pages[0]).returncode == OK
        wait_until(lambda: not mount.status()["tiers"]["ssd"]["unstored"], 20, "all is on the SSD")
        wait_until(lambda: not mount.status()["tiers"]["ssd"]["waiting_changes"], 20, "the SSD follows")
        if end == "kill":
            mount.kill_daemon()
        else:
            mount.umount()
        mount.mount()
        wait_until(lambda: attribute(pages[0], "user.kvfs.tier") == "dram", 20, "it is in DRAM again")
        assert (attribute(pages[0], PIN), attribute(pages[1], PIN)) == ("1", None)
        assert (attribute(late, TTL), attribute(mount.path / "pages", TTL)) == ("3600s", "3600s")
        assert mount.status()["pinned"] == {"pages": 1, "bytes": SIZE, "budget_bytes": 32 * MIB}
        assert mount.status()["expiring"] == {"pages": 1}
        push_out(mount)
        assert tiers(pages[:1]) == ["dram"]
