"""What ``./run`` says of apt, and what it does when it is interrupted."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.mounted.running import wait_until
from tests.scripts.fakes import REPOSITORY, press_control_c, start_script, write_script

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
