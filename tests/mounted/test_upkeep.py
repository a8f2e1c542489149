"""kvfs gc, evict and prefetch on real mounts, and who may ask for what."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounted.children import as_user, errno_as_user, skip_unless_users_can_run_kvfs
from tests.mounted.conftest import MakeMount
from tests.mounted.operations import USER_ID, pattern
from tests.mounted.running import MIB, run_kvfs, wait_sealed
from tests.mounted.upkeep import (
    BUSY,
    COUNT,
    NOT_MOUNTED,
    NOT_PERMITTED,
    OK,
    USAGE,
    Mount,
    data,
    mounted_with_ssd,
    place,
    tiers,
)

pytestmark = pytest.mark.as_root


@pytest.fixture
def mount(scratch: Path, request: pytest.FixtureRequest) -> Iterator[Mount]:
    with mounted_with_ssd(place(scratch, request.node.name)) as mount:
        yield mount


@pytest.fixture
def dram_mount(scratch: Path, request: pytest.FixtureRequest) -> Iterator[Mount]:
    with Mount(place(scratch, request.node.name), 128 * MIB) as mount:
        yield mount


# Who may ask


def test_only_the_owner_and_root_repair_evict_and_delete(mount: Mount) -> None:
    """Others can not even if the mode lets them write."""
    pages = mount.fill()
    pages[0].chmod(0o666)
    pages[1].chmod(0o644)
    mount.path.chmod(0o777)
    for page, name, value, number in (
        (pages[0], "user.kvfs.verify", b"repair", errno.EPERM),
        (pages[0], "user.kvfs.evict", b"1", errno.EPERM),
        (pages[1], "user.kvfs.evict", b"1", errno.EACCES),
        (mount.path, "user.kvfs.verify", b"recount", errno.EPERM),
        (mount.path, "user.kvfs.leftovers", b"delete", errno.EPERM),
    ):
        assert errno_as_user(lambda: os.setxattr(page, name, value)) == number  # noqa: B023
    os.chown(pages[0], USER_ID, USER_ID)
    os.chown(mount.path, USER_ID, USER_ID)
    as_user(lambda: os.setxattr(pages[0], "user.kvfs.verify", b"repair"))
    as_user(lambda: os.setxattr(pages[0], "user.kvfs.evict", b"1"))
    as_user(lambda: os.setxattr(mount.path, "user.kvfs.verify", b"recount"))
    as_user(lambda: os.setxattr(mount.path, "user.kvfs.leftovers", b"delete"))
    assert tiers(pages[:1]) == ["ssd"]


def test_no_listing_shows_what_can_be_asked(mount: Mount) -> None:
    page = mount.fill()[0]
    assert os.getxattr(page, "user.kvfs.verify") == b"dram=ok ssd=ok"
    listed = {*os.listxattr(page), *os.listxattr(mount.path)}
    assert listed == {f"user.kvfs.{name}" for name in ("digest", "tier", "hits", "sealed")}


# kvfs gc


def test_what_is_left_over_is_shown_and_deleted(mount: Mount) -> None:
    pages = mount.fill()
    mount.harm(mount.ssd, pages[0])
    (mount.ssd / "pages/notes.txt").write_text("somebody's")
    temporary = mount.ssd / ".kvfs-temporary/left"
    temporary.write_bytes(data(1))
    temporary.chmod(0o1600)
    assert mount.verify("--repair")["damaged"]
    found = json.loads(mount.run("gc", mount.path, "--json").stdout)["ssd"]
    assert [found[kind]["count"] for kind in ("temporaries", "quarantine", "foreign")] == [1, 1, 1]
    (row,) = found["quarantine"]["files"]
    assert (row["path"], row["reason"]) == ("pages/0", "bytes")
    ended = mount.run("gc", mount.path)
    assert ended.returncode == OK
    for words in ("pages/0, its bytes do not match", "pages/notes.txt", ".kvfs-temporary/left", "--delete"):
        assert words in ended.stdout
    ended = mount.run("gc", mount.path, "--delete")
    assert ended.returncode == OK
    assert "2 files deleted" in ended.stdout
    found = json.loads(mount.run("gc", mount.path, "--json").stdout)["ssd"]
    assert [found[kind]["count"] for kind in ("temporaries", "quarantine", "foreign")] == [0, 0, 1]
    assert (mount.ssd / "pages/notes.txt").read_text() == "somebody's"
    assert mount.verify()["pages"] == COUNT


def test_without_an_ssd_nothing_can_be_left_over(dram_mount: Mount) -> None:
    for arguments in ((), ("--delete",)):
        ended = dram_mount.run("gc", dram_mount.path, *arguments)
        assert (ended.returncode, ended.stderr) == (OK, "")
        assert ended.stdout == f"{dram_mount.path} has no SSD tier: nothing can be left over\n"
    assert json.loads(dram_mount.run("gc", dram_mount.path, "--json").stdout)["ssd"] is None


def test_who_may_not_delete_hears_so(mount: Mount) -> None:
    skip_unless_users_can_run_kvfs()

    def work() -> None:
        assert run_kvfs("gc", mount.path).returncode == OK
        ended = run_kvfs("gc", mount.path, "--delete")
        assert ended.returncode == NOT_PERMITTED
        assert ended.stderr == (
            f"kvfs: only root and the owner of {mount.path} may delete what is left over\n"
        )

    as_user(work)


# kvfs evict and prefetch


def test_pages_go_down_and_come_up(mount: Mount) -> None:
    pages = mount.fill()
    ended = mount.run("evict", pages[0], pages[1])
    assert (ended.returncode, ended.stdout) == (OK, "2 pages not in DRAM any more\n")
    assert tiers(pages) == ["ssd"] * 2 + ["dram"] * (COUNT - 2)
    assert mount.run("evict", mount.path / "pages").returncode == OK
    assert tiers(pages) == ["ssd"] * COUNT
    assert mount.status()["tiers"]["dram"]["pages"] == 0
    ended = mount.run("prefetch", pages[2])
    assert (ended.returncode, ended.stdout) == (OK, "1 page brought into DRAM\n")
    ended = mount.run("prefetch", mount.path)
    assert (ended.returncode, ended.stdout) == (OK, f"{COUNT - 1} pages brought into DRAM\n")
    assert tiers(pages) == ["dram"] * COUNT
    status = mount.status()
    assert (status["hits"]["dram"], status["misses"], status["tiers"]["ssd"]["read"]) == (0, {}, COUNT)
    for number, page in enumerate(pages):
        assert page.read_bytes() == data(number)


def test_pages_in_use_are_named_and_stay(mount: Mount) -> None:
    pages = mount.fill()
    with pages[0].open("rb") as reader, (mount.path / "draft").open("wb") as writer:
        writer.write(data(1))
        writer.flush()
        ended = mount.run("evict", mount.path)
        assert ended.returncode == BUSY
        assert ended.stderr == "kvfs: 2 files in use: they stay in DRAM\n"
        assert set(ended.stdout.splitlines()) == {
            f"{pages[0]}: in use",
            f"{mount.path / 'draft'}: in use",
            f"{COUNT - 1} pages not in DRAM any more",
        }
        assert reader.read() == data(0)
    assert tiers(pages) == ["dram"] + ["ssd"] * (COUNT - 1)


def test_without_an_ssd_an_evicted_page_is_gone(dram_mount: Mount) -> None:
    pages = dram_mount.fill()
    assert dram_mount.run("evict", pages[0]).returncode == OK
    assert not pages[0].exists()
    assert pages[1].read_bytes() == data(1)
    assert dram_mount.run("prefetch", dram_mount.path).returncode == OK


def test_more_than_dram_holds_is_not_prefetched(mount: Mount) -> None:
    large = [mount.path / f"large-{number}" for number in range(5)]
    for number, page in enumerate(large):
        page.write_bytes(pattern(number, MIB) * 32)
        wait_sealed(page)
    assert mount.run("evict", mount.path).returncode == OK
    ended = mount.run("prefetch", mount.path)
    assert (ended.returncode, ended.stdout) == (USAGE, "")
    assert len(ended.stderr.splitlines()) == 1
    assert "160.0 MiB are only on the SSD" in ended.stderr
    assert mount.status()["tiers"]["ssd"]["read"] == 0
    assert mount.run("prefetch", *large[:2]).returncode == OK


# What a person gets wrong


def test_paths_that_make_no_sense(mount: Mount, tmp_path: Path) -> None:
    for arguments, code, words in (
        (("evict", mount.path / "none"), USAGE, "No such file or directory"),
        (("prefetch", tmp_path), NOT_MOUNTED, "not on a mount of kvfs"),
        (("verify", mount.path / "pages"), NOT_MOUNTED, "nothing is mounted at"),
        (("gc", tmp_path), NOT_MOUNTED, "nothing is mounted at"),
    ):
        ended = run_kvfs(*arguments)
        assert ended.returncode == code, ended
        assert len(ended.stderr.splitlines()) == 1
        assert words in ended.stderr


def test_a_mount_whose_daemon_is_gone(make_mount: MakeMount) -> None:
    mount = make_mount()
    mount.mount()
    (mount.path / "page").write_bytes(data(1))
    wait_sealed(mount.path / "page")
    mount.kill_daemon()
    for arguments in (
        ("verify", mount.path),
        ("gc", mount.path),
        ("evict", mount.path / "page"),
        ("prefetch", mount.path),
    ):
        ended = run_kvfs(*arguments)
        assert ended.returncode == NOT_MOUNTED, ended
        assert len(ended.stderr.splitlines()) == 1
        assert ended.stdout == ""


@pytest.mark.parametrize("verb", ["evict", "prefetch", "pin", "unpin"])
def test_what_is_no_page_is_called_what_it_is(mount: Mount, verb: str) -> None:
    fifo, socket_path = mount.path / "fifo", mount.path / "socket"
    os.mkfifo(fifo)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(socket_path))
    own = "it is how the mount tells of itself"
    for path, reason in (
        (fifo, "it is a fifo"),
        (socket_path, "it is a socket"),
        (mount.path / ".kvfs/status", own),
        (mount.path / ".kvfs", own),
    ):
        ended = mount.run(verb, path)
        told = f"kvfs: {path} is no page: {reason}\n"
        assert (ended.returncode, ended.stdout, ended.stderr) == (USAGE, "", told)
    assert mount.run(verb, mount.path).returncode == OK, "below a directory they are passed over"
