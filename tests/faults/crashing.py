"""A mount with an SSD tier whose daemon, or whose machine, is ended again and again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from stat import S_ISREG
from typing import Any

from tests.faults.contents import version_of
from tests.mounted.running import (
    MIB,
    PAGE,
    KvfsMount,
    environment_for_kvfs,
    mounts_below,
    wait_until,
)

KILL_AT = "KVFS_KILL_AT"
START_SECONDS = 20.0


class Killed(Exception):
    """The daemon was ended, as the test wanted."""


class CrashingMount(KvfsMount):
    """Its daemon stays in the foreground, so that a start costs one process. ``log_file`` has all logs."""

    def __init__(self, directory: Path, ssd: Path, *arguments: str, pool_bytes: int = 64 * MIB) -> None:
        super().__init__(
            *(directory, pool_bytes, "--ssd", str(ssd), "--ssd-capacity", str(1024 * MIB)),
            *arguments,
        )
        self.ssd = ssd
        self.log_file = directory / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, kill_at: str = "") -> None:
        """Mounts and waits until it serves. Raises Killed where the daemon came to ``kill_at`` before."""
        command = [sys.executable, "-m", "kvfs", "mount", str(self.path), "--foreground"]
        command += ["--pool", str(self.pool_bytes), "--state-dir", str(self.state_base), *self.arguments]
        environment = environment_for_kvfs({KILL_AT: kill_at} if kill_at else None)
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.daemon_pid = self.process.pid
        self.pids.append(self.daemon_pid)
        deadline = time.monotonic() + START_SECONDS
        while not self._serves():
            self.require_alive()
            assert time.monotonic() < deadline, f"the mount does not serve: {self.logged}"
            time.sleep(0.005)

    def _serves(self) -> bool:
        try:
            return (self.path / ".kvfs/status.json").stat().st_size >= 0
        except OSError:
            return False

    def require_alive(self) -> None:
        """Raises Killed where the daemon was; fails where it ended in any other way."""
        assert self.process is not None
        ended = self.process.poll()
        if ended is not None:
            assert ended == -9, f"the daemon ended with {ended}: {self.logged}"
            raise Killed

    def was_killed(self) -> bool:
        """Whether a call that failed did so because the daemon is no more."""
        assert self.process is not None
        try:
            return self.process.wait(2) == -9
        except subprocess.TimeoutExpired:
            return False

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def reboot(self) -> None:
        """The machine went down with the daemon: only the disk is left."""
        for point in mounts_below(self.path.parent):
            subprocess.run(["umount", "-l", point], check=True)
        for left in self.state_base.iterdir():
            shutil.rmtree(left)

    def end(self) -> None:
        """A clean unmount."""
        assert self.process is not None
        ended = self.try_umount()
        assert ended.returncode == 0, ended
        assert self.process.wait(20) == 0, self.logged
        assert not mounts_below(self.path.parent)
        assert not list(self.state_base.iterdir())

    @property
    def logged(self) -> str:
        """The end of the log."""
        return self.log_file.read_text()[-4000:]

    # What there is

    def find(self) -> dict[str, int]:
        """Reads every file: the version that each name means, by its path below the mount.

        ValueError for bytes that nobody wrote.
        """
        found = {}
        for path in self.files():
            try:
                found[str(path.relative_to(self.path))] = version_of(path.read_bytes())
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
        return found

    def files(self) -> list[Path]:
        return [Path(parent, name) for parent, _, names in os.walk(self.path) for name in names]

    def tier(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.status()["tiers"][name]
        return found

    def wait_settled(self, seconds: float = 30) -> dict[str, Any]:
        """Waits until every draft is a page, every page on the SSD, and every change followed there."""
        status: dict[str, Any] = {}

        def is_settled() -> bool:
            nonlocal status
            status = self.status()
            ssd = status["tiers"]["ssd"]
            return not (status["unsealed"] or status["drafts"] or ssd["unstored"] or ssd["waiting_changes"])

        wait_until(is_settled, seconds, "both tiers have everything")
        return status

    def check_accounts(self) -> None:
        """Both tiers are settled: their sums are what is there, and nothing is left over."""
        ssd = self.wait_settled()["tiers"]["ssd"]
        assert not ssd["not_written"], ssd
        assert not ssd["damaged"], ssd
        assert not os.listdir(self.ssd / ".kvfs-temporary")
        top = [name for name in os.listdir(self.dram) if name.startswith(".kvfs-")]
        assert not top, f"left over in DRAM: {top}"
        # DRAM may still evict for its reserve meanwhile.
        wait_until(lambda: not self._disagreements(), 10, f"sums agree: {self._disagreements()}")
        room = os.statvfs(self.path)
        assert 0 <= room.f_bfree <= room.f_blocks
        assert self.used_bytes() <= 1024 * MIB

    def _disagreements(self) -> list[str]:
        """What the mount says that there is, and what is found."""
        found = []
        tiers = self.status()["tiers"]
        on_disk = disk_usage(self.ssd)
        if tiers["ssd"]["used_bytes"] != on_disk:
            found.append(f"SSD: {tiers['ssd']['used_bytes']} bytes and {on_disk}")
        files = {one.st_ino: one for one in map(Path.lstat, self.dram.rglob("*")) if S_ISREG(one.st_mode)}
        in_memory = 512 * sum(one.st_blocks for one in files.values())
        if abs(tiers["dram"]["used_bytes"] - in_memory) > (len(files) + 16) * PAGE:
            found.append(f"DRAM: {tiers['dram']['used_bytes']} bytes and {in_memory}")
        pages, inodes = (
            sum(tier["pages"] for tier in tiers.values()),
            {one.stat().st_ino for one in self.files()},
        )
        if pages != len(inodes):
            found.append(f"{pages} pages and {len(inodes)} files")
        return found


def disk_usage(directory: Path) -> int:
    """What du says of an SSD tier but for what is being written, in bytes; files may go meanwhile."""
    words = ["du", "-s", "-B1", "--exclude=.kvfs-temporary", str(directory)]
    return int(subprocess.run(words, check=False, capture_output=True, text=True).stdout.split()[0])
