"""The state directory of a mount: who serves it, with what, and what the next mount finds."""

from __future__ import annotations

import contextlib
import errno as numbers
import fcntl
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvfs.config import Config, from_json, to_json
from kvfs.errors import ConfigError, NotPermitted, StateInUse, Unavailable
from kvfs.mounts import escape_path
from kvfs.settings import default_state_dir

LOG_LIMIT_BYTES = 1 << 20

_FLOCK = struct.Struct("hhqqi")  # l_type, l_whence, l_start, l_len, l_pid
_FILES = ("batch", "config.json", "config.json.new", "daemon.log", "keep", "lock", "report")


class StateDirectory:
    """One mount's directory, named after the mountpoint, readable by its owner alone.

    The daemon holds an exclusive lock on the file ``lock`` for its life. It is a lock of the open file
    description (F_OFD_SETLK), so others can ask who has it without ever taking it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_descriptor: int | None = None

    def __repr__(self) -> str:
        return f"StateDirectory({str(self.path)!r})"

    @classmethod
    def for_mountpoint(cls, mountpoint: Path, base: Path | None = None) -> StateDirectory:
        """The state directory of ``mountpoint`` (absolute) below ``base``, which need not exist yet."""
        return cls((base or default_state_dir(os.environ)) / escape_path(mountpoint))

    @property
    def dram(self) -> Path:
        """Where the private tmpfs is mounted."""
        return self.path / "dram"

    @property
    def log(self) -> Path:
        """What a background daemon writes to its standard output and error."""
        return self.path / "daemon.log"

    def exists(self) -> bool:
        """Whether the directory is there: a daemon runs, or one crashed or kept its DRAM."""
        return self.path.is_dir()

    def _make(self, advice: str) -> tuple[bool, os.stat_result, os.stat_result]:
        """Whether the directory was missing, and what its parent and it are now that it is there."""
        while True:
            self._make_parent(advice)
            created = not self.path.exists()
            with contextlib.suppress(FileNotFoundError):  # another holder removes one of them at this moment
                self.path.mkdir(mode=0o700, exist_ok=True)
                return created, os.stat(self.path.parent), os.lstat(self.path)

    def _make_parent(self, advice: str) -> None:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileNotFoundError as error:  # below /proc, say
            raise NotPermitted(f"{self.path.parent} cannot be made: {advice}") from error

    def create(self) -> bool:
        """Makes the directory, and its parents, for the caller alone; says whether it was missing.

        Raises NotPermitted when somebody else could reach into it: by owning it or the directory it is in, or
        through a symlink. Raises Unavailable when it cannot be made.
        """
        advice = "choose another with --state-dir"
        try:
            created, parent, status = self._make(advice)
        except PermissionError as error:
            raise NotPermitted(f"{error.filename} cannot be made by you: use sudo, or {advice}") from None
        except OSError as error:
            raise Unavailable(f"{self.path} cannot be made: {error.strerror}; {advice}") from None
        if parent.st_uid not in (0, os.geteuid()):
            raise NotPermitted(f"{self.path.parent} belongs to somebody else: {advice}")
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise NotPermitted(f"{self.path} is not a directory of yours: {advice}")
        return created

    def acquire(self) -> None:
        """Makes this process the one that serves the mount; StateInUse when another live process does."""
        while self._lock_descriptor is None:
            try:
                self.create()
                descriptor = os.open(
                    self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
                )
            except FileNotFoundError:
                continue  # the last holder removed the directory just now
            except PermissionError as error:
                raise NotPermitted(
                    f"{error.filename} cannot be opened by you: use sudo, or --state-dir"
                ) from None
            try:
                fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
                if not self._is_lock_file(descriptor):
                    continue
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
                self._lock_descriptor = descriptor
            except BlockingIOError:
                raise StateInUse(
                    f"{self.path} is in use by process {self.daemon_pid()}; every mount needs its own"
                ) from None
            finally:
                if self._lock_descriptor is None:
                    os.close(descriptor)

    def _is_lock_file(self, descriptor: int) -> bool:
        """Whether the locked file still has its name: the last holder may have removed it just now."""
        try:
            named = os.stat(self.path / "lock")
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(descriptor))

    def release(self) -> None:
        """Lets another process acquire the directory; does nothing when it is not ours."""
        if self._lock_descriptor is not None:
            os.close(self._lock_descriptor)
            self._lock_descriptor = None

    def daemon_pid(self) -> int | None:
        """The process that holds the lock, or None when there is none, or when the caller may not look."""
        with self._open_lock() as descriptor:
            if descriptor is None:
                return None
            for _ in range(50):
                answer = fcntl.fcntl(
                    descriptor, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
                )
                if _FLOCK.unpack(answer)[0] == fcntl.F_UNLCK:
                    return None
                if text := os.pread(descriptor, 32, 0).strip():
                    return int(text)
                time.sleep(0.002)  # locked, and about to write its number
        return None

    @contextmanager
    def _open_lock(self) -> Iterator[int | None]:
        try:
            descriptor = os.open(self.path / "lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            yield None
            return
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def ask_keep(self) -> None:
        """Asks the daemon to leave the DRAM for the next mount when it ends."""
        (self.path / "keep").touch(mode=0o600)

    def withdraw_keep(self) -> None:
        """Takes ``ask_keep`` back."""
        (self.path / "keep").unlink(missing_ok=True)

    def take_keep(self) -> bool:
        """Whether somebody asked to keep the DRAM; the question is answered once."""
        try:
            (self.path / "keep").unlink()
        except FileNotFoundError:
            return False
        return True

    @contextmanager
    def listening(self) -> Iterator[Callable[[], str]]:
        """Around the end of the daemon, which may take this directory away: a call says what it has reported
        by then. Nothing is heard of a daemon of somebody else."""
        path = self.path / "report"
        try:
            owner = self.path.stat()
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except (FileNotFoundError, PermissionError):
            yield str
            return
        with open(fd, encoding="utf-8") as file:
            if not os.geteuid():  # the daemon may be that of a user
                os.fchown(fd, owner.st_uid, owner.st_gid)
            try:
                yield file.read
            finally:
                path.unlink(missing_ok=True)

    def report(self, line: str) -> None:
        """Tells who listens what they must know of the end of the daemon."""
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(self.path / "report", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
            with open(fd, "w", encoding="utf-8") as file:
                file.write(line + "\n")

    def write_config(self, config: Config) -> None:
        """Notes what the daemon runs with, whole or not at all."""
        temporary = self.path / "config.json.new"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(to_json(config))
        temporary.rename(self.path / "config.json")

    def read_config(self) -> Config | None:
        """What the daemon runs or ran with; None when nothing readable is there."""
        try:
            return from_json((self.path / "config.json").read_bytes())
        except (FileNotFoundError, NotADirectoryError, PermissionError, ConfigError):
            return None

    def open_log(self) -> int:
        """A descriptor that appends to the log; what was there goes when it is beyond LOG_LIMIT_BYTES."""
        descriptor = os.open(
            self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        if os.fstat(descriptor).st_size > LOG_LIMIT_BYTES:
            os.ftruncate(descriptor, 0)
        return descriptor

    def remove(self) -> None:
        """Removes the directory with the files that are known to be in it, and lets the lock go.

        The DRAM must have been unmounted: OSError (EBUSY, ENOTEMPTY) when it was not, and everything stays. A
        missing directory is fine. The default base directory goes with the last state in it.
        """
        with contextlib.suppress(FileNotFoundError):
            self.dram.rmdir()
        # The name goes first and at once: whoever acquires it from now on starts with a fresh directory.
        doomed = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):
            self.path.rename(doomed)
            for name in _FILES:
                (doomed / name).unlink(missing_ok=True)
            doomed.rmdir()
        if self.path.parent == default_state_dir(os.environ):
            _remove_if_empty(self.path.parent)
        self.release()


def _remove_if_empty(directory: Path) -> None:
    try:
        directory.rmdir()
    except OSError as error:
        # In a container it may be a mount: then it is not ours to remove.
        if error.errno not in (numbers.ENOTEMPTY, numbers.ENOENT, numbers.EBUSY):
            raise


def all_states(base: Path | None = None) -> list[StateDirectory]:
    """Every state directory below ``base`` that the caller may see, by name."""
    directory = base or default_state_dir(os.environ)
    try:
        return [StateDirectory(path) for path in sorted(directory.glob("[!.]*")) if path.is_dir()]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
