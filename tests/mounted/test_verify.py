"""kvfs verify on real mounts, with an SSD tier and without."""

from __future__ import annotations

import contextlib
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

from tests.mounted.children import as_user, skip_unless_users_can_run_kvfs
from tests.mounted.running import MIB, environment_for_kvfs, run_kvfs, wait_sealed, wait_until
from tests.mounted.upkeep import (
    COUNT,
    DAMAGED,
    INTERRUPTED,
    NOT_PERMITTED,
    OK,
    SIZE,
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
