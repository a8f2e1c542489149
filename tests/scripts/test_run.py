"""What ``./run`` says of apt, what it does when it is interrupted, and what it takes away."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.mounted.running import wait_until
from tests.scripts.fakes import REPOSITORY, press_control_c, start_script, write_script

#: Places outside of the checkout that the script reads and changes.
SYSTEM = re.compile(r"(?<![\w}])/(?=(?:opt|usr/local|sbin|etc|run|proc)/)")
PLAN = 'echo "Need to get 61 kB of archives."'


class Checkout:
    """A checkout with the scripts alone, on a machine that lacks every package; nothing in it is real."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.run = base / "checkout" / "run"
        self.programs = base / "programs"
        (base / "checkout" / "demo").mkdir(parents=True)
        shutil.copy(REPOSITORY / "run", self.run)
        shutil.copy(REPOSITORY / "demo" / "jobs.sh", base / "checkout" / "demo")
        (base / "checkout" / "pyproject.toml").touch()
        (base / "checkout" / "kvfs" / "fs").mkdir(parents=True)
        for name in ("_channel.c", "_channel.h"):
            (base / "checkout" / "kvfs" / "fs" / name).touch()
        environment = base / "checkout" / ".venv" / "bin"
        environment.mkdir(parents=True)
        for name in ("python", "ruff", "mypy"):
            write_script(environment / name, f'#!/bin/sh\necho {name} "$@"\n')
        self.programs.mkdir()
        write_script(self.programs / "id", "#!/bin/sh\necho 0\n")
        write_script(self.programs / "dpkg-query", "#!/bin/sh\nexit 1\n")

    def apt(self, download: str, install: str) -> None:
        """What the two steps of apt-get do, in shell."""
        write_script(
            self.programs / "apt-get",
            f'#!/bin/sh\ncase "$*" in\n*assume-no*) {PLAN} ;;\n*update) touch {self.base}/updated ;;\n'
            f"*download-only*) {download} ;;\n"
            f"*) {install} ;;\nesac\n",
        )

    @property
    def environment(self) -> dict[str, str]:
        temporary = self.base / "tmp"
        temporary.mkdir(exist_ok=True)
        return {**os.environ, "PATH": f"{self.programs}:/usr/bin:/bin", "TMPDIR": str(temporary)}

    def temporaries(self) -> list[str]:
        return os.listdir(self.base / "tmp")

    def lint(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", self.run, "lint"],
            env=self.environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_apt_is_quiet_when_all_is_well(checkout: Checkout) -> None:
    checkout.apt("echo Get:1 fuse3", "echo Setting up fuse3 >&2")
    ended = checkout.lint()
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "run: Need to get 61 kB of archives.\n" in ended.stdout
    assert "fuse3 ..." not in ended.stdout
    assert "Get:1" not in ended.stdout
    assert "Setting up" not in ended.stdout
    assert "ruff check .\n" in ended.stdout
    assert checkout.temporaries() == []


def test_old_package_lists_are_read_anew(checkout: Checkout) -> None:
    checkout.apt(f"test -e {checkout.base}/updated", "true")
    ended = checkout.lint()
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "reading the package lists" in ended.stdout


@pytest.mark.parametrize(
    ("download", "install", "word"),
    [
        ("echo E: no network; exit 100", "true", "download"),
        ("true", "echo E: no network >&2; exit 100", "install"),
    ],
)
def test_apt_is_shown_when_it_fails(checkout: Checkout, download: str, install: str, word: str) -> None:
    checkout.apt(download, install)
    ended = checkout.lint()
    assert ended.returncode == 1
    said, verdict = ended.stderr.splitlines()
    assert said == "E: no network"
    assert word in verdict
    assert "above" in verdict
    assert checkout.temporaries() == []


def interrupt(checkout: Checkout, begun: Path) -> tuple[int, float, str]:
    process = start_script(
        "sh", checkout.run, "lint", environment=checkout.environment, directory=checkout.base
    )
    wait_until(begun.exists, 10, "apt has begun")
    status, seconds = press_control_c(process)
    return status, seconds, (checkout.base / "stderr").read_text()


def test_control_c_ends_a_download_at_once(checkout: Checkout) -> None:
    begun = checkout.base / "begun"
    checkout.apt(f"touch {begun}; exec sleep 600", "true")
    status, seconds, said = interrupt(checkout, begun)
    assert (status, said) == (130, "run: interrupted\n")
    assert seconds < 5
    assert checkout.temporaries() == []


def test_control_c_does_not_cut_off_what_apt_installs(checkout: Checkout) -> None:
    begun, done = checkout.base / "begun", checkout.base / "done"
    checkout.apt("true", f"touch {begun}; sleep 1; touch {done}")
    status, _, said = interrupt(checkout, begun)
    assert (status, said.count("\n")) == (130, 1)
    assert said.startswith("run: interrupted; what has begun")
    assert done.exists()
    assert checkout.temporaries() == []


class Machine:
    """What ``./run install`` would have left, in a directory of the test."""

    LINKS = ("usr/local/bin/kvfs", "sbin/mount.kvfs", "sbin/mount.fuse.kvfs")
    UNIT = "usr/local/lib/systemd/system/kvfs@.service"
    ENABLED = "etc/systemd/system/multi-user.target.wants/kvfs@mnt-kv.service"

    def __init__(self, checkout: Checkout) -> None:
        self.checkout = checkout
        self.root = checkout.base / "system"
        checkout.run.write_text(SYSTEM.sub(f"{self.root}/", checkout.run.read_text()))
        self.write("opt/kvfs/bin/kvfs", "the program")
        self.write("proc/self/mountinfo", "20 1 0:20 / / rw - ext4 /dev/vda rw\n")
        self.path("run/kvfs").mkdir(parents=True)
        for link in self.LINKS:
            program = "mount.kvfs" if "sbin" in link else "kvfs"
            self.path(link).parent.mkdir(parents=True, exist_ok=True)
            self.path(link).symlink_to(self.root / "opt/kvfs/bin" / program)
        self.write(self.UNIT, "[Service]\n")
        self.write(self.ENABLED, "[Service]\n")

    def path(self, name: str) -> Path:
        return self.root / name

    def write(self, name: str, text: str) -> None:
        self.path(name).parent.mkdir(parents=True, exist_ok=True)
        self.path(name).write_text(text)

    def files(self) -> set[str]:
        return {str(path.relative_to(self.root)) for path in self.root.rglob("*") if not path.is_dir()}

    def uninstall(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", self.checkout.run, "uninstall"],
            env=self.checkout.environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip


@pytest.fixture
def machine(checkout: Checkout) -> Machine:
    return Machine(checkout)


def test_uninstall_takes_away_what_install_brought(machine: Machine) -> None:
    ended = machine.uninstall()
    assert (ended.returncode, ended.stderr) == (0, "")
    said, stays = ended.stdout.removesuffix("\n").split("; ")
    assert said == "run: kvfs is uninstalled"
    assert re.fullmatch(r"what stays: packages that apt installed, \S+/checkout/.venv \(\d+K\)", stays)
    assert machine.files() == {"proc/self/mountinfo"}
    assert not machine.path("opt/kvfs").exists()
    assert not machine.path("run/kvfs").exists()


def test_uninstall_says_which_settings_stay(machine: Machine) -> None:
    machine.write("etc/kvfs.toml", "")
    machine.write("etc/kvfs/mnt-kv.toml", "")
    machine.write("etc/fstab", "#kvfs /a kvfs pool=1G 0 0\npool\t/mnt/kv kvfs pool=8G,nofail 0 0\n")
    ended = machine.uninstall()
    etc = machine.path("etc")
    assert f", {etc}/kvfs.toml, {etc}/kvfs, lines in {etc}/fstab, " in ended.stdout
    assert machine.files() >= {"etc/kvfs.toml", "etc/kvfs/mnt-kv.toml", "etc/fstab"}


def test_uninstall_leaves_links_that_are_not_ours(machine: Machine) -> None:
    machine.path("sbin/mount.kvfs").unlink()
    machine.write("sbin/mount.kvfs", "somebody else's")
    assert machine.uninstall().returncode == 0
    assert machine.files() == {"proc/self/mountinfo", "sbin/mount.kvfs"}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("proc/self/mountinfo", "30 1 0:40 / /mnt/kv rw - fuse.kvfs kvfs rw\n", "kvfs is still mounted"),
        ("run/kvfs/mnt-kv/config.json", "{}", "still holds what a mount left"),
    ],
)
def test_uninstall_refuses_while_something_is_left(
    machine: Machine, name: str, text: str, words: str
) -> None:
    machine.write(name, text)
    before = machine.files()
    ended = machine.uninstall()
    assert ended.returncode == 1
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert words in line
    assert "kvfs umount" in line
    assert machine.files() == before
