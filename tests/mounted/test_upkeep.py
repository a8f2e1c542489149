"""kvfs verify, gc, evict and prefetch on real mounts, with an SSD tier and without."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mounted.children import as_user, errno_as_user, skip_unless_users_can_run_kvfs
from tests.mounted.conftest import MakeMount
from tests.mounted.operations import USER_ID, pattern
from tests.mounted.running import (
    MIB,
    KvfsMount,
    environment_for_kvfs,
    run_kvfs,
    wait_sealed,
    wait_until,
)

pytestmark = pytest.mark.as_root
OK, USAGE, BUSY, NOT_MOUNTED, NOT_PERMITTED, DAMAGED, INTERRUPTED = 0, 2, 7, 8, 9, 12, 130
SIZE = 100_000
COUNT = 6


def data(number: int) -> bytes:
    return pattern(number, SIZE)


class Mount(KvfsMount):
    """A mount with a few pages in one directory, and what a person can do to them behind its back."""

    def fill(self, count: int = COUNT) -> list[Path]:
        pages = [self.path / "pages" / str(number) for number in range(count)]
        pages[0].parent.mkdir(exist_ok=True)
        for number, page in enumerate(pages):
            page.write_bytes(data(number))
        wait_sealed(*pages)
        if self.has_ssd:
            wait_until(lambda: not self.status()["tiers"]["ssd"]["unstored"], 20, "all is on the SSD")
        return pages

    @property
    def has_ssd(self) -> bool:
        return "ssd" in self.status()["tiers"]

    @property
    def ssd(self) -> Path:
        return Path(self.status()["tiers"]["ssd"]["directory"])

    def harm(self, tier: Path, page: Path) -> None:
        """One bit of one byte."""
        with (tier / page.relative_to(self.path)).open("r+b") as file:
            file.seek(5000)
            byte = file.read(1)[0]
            file.seek(5000)
            file.write(bytes([byte ^ 1]))

    def run(self, verb: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return run_kvfs(verb, *arguments)

    def verify(self, *arguments: str) -> dict[str, Any]:
        """The report; the exit code is that of damage or of none."""
        ended = run_kvfs("verify", self.path, "--json", *arguments)
        report: dict[str, Any] = json.loads(ended.stdout)
        assert ended.returncode == (DAMAGED if report["damaged"] else OK), ended
        assert len(ended.stderr.splitlines()) == bool(report["damaged"])
        return report


def tiers(pages: list[Path]) -> list[str]:
    return [os.getxattr(page, "user.kvfs.tier").decode() for page in pages]


@pytest.fixture
def mount(scratch: Path, request: pytest.FixtureRequest) -> Iterator[Mount]:
    """With an SSD tier, on a disk of the tests."""
    base = scratch / "".join(c if c.isalnum() else "-" for c in request.node.name)[:60]
    options = ("--ssd", str(base / "disk"), "--ssd-capacity", "512M", "--settle", "0s", "--mode", "0755")
    with Mount(base, 128 * MIB, *options) as made:
        yield made
        log = made.log
        made.umount()
    assert "Traceback" not in log, log


@pytest.fixture
def dram_mount(scratch: Path, request: pytest.FixtureRequest) -> Iterator[Mount]:
    """Without one."""
    base = scratch / "".join(c if c.isalnum() else "-" for c in request.node.name)[:60]
    with Mount(base, 128 * MIB) as made:
        yield made


# kvfs verify


def test_whole_pages_are_verified_and_nothing_else_happens(mount: Mount) -> None:
    pages = mount.fill()
    assert mount.run("evict", *pages[:3]).returncode == OK
    assert pages[3].read_bytes() == data(3)

    def everything() -> list[Any]:
        status = mount.status()
        return [
            tiers(pages),
            [page.stat().st_atime_ns for page in pages],
            [os.getxattr(page, "user.kvfs.hits") for page in pages],
            [(mount.ssd / page.relative_to(mount.path)).stat().st_atime_ns for page in pages],
            [status[name] for name in ("hits", "misses", "evictions")],
            status["tiers"]["ssd"]["read"],
        ]

    before = everything()
    for arguments in ((), ("--repair",)):
        report = mount.verify(*arguments)
        assert (report["pages"], report["verified"]) == (COUNT, {"dram": COUNT - 3, "ssd": COUNT})
        assert report["damaged"] == report["unverified"] == []
    assert everything() == before
    ended = mount.run("verify", mount.path)
    assert ended.returncode == OK
    assert ended.stderr == ""
    assert ended.stdout == (
        f"{mount.path}: {COUNT} pages verified, {COUNT - 3} in DRAM and {COUNT} on the SSD: all are whole\n"
    )


def test_damaged_pages_are_named_and_repaired(mount: Mount) -> None:
    pages = mount.fill()
    dram, ssd, both, only_there, gone, _whole = pages
    assert mount.run("evict", only_there).returncode == OK
    mount.harm(mount.dram, dram)
    mount.harm(mount.dram, both)
    for page in (ssd, both, only_there):
        mount.harm(mount.ssd, page)
    (mount.ssd / gone.relative_to(mount.path)).unlink()
    ended = mount.run("verify", mount.path)
    assert ended.returncode == DAMAGED
    assert len(ended.stderr.splitlines()) == 1
    assert f"5 of {COUNT} pages damaged" in ended.stderr
    assert sorted(line.split(": ")[0] for line in ended.stdout.splitlines()) == sorted(map(str, pages[:5]))
    expected = {
        str(dram): ("bytes", "ok", "repaired"),
        str(ssd): ("ok", "bytes", "repaired"),
        str(both): ("bytes", "bytes", "removed"),
        str(only_there): (None, "bytes", "removed"),
        str(gone): ("ok", "gone", "repaired"),
    }
    found = {row["path"]: (row.get("dram"), row["ssd"], row["outcome"]) for row in mount.verify()["damaged"]}
    assert found == {path: (*copies, "") for path, (*copies, _outcome) in expected.items()}
    report = mount.verify("--repair")
    found = {row["path"]: (row.get("dram"), row["ssd"], row["outcome"]) for row in report["damaged"]}
    assert found == expected
    wait_until(lambda: not mount.status()["tiers"]["ssd"]["unstored"], 20, "copies are made again")
    assert mount.verify()["verified"] == {"dram": COUNT - 3, "ssd": COUNT - 2}
    for number, page in enumerate(pages):
        if page in (both, only_there):
            assert not page.exists()
        else:
            assert page.read_bytes() == data(number)
    assert mount.status()["misses"] == {"corrupt": 2}
    assert mount.status()["tiers"]["ssd"]["quarantined"] == 3
    for page in (both, only_there):
        page.write_bytes(data(9))
    wait_sealed(both, only_there)
    assert mount.verify()["pages"] == COUNT


def test_repairing_counts_the_ssd_anew(mount: Mount) -> None:
    mount.fill()
    page = mount.ssd / "pages/0"
    os.truncate(page, 0)
    assert mount.verify("--repair")["damaged"]
    used = subprocess.run(
        ["du", "-sB1", "--exclude=.kvfs-temporary", mount.ssd], capture_output=True, text=True, check=True
    )

    def is_right() -> bool:
        ssd = mount.status()["tiers"]["ssd"]
        return not ssd["unstored"] and abs(ssd["used_bytes"] - int(used.stdout.split()[0])) <= SIZE + 8192

    wait_until(is_right, 10, "the accounts are what du says")


def test_the_mount_serves_while_it_is_verified(mount: Mount) -> None:
    pages = mount.fill(200)
    with subprocess.Popen(
        [sys.executable, "-m", "kvfs", "verify", str(mount.path), "--repair"],
        env=environment_for_kvfs(), cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as verifying:  # fmt: skip
        number = 0
        while verifying.poll() is None:
            number += 1
            page = pages[number % len(pages)]
            page.write_bytes(data(number))
            assert page.read_bytes() == data(number)
            (mount.path / "moved").unlink(missing_ok=True)
            pages[(number * 7 + 1) % len(pages)].rename(mount.path / "moved")
            pages[(number * 7 + 1) % len(pages)].write_bytes(data(1))
        out, err = verifying.communicate()
    assert (verifying.returncode, err) == (OK, ""), (out, err)
    assert number > 10
    assert mount.status()["tiers"]["ssd"]["quarantined"] == 0


Action = Callable[[subprocess.Popen[bytes]], object]


def on_a_terminal(mount: Mount, *steps: tuple[bytes, Action]) -> tuple[int, bytes]:
    """``kvfs verify`` on a terminal: how it ended, and all that the terminal showed. Each step is something
    that is done once certain words are there."""
    terminal, inner = pty.openpty()
    command = [sys.executable, "-m", "kvfs", "verify", str(mount.path)]
    environment = environment_for_kvfs({"TERM": "xterm", "COLUMNS": "100"})
    with subprocess.Popen(
        command, env=environment, cwd="/", stdin=inner, stdout=inner, stderr=inner, start_new_session=True
    ) as process:
        os.close(inner)
        screen, left = b"", list(steps)
        with contextlib.suppress(OSError):  # at the end nobody has the other side open any more
            while part := os.read(terminal, 65536):
                screen += part
                while left and left[0][0] in screen:
                    left.pop(0)[1](process)
        os.close(terminal)
    assert not left
    return process.returncode, screen


def test_progress_is_shown_on_a_terminal_alone(mount: Mount) -> None:
    mount.fill(50)
    code, screen = on_a_terminal(mount)
    assert code == OK
    assert b"verifying" in screen
    assert b"50/50" in screen
    assert screen.endswith(b"all are whole\r\n")
    assert mount.run("verify", mount.path).stderr == ""


def test_control_c_ends_it(mount: Mount) -> None:
    mount.fill(1000)
    times: list[float] = []

    def interrupt(process: subprocess.Popen[bytes]) -> None:
        times.append(time.monotonic())
        process.send_signal(signal.SIGINT)

    code, screen = on_a_terminal(mount, (b"verifying", interrupt))
    assert time.monotonic() - times[0] < 3
    assert code == INTERRUPTED
    assert screen.endswith(b"kvfs: interrupted\r\n")
    assert b"Traceback" not in screen
    assert mount.verify()["pages"] == 1000


def test_control_c_is_heard_although_the_daemon_hangs(mount: Mount) -> None:
    """The kernel keeps a process until what it has asked for is answered."""
    mount.fill(1000)

    def hang_and_interrupt(process: subprocess.Popen[bytes]) -> None:
        os.kill(mount.daemon_pid, signal.SIGSTOP)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)

    def go_on(_process: subprocess.Popen[bytes]) -> None:
        os.kill(mount.daemon_pid, signal.SIGCONT)

    code, screen = on_a_terminal(mount, (b"verifying", hang_and_interrupt), (b"kvfs: interrupted", go_on))
    assert code == INTERRUPTED
    assert b"Traceback" not in screen
    assert mount.verify()["pages"] == 1000


def test_what_is_being_written_is_no_page_yet(mount: Mount) -> None:
    mount.fill()
    with (mount.path / "draft").open("wb") as file:
        file.write(data(1))
        file.flush()
        report = mount.verify()
        assert (report["pages"], report["drafts"]) == (COUNT, 1)


def test_without_an_ssd_it_verifies_dram(dram_mount: Mount) -> None:
    pages = dram_mount.fill()
    assert dram_mount.verify("--repair")["verified"] == {"dram": COUNT}
    dram_mount.harm(dram_mount.dram, pages[0])
    (row,) = dram_mount.verify()["damaged"]
    assert (row["path"], row["dram"]) == (str(pages[0]), "bytes")
    (row,) = dram_mount.verify("--repair")["damaged"]
    assert row["outcome"] == "removed"
    assert not pages[0].exists()
    assert dram_mount.status()["misses"] == {"corrupt": 1}
    assert dram_mount.verify()["pages"] == COUNT - 1


def test_who_may_not_read_a_page_hears_so(mount: Mount) -> None:
    skip_unless_users_can_run_kvfs()
    pages = mount.fill()
    pages[0].chmod(0o600)

    def work() -> None:
        ended = run_kvfs("verify", mount.path)
        assert ended.returncode == NOT_PERMITTED, ended
        assert ended.stderr == "kvfs: 1 file could not be verified by you: use sudo\n"
        assert len(json.loads(run_kvfs("verify", mount.path, "--json").stdout)["unverified"]) == 1

    as_user(work)


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
    assert json.loads(dram_mount.run("gc", dram_mount.path, "--json").stdout) == {"ssd": None}


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
        (("evict", mount.path / ".kvfs/status"), NOT_PERMITTED, "could not be evicted"),
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
