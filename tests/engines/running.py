"""Engines as they are run in earnest: each in a process of its own, as an ordinary user.

The environments come from ``tests/engines/prepare``. Nothing here imports an engine; the programs in
``programs/`` do, each in the environment of its engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.mounted.running import REPOSITORY

HERE = Path(__file__).resolve().parent
#: Where ``prepare`` puts the environments, unless KVFS_ENGINES names another directory.
DEFAULT_ENVIRONMENTS = REPOSITORY / ".engines"
#: Seconds that one engine may run. It starts in half a minute when the machine has nothing else to do.
ENGINE_SECONDS = 600.0
#: Seconds until a server must answer.
SERVER_SECONDS = 180.0
#: How the names of variables begin that engines get from our environment.
INHERITED = ("LANG", "LC_", "OPENBLAS_")


@dataclass(frozen=True, slots=True)
class User:
    """Who runs the engines."""

    name: str
    uid: int
    gid: int


def ordinary_user() -> User:
    """Who called sudo, else nobody."""
    uid = int(os.environ.get("SUDO_UID", "0"))
    entry = pwd.getpwuid(uid) if uid else pwd.getpwnam("nobody")
    return User(entry.pw_name, entry.pw_uid, entry.pw_gid)


def environments() -> Path:
    """The directory that ``prepare`` filled."""
    directory = Path(os.environ.get("KVFS_ENGINES", DEFAULT_ENVIRONMENTS))
    if not (directory / "models").is_dir():
        raise FileNotFoundError(f"{directory} has no engines: run sh tests/engines/prepare {directory}")
    return directory


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class EngineFailed(AssertionError):
    """An engine's process ended in an error or took too long."""


@dataclass(frozen=True, slots=True)
class Started:
    """A running engine and the files that hold what it prints."""

    process: subprocess.Popen[bytes]
    output: Path
    errors: Path

    def fail(self, what: str) -> NoReturn:
        """Raise EngineFailed: what happened, and the end of what the engine said."""
        said = "".join(path.read_text(errors="replace")[-3000:] for path in (self.output, self.errors))
        raise EngineFailed(f"{what}:\n{said}")


class Engines:
    """Starts engines as an ordinary user, who may not be allowed to enter the directory of this checkout.

    ``base`` is a directory that everyone may pass through; environments and programs are mounted there.
    """

    def __init__(self, base: Path) -> None:
        self.user = ordinary_user()
        self.home = base / "home"
        self.directory = base / "engines"
        self.programs = base / "programs"
        self._count = 0
        self.home.mkdir()
        os.chown(self.home, self.user.uid, self.user.gid)
        for source, target in ((environments(), self.directory), (HERE / "programs", self.programs)):
            target.mkdir()
            subprocess.run(["mount", "--bind", "-o", "ro", source, target], check=True)

    @property
    def models(self) -> Path:
        return self.directory / "models"

    def environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        """Quiet, offline, and the same hashes in every process."""
        return {
            **{
                name: value
                for name, value in os.environ.items()
                if name.startswith(("LANG", "LC_", "OPENBLAS"))
            },
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.home),
            "USER": self.user.name,
            "TMPDIR": str(self.home),
            "PYTHONPATH": str(self.programs),
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "LMCACHE_DISABLE_BANNER": "1",
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_LOG_LEVEL": "WARNING",
            **extra,
        }

    @contextlib.contextmanager
    def started(self, *command: str | Path, request: str = "", **extra: str) -> Iterator[Started]:
        """A process of the ordinary user; when the block ends, it and its children are gone.

        It reads ``request`` on stdin; ``extra`` is added to its environment.
        """
        self._count += 1
        output = self.home / f"{self._count}.out"
        errors = self.home / f"{self._count}.err"
        question = self.home / f"{self._count}.in"
        question.write_text(request)
        with output.open("wb") as stdout, errors.open("wb") as stderr, question.open("rb") as stdin:
            process = subprocess.Popen(
                [str(word) for word in command],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=self.home,
                env=self.environment(extra),
                user=self.user.uid,
                group=self.user.gid,
                extra_groups=[],
                start_new_session=True,
            )
        try:
            yield Started(process, output, errors)
        finally:
            # The group is ended even if its first process is gone: engines start children.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def run_program(
        self, environment: str, program: str, *arguments: str | Path, request: Any = None, **extra: str
    ) -> dict[str, Any]:
        """Run one of ``programs/`` to its end; the answer is the JSON object in the last line that it prints.

        ``request`` goes to its stdin, as JSON. Raises EngineFailed with the end of its output.
        """
        python = self.directory / environment / "bin" / "python"
        text = json.dumps(request)
        with self.started(python, self.programs / program, *arguments, request=text, **extra) as started:
            try:
                status = started.process.wait(ENGINE_SECONDS)
            except subprocess.TimeoutExpired:
                started.fail(f"{program} takes longer than {ENGINE_SECONDS:g} s")
            answers = [line for line in started.output.read_text().splitlines() if line.startswith("{")]
            if status or not answers:
                started.fail(f"{program} ended with {status}")
        answer: dict[str, Any] = json.loads(answers[-1])
        return answer

    @contextlib.contextmanager
    def server(self, url: str, *command: str | Path, **extra: str) -> Iterator[Started]:
        """A process that serves HTTP; the block begins when ``url`` answers with 200."""
        with self.started(*command, **extra) as started:
            deadline = time.monotonic() + SERVER_SECONDS
            while not answers_ok(url):
                if started.process.poll() is not None:
                    started.fail(f"{command[0]} ended with {started.process.returncode}")
                if time.monotonic() > deadline:
                    started.fail(f"{command[0]} does not serve {url} after {SERVER_SECONDS:g} s")
                time.sleep(0.1)
            yield started


def answers_ok(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False
