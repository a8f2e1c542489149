"""Programs that stand in for those that download and compute, to test the scripts around them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

#: What a Python of the engines is asked for; ``behaviour`` overrides the functions.
_PYTHON = """#!/bin/sh
base=$(dirname -- "$0")/../..
pip() { :; }
imports() { :; }
engine() { :; }
. "$base/behaviour"
case "$*" in
-V) echo Python 3.99 ;;
*"-m venv"*)
    for directory; do :; done
    mkdir -p "$directory/bin"
    cp -- "$0" "$directory/bin/python"
    ;;
*"-m pip"*)
    echo "$*" >>"$base/pip.calls"
    pip "$@"
    ;;
-c*) imports ;;
*) engine "$2" "$3" "$4" ;;
esac
"""


class FakeEngines:
    """A directory for ``tests/engines/prepare``, with a Python whose virtual environments are made of itself.

    ``behaviour`` is shell: it defines what ``pip``, ``imports`` (the check that an environment works) and
    ``engine`` (called with phase, directory and answer file) do where they are to do more than succeed.
    """

    def __init__(self, directory: Path, behaviour: str = "") -> None:
        self.directory = directory
        self.python = directory / "base" / "bin" / "python"
        self.python.parent.mkdir(parents=True)
        write_script(self.python, _PYTHON)
        (directory / "behaviour").write_text(behaviour)

    def behave(self, behaviour: str) -> None:
        (self.directory / "behaviour").write_text(behaviour)

    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHON": str(self.python), "KVFS_ENGINES": str(self.directory)}

    def pip_calls(self) -> list[str]:
        calls = self.directory / "pip.calls"
        return calls.read_text().splitlines() if calls.exists() else []

    def made(self) -> set[str]:
        """What there is besides the fakes."""
        return set(os.listdir(self.directory)) - {"base", "behaviour", "pip.calls", ".gitignore"}


def write_script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def start_script(
    *words: str | Path, environment: Mapping[str, str], directory: Path
) -> subprocess.Popen[str]:
    """A script in a process group of its own, as a shell starts it; its output goes to ``directory``."""
    with (directory / "stdout").open("w") as out, (directory / "stderr").open("w") as err:
        return subprocess.Popen(
            [str(word) for word in words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            text=True,
            start_new_session=True,
        )


def press_control_c(process: subprocess.Popen[str]) -> tuple[int, float]:
    """What a terminal does; the exit status, and how long the script took to end."""
    begun = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    try:
        status = process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return status, time.monotonic() - begun
