"""A mount of kvfs as a user has it: the command line in its own process, seen only from outside.

Nothing here imports kvfs. ``KvfsMount`` runs ``python -m kvfs mount`` on a mountpoint and with a state
directory of its own, so that tests and benchmarks neither see nor disturb any other mount of the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

REPOSITORY = Path(__file__).resolve().parents[2]
#: In the environment of everything that is started here, so that what is left of it can be found.
RUN_VARIABLE = "MOUNTED_TESTS_RUN"
RUN = f"{os.getpid()}-{time.time_ns()}"
MIB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")


def environment_for_kvfs(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without its KVFS_* settings, with the mark of this run and ``extra``."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVFS_")}
    return inherited | {RUN_VARIABLE: RUN, "PYTHONPATH": str(REPOSITORY)} | dict(extra or {})


def run_kvfs(
    *arguments: str | Path, environment: Mapping[str, str] | None = None, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run one verb to its end. A daemon that keeps the pipes of its caller open shows as TimeoutExpired."""
    return subprocess.run(
        [sys.executable, "-m", "kvfs", *map(str, arguments)],
        env=environment_for_kvfs(environment),
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll until ``condition`` holds; TimeoutError naming ``what`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    pause = 0.001
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {seconds:g} s still not: {what}")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)


def is_alive(pid: int) -> bool:
    """Whether any thread of the process runs; one that has ended and was not waited for counts as gone."""
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            if task.read_text().rpartition(")")[2].split()[0] not in "ZX":
                return True
    return False


def mountinfo(path: Path) -> list[list[str]]:
    """The lines of /proc/self/mountinfo whose mountpoint is ``path``, split into fields."""
    wanted = str(path).replace("\\", "\\134").replace(" ", "\\040")
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [fields for fields in map(str.split, lines) if fields[4] == wanted]


def mounts_below(path: Path) -> list[str]:
    """Every mountpoint at or below ``path``, innermost first."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [line.split()[4].encode().decode("unicode_escape") for line in lines]
    return sorted((point for point in points if Path(point).is_relative_to(path)), reverse=True)


def read_in_time(path: Path, seconds: float = 1) -> bytes:
    """What a file of /proc holds; TimeoutError where the kernel makes us wait for a process that is stuck."""
    content: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):
            content.append(path.read_bytes())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(seconds)
    if not content:
        raise TimeoutError(f"{path} cannot be read, or not within {seconds:g} s")
    return content[0]


def processes_of_this_run() -> dict[int, str]:
    """Process ids and command lines of everything that carries this run's mark, this process aside."""
    found = {}
    mark = f"{RUN_VARIABLE}={RUN}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if mark in read_in_time(entry / "environ").split(b"\0"):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                found[int(entry.name)] = b" ".join(words).decode(errors="replace")
    return found


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """A temporary directory that any user may pass through. Whatever is still mounted below is taken down."""
    directory = Path(tempfile.mkdtemp(prefix="kvfs-mounted-"))
    directory.chmod(0o755)
    try:
        yield directory
    finally:
        for point in mounts_below(directory):
            subprocess.run(["umount", "-l", point], check=False)
        shutil.rmtree(directory)


@contextlib.contextmanager
def raw_tmpfs(directory: Path, options: str) -> Iterator[Path]:
    """A plain tmpfs to compare with; where it cannot be mounted, a directory on /dev/shm."""
    directory.mkdir(parents=True, exist_ok=True)
    if os.geteuid() != 0:
        with tempfile.TemporaryDirectory(prefix="kvfs-reference-", dir="/dev/shm") as plain:
            yield Path(plain)
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "reference", str(directory)], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


class KvfsMount:
    """One mountpoint with its own state directory, and the verbs on it."""

    def __init__(
        self,
        directory: Path,
        pool_bytes: int,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.path = directory / "mnt"
        self.state_base = directory / "state"
        self.pool_bytes = pool_bytes
        self.arguments = arguments
        self.environment = dict(environment or {})
        self.daemon_pid = 0
        self.pids: list[int] = []
        self.path.mkdir(parents=True)
        self.state_base.mkdir()

    def __enter__(self) -> Self:
        self.mount()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def try_mount(self, *arguments: str, pool_bytes: int | None = None) -> subprocess.CompletedProcess[str]:
        """Run ``kvfs mount``; the caller looks at how it ended."""
        pool = str(pool_bytes or self.pool_bytes)
        return run_kvfs(
            *("mount", self.path, "--pool", pool, "--state-dir", self.state_base),
            *self.arguments,
            *arguments,
            environment=self.environment,
        )

    def mount(self, *arguments: str, pool_bytes: int | None = None) -> None:
        """Mount, and be sure that it serves: the command promises that when it returns."""
        ended = self.try_mount(*arguments, pool_bytes=pool_bytes)
        assert ended.returncode == 0, f"kvfs mount: {ended.returncode}: {ended.stderr}{ended.stdout}"
        self.daemon_pid = int(self.status()["pid"])
        self.pids.append(self.daemon_pid)
        if pool_bytes:
            self.pool_bytes = pool_bytes

    remount = mount

    def try_umount(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_kvfs("umount", self.path, *arguments)

    def umount(self, *arguments: str) -> None:
        """Unmount; when the command has returned, the daemon is gone and nothing is mounted."""
        ended = self.try_umount(*arguments)
        assert ended.returncode == 0, f"kvfs umount: {ended.returncode}: {ended.stderr}{ended.stdout}"
        assert not is_alive(self.daemon_pid), f"daemon {self.daemon_pid} outlives kvfs umount"
        assert not mountinfo(self.path)

    def kill_daemon(self, *, wait: bool = True) -> None:
        """SIGKILL, as the kernel's out-of-memory killer would."""
        os.kill(self.daemon_pid, signal.SIGKILL)
        if wait:
            wait_until(lambda: not is_alive(self.daemon_pid), 10, "the killed daemon is gone")

    def close(self) -> None:
        """Take down whatever is up, by force where it must be."""
        try:
            if mountinfo(self.path) and is_alive(self.daemon_pid):
                self.umount("-z")
        finally:
            if self.daemon_pid and is_alive(self.daemon_pid):
                self.kill_daemon()
            for point in mounts_below(self.path.parent):
                subprocess.run(["umount", "-l", point], check=False)
            for left in self.state_base.iterdir():
                shutil.rmtree(left)

    def status(self) -> dict[str, Any]:
        """What the daemon says of itself, read through the mount."""
        found: dict[str, Any] = json.loads((self.path / ".kvfs/status.json").read_bytes())
        return found

    @property
    def passthrough(self) -> bool:
        return bool(self.status()["passthrough"]["active"])

    @property
    def state(self) -> Path:
        """The state directory of this mount, below the base that it was given."""
        (only,) = self.state_base.iterdir()
        return only

    @property
    def dram(self) -> Path:
        """Where the backing files of the DRAM tier are."""
        return self.state / "dram"

    @property
    def log(self) -> str:
        """The log of the daemon so far."""
        try:
            return (self.state / "daemon.log").read_text()
        except (OSError, ValueError):
            return ""

    def used_bytes(self) -> int:
        """What ``df`` shows as used."""
        room = os.statvfs(self.path)
        return (room.f_blocks - room.f_bfree) * room.f_frsize


def digest(path: Path | str) -> str | None:
    """The digest that the mount shows for a page; None while the file is a draft."""
    try:
        return os.getxattr(path, "user.kvfs.digest").decode()
    except OSError:
        return None


def wait_sealed(*paths: Path | str, seconds: float = 10) -> None:
    """Wait until every file has become a page."""
    for path in paths:
        wait_until(lambda path=path: digest(path) is not None, seconds, f"{path} is sealed")  # type: ignore[misc]
