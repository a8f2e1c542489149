"""The DRAM tier: a private tmpfs on hugepages, or a directory of another tmpfs where we may not mount."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from kvfs import mounts, syscalls
from kvfs.errors import NotPermitted, OutOfRoom, Unavailable
from kvfs.page import HUGEPAGE
from kvfs.sizes import format_size
from kvfs.tiers import hugepages as hugepage_probe
from kvfs.tiers import tmpfs
from kvfs.tiers.base import Room, Tier
from kvfs.tiers.cap import Cap

_log = logging.getLogger(__name__)


class DramTier(Tier):
    """Pages in memory. Made by ``attach``.

    ``is_private``: the tmpfs is our own, and its limit the kernel's business; else we keep to
    ``target_bytes`` ourselves, and must be told of growth by ``account``.
    ``options``: the mount options in force. ``missing``: what was wanted and is not had, with the reason.
    ``hugepages_active``, ``hugepages_reason``: whether a new file of 2 MiB lies on a hugepage, found by
    trying, and why not.
    """

    def __init__(
        self, directory: Path, root_fd: int, target_bytes: int, missing: dict[str, str], cap: Cap | None
    ) -> None:
        super().__init__("dram", root_fd)
        self.directory = directory
        self.target_bytes = target_bytes
        self.is_private = cap is None
        self.missing = missing
        self.options: tuple[str, ...] = ()
        self.hugepages_active = False
        self.hugepages_reason = ""
        self._cap = cap
        self._notices_ends = self._notices_ends or cap is not None
        self._device = os.fstat(root_fd).st_dev

    @classmethod
    def attach(cls, directory: Path, pool_bytes: int, hugepages: str, numa: str) -> DramTier:
        """Mounts the tier on ``directory``, or takes over the tmpfs that an earlier process left there.

        One that holds more than ``pool_bytes`` keeps its size and is ``oversized``: evict, then ``resize``.
        ``hugepages`` is "prefer", "require" or "off"; ``numa`` is "", "interleave" or a node's number.
        Where mounting is not permitted the tier is a directory below /dev/shm or $XDG_RUNTIME_DIR.
        Raises UsageError (numa), MountpointError (something else is mounted there), Unavailable (hugepages
        are required and not had, or there is no tmpfs that could hold the pool), and OSError.
        """
        options = tmpfs.probe_options(hugepages, numa)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = directory.resolve()
        try:
            if tmpfs.top(directory) is None:
                tmpfs.mount(directory, pool_bytes, options)
            else:
                tmpfs.adopt(directory, options)
        except PermissionError as error:
            tier = cls._borrow(directory, pool_bytes, numa, error)
        else:
            root_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            tier = cls(directory, root_fd, pool_bytes, options.missing, None)
        try:
            tier._settle(hugepages)
        except BaseException:
            tier.close(keep=bool(tier.list(b"")))
            raise
        return tier

    @classmethod
    def _borrow(cls, directory: Path, pool_bytes: int, numa: str, refusal: PermissionError) -> DramTier:
        place = _borrowed_place(pool_bytes)
        home = place / f"kvfs-{os.geteuid()}-{hashlib.sha256(os.fsencode(directory)).hexdigest()[:12]}"
        root_fd = _open_own_directory(home)
        wanted = ["huge=within_size", "noswap", tmpfs.memory_policy(numa)]
        missing = {option: "needs a tmpfs of our own" for option in wanted if option}
        missing["private tmpfs"] = f"mounting is not permitted ({refusal.strerror}); pages lie in {home}"
        cap = Cap(root_fd, pool_bytes)
        cap.limit_bytes = max(pool_bytes, cap.used_bytes())  # as large as what an earlier process left
        return cls(home, root_fd, pool_bytes, missing, cap)

    def _settle(self, hugepages: str) -> None:
        """Brings an adopted tmpfs to its size where it can be, and finds out what the tier really has."""
        if self.is_private:
            os.fchmod(self.root_fd, 0o700)
        try:
            self.resize(self.target_bytes)
        except OutOfRoom as error:
            _log.info("%s", error)
        self.options = self._read_options()
        if hugepages == "off":
            self.hugepages_reason = "switched off by --hugepages off"
            return
        if "huge=within_size" in self.options and self.room().free_bytes < 2 * HUGEPAGE:
            self.hugepages_active = True
            self.hugepages_reason = "the tmpfs is mounted for them; it is too full to try"
            return
        self.hugepages_reason = hugepage_probe.probe(self.root_fd, self.options)
        self.hugepages_active = not self.hugepages_reason
        if hugepages == "require" and not self.hugepages_active:
            raise Unavailable(
                f"hugepages are required and not to be had: {self.hugepages_reason}; "
                "see kvfs doctor, or mount with --hugepages prefer"
            )

    def _read_options(self) -> tuple[str, ...]:
        device = f"{os.major(self._device)}:{os.minor(self._device)}"
        for entry in mounts.read_mountinfo():
            if entry.device == device:
                return tuple(dict.fromkeys(entry.options))
        return ()

    @property
    def oversized(self) -> bool:
        """Whether the tier is larger than ``target_bytes``: it held more when it was adopted."""
        return self.room().total_bytes - self.target_bytes >= os.sysconf("SC_PAGE_SIZE")

    def resize(self, pool_bytes: int) -> None:
        """Makes the tier hold ``pool_bytes``. Raises OutOfRoom, and stays as it was, while it holds more."""
        self.target_bytes = pool_bytes
        room = self.room()
        if room.used_bytes <= pool_bytes:
            if self._cap is not None:
                self._cap.limit_bytes = pool_bytes
                return
            try:
                tmpfs.remount(self.directory, tmpfs.limits(pool_bytes, room.total_inodes - room.free_inodes))
                return
            except OSError:
                room = self.room()
                if room.used_bytes <= pool_bytes:
                    raise
        raise OutOfRoom(
            f"the DRAM tier holds {format_size(room.used_bytes)}, more than the pool of "
            f"{format_size(pool_bytes)}: it shrinks when enough has been evicted"
        )

    def room(self) -> Room:
        """What the tier can hold; one system call, but for a walk now and then where it is not private."""
        room = super().room()
        return room if self._cap is None else self._cap.room(room)

    def growing(self, size: int) -> AbstractContextManager[None]:
        """Around an allocation of ``size`` bytes of which the kernel tells nobody: see `account`."""
        return nullcontext() if self._cap is None else self._cap.growing(size)

    def account(self, delta_bytes: int) -> None:
        """Tells a tier that is not private what a file grew by (negative: shrank), in bytes of DRAM.

        Ends of files are known already. A private tier asks the kernel and needs no telling.
        """
        if self._cap is not None:
            self._cap.account(delta_bytes)

    def _ended(self, status: os.stat_result) -> None:
        super()._ended(status)
        self.account(-status.st_blocks * 512)

    def collapse(self, fd: int, size: int) -> bool:
        """Moves the whole 2 MiB parts of a file of ``size`` bytes to hugepages; says whether they all are.

        Takes 0.1 ms when they are already, else about 0.3 to 3 ms a part: call it in a thread.
        """
        length = size - size % HUGEPAGE
        if not length:
            return False
        try:
            syscalls.collapse(fd, length)
        except OSError as error:
            _log.debug("a file of %d bytes stays on small pages: %s", size, error.strerror)
            return False
        return True

    def close(self, keep: bool = False) -> None:
        """Deletes all files and unmounts, so that the memory is free; ``keep`` leaves both as they are.

        The files are deleted first: another mount namespace may hold a copy of the mount for ever.
        """
        if self.root_fd < 0:
            return
        super().close(keep)
        if keep:
            return
        if not self.is_private:
            self.directory.rmdir()
            return
        entry = tmpfs.top(self.directory)
        if entry is None or entry.device != f"{os.major(self._device)}:{os.minor(self._device)}":
            return  # unmounted already, by somebody else
        try:
            syscalls.umount2(self.directory, syscalls.UMOUNT_NOFOLLOW)
        except OSError as error:
            _log.info("%s is in use (%s): it goes when its last user does", self.directory, error.strerror)
            syscalls.umount2(self.directory, syscalls.UMOUNT_NOFOLLOW | syscalls.MNT_DETACH)


def _borrowed_place(pool_bytes: int) -> Path:
    """A tmpfs that we may write to and that is large enough."""
    for place in (Path("/dev/shm"), Path(os.environ.get("XDG_RUNTIME_DIR") or "/dev/shm")):
        entries = mounts.find(place)
        if entries and entries[-1].fstype == "tmpfs" and os.access(place, os.W_OK | os.X_OK):
            break
    else:
        raise Unavailable(
            "mounting is not permitted, and neither /dev/shm nor $XDG_RUNTIME_DIR is a tmpfs that you may "
            "write to: mount as root"
        )
    status = os.statvfs(place)
    size = status.f_blocks * status.f_frsize
    if size and size < pool_bytes:  # 0: the tmpfs has no limit
        raise Unavailable(
            f"{place} holds {format_size(size)}, less than the pool of {format_size(pool_bytes)}: give a "
            "smaller --pool, enlarge it (for a container: --shm-size), or mount as root"
        )
    return place


def _open_own_directory(home: Path) -> int:
    """A directory that only we may enter. Raises NotPermitted where somebody else was quicker to make it."""
    home.mkdir(mode=0o700, exist_ok=True)
    try:
        fd = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        status = os.fstat(fd)
        if status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077:
            return fd
        os.close(fd)
    except (NotADirectoryError, PermissionError):
        pass
    raise NotPermitted(f"{home} belongs to somebody else, or others may enter it: remove it first")
