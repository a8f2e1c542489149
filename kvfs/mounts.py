"""What is mounted where, whether it is alive, and who holds it: read from /proc."""

from __future__ import annotations

import contextlib
import errno as numbers
import hashlib
import os
import pwd
import re
import stat
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvfs import syscalls
from kvfs.deadlines import answer_within
from kvfs.errors import MountpointError, NotPermitted, Unavailable, UsageError

FSTYPE = "fuse.kvfs"
IN_MEMORY = ("tmpfs", "ramfs")
"""Filesystems whose files do not outlive the host."""

LOOK_SECONDS = 0.5
"""How long one process may take to show what it holds. Whoever looks at its mappings waits while it changes
them, and a process that waits for a daemon can do that for ever."""
SCAN_SECONDS = 5.0
"""How long looking at all processes may take."""

# Room for what is put around the name of a state directory, within the 255 bytes of a file name.
_LONGEST_NAME = 200
_DIGEST_LENGTH = 16

_OCTAL = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class MountEntry:
    """One line of /proc/PID/mountinfo.

    ``device`` is "major:minor"; ``options`` are those of the mount, then those of the filesystem.
    """

    mount_id: int
    root: str
    mountpoint: Path
    fstype: str
    source: str
    options: tuple[str, ...]
    device: str


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that keeps a mount busy; ``what`` reads "open file PATH", "working directory PATH", …

    Not ``is_known``: it may keep it busy, and does not let itself be looked at.
    """

    pid: int
    name: str
    what: str
    is_known: bool = True


def _unescape(field: bytes) -> str:
    return os.fsdecode(_OCTAL.sub(lambda match: bytes([int(match[1], 8)]), field))


def parse_mountinfo(text: bytes) -> list[MountEntry]:
    """The entries of a mountinfo file, in its order: of those on one path the last is on top."""
    entries = []
    for line in text.splitlines():
        fields = line.split(b" ")
        separator = fields.index(b"-", 6)
        fstype, source, *rest = fields[separator + 1 :]
        options = fields[5].split(b",") + (rest[0].split(b",") if rest else [])
        entries.append(
            MountEntry(
                mount_id=int(fields[0]),
                root=_unescape(fields[3]),
                mountpoint=Path(_unescape(fields[4])),
                fstype=_unescape(fstype),
                source=_unescape(source),
                options=tuple(_unescape(option) for option in options),
                device=fields[2].decode(),
            )
        )
    return entries


def read_mountinfo() -> list[MountEntry]:
    """Every mount that this process sees."""
    return parse_mountinfo(Path("/proc/self/mountinfo").read_bytes())


def find(mountpoint: Path) -> list[MountEntry]:
    """What is mounted on exactly this path, the lowest first; never touches the filesystems themselves."""
    return [entry for entry in read_mountinfo() if entry.mountpoint == mountpoint]


def filesystem_with(number: int) -> MountEntry | None:
    """The filesystem whose files have this ``st_dev``; None where the list of mounts does not tell."""
    device = f"{os.major(number)}:{os.minor(number)}"
    return next((entry for entry in read_mountinfo() if entry.device == device), None)


def resolve_mountpoint(text: str | os.PathLike[str]) -> Path:
    """The absolute path of a mountpoint, symlinks resolved.

    A path that something is mounted on is not looked into, so a dead or hung mount blocks nobody. Raises
    UsageError for an empty one, which would mean the current directory.
    """
    if not os.fspath(text):
        raise UsageError("the mountpoint is empty: name a directory")
    absolute = os.path.abspath(text)
    parent = os.path.realpath(os.path.dirname(absolute))
    candidate = Path(parent, os.path.basename(absolute))
    return candidate if find(candidate) else Path(os.path.realpath(absolute))


def escape_path(path: Path) -> str:
    """An absolute path as one file name, the way systemd names mount units: /mnt/kv-a is "mnt-kv\\x2da".

    What would be too long for a file name is cut, and told apart by a digest.
    """
    parts = [part for part in os.fsencode(path).split(b"/") if part]
    if not parts:
        return "-"
    escaped = "-".join("".join(_escape_byte(byte) for byte in part) for part in parts)
    if len(escaped) > _LONGEST_NAME:
        digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:_DIGEST_LENGTH]
        escaped = f"{escaped[: _LONGEST_NAME - _DIGEST_LENGTH - 1]}_{digest}"
    return "\\x2e" + escaped[1:] if escaped.startswith(".") else escaped


def _escape_byte(byte: int) -> str:
    character = chr(byte)
    plain = character.isascii() and (character.isalnum() or character in ":_.")
    return character if plain else f"\\x{byte:02x}"


def is_dead(mountpoint: Path) -> bool:
    """Whether the filesystem mounted here has lost its daemon: whatever must be asked of it answers ENOTCONN.

    Waits for the answer as long as the daemon takes.
    """
    try:
        os.statvfs(mountpoint)  # unlike stat, never answered from what the kernel remembers
    except OSError as error:
        return error.errno in (numbers.ENOTCONN, numbers.ECONNABORTED)
    return False


def clear_dead(mountpoint: Path) -> bool:
    """Unmounts, lazily, the kvfs mounts on this path whose daemon is gone; says whether there were any.

    Raises MountpointError when another filesystem is mounted there, dead or not: it is not ours to unmount.
    """
    cleared = False
    while entries := find(mountpoint):
        top = entries[-1]
        if top.fstype != FSTYPE:
            raise MountpointError(
                f"{mountpoint}: {top.fstype} from {top.source} is mounted there; "
                "unmount it first, or choose another mountpoint"
            )
        if not is_dead(mountpoint):
            break
        unmount(mountpoint, lazy=True)
        cleared = True
    return cleared


def unmount(mountpoint: Path, lazy: bool = False) -> None:
    """Takes the topmost mount off the path; ``lazy``: at once, and it ends when its last user lets go.

    Whoever is not root needs fusermount3 for it. Raises OSError (EBUSY) while the mount is in use,
    NotPermitted when it is not the caller's, and Unavailable without fusermount3.
    """
    if os.geteuid() == 0:
        syscalls.umount2(mountpoint, syscalls.MNT_DETACH if lazy else 0)
        return
    if mounter := _other_mounter(mountpoint):
        raise NotPermitted(f"{mountpoint} was mounted by {mounter}: sudo kvfs umount {mountpoint}")
    words = ["fusermount3", "-u", *(["-z"] if lazy else []), "--", str(mountpoint)]
    try:
        result = subprocess.run(
            words, env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise Unavailable("fusermount3 is not there: apt-get install fuse3, or unmount as root") from None
    if result.returncode != 0:
        line = result.stderr.strip().rpartition("\n")[2]
        if os.strerror(numbers.EBUSY) in line:
            raise OSError(numbers.EBUSY, os.strerror(numbers.EBUSY), str(mountpoint))
        raise NotPermitted(line or f"fusermount3 could not unmount {mountpoint}")


def _other_mounter(mountpoint: Path) -> str:
    """Who made the FUSE mount on top of this path, where that is not the caller; else ""."""
    options = [option for entry in find(mountpoint)[-1:] for option in entry.options]
    users = [int(option.removeprefix("user_id=")) for option in options if option.startswith("user_id=")]
    if not users or users[0] == os.getuid():
        return ""
    try:
        return pwd.getpwuid(users[0]).pw_name
    except KeyError:
        return f"user {users[0]}"


def holders(device: str) -> list[Holder]:
    """The processes that keep the filesystem busy, by process id; only those that the caller may look into.

    ``device`` is the mount's "major:minor". Nothing here asks the filesystem itself, so its daemon may be
    gone or stuck. Processes in other mount namespaces (containers) are found too. One that does not
    let itself be looked at within LOOK_SECONDS is listed as such; what is left after SCAN_SECONDS is not.
    """
    found = []
    deadline = time.monotonic() + SCAN_SECONDS
    for number in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
        process = Path("/proc", str(number))
        seconds = min(LOOK_SECONDS, deadline - time.monotonic())
        if seconds <= 0:
            break
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            uses = answer_within(seconds, partial(_uses, process, device))
            known = uses is not None
            if uses is None:
                uses = ["does not let itself be looked at, and may hold it"]
            if uses:
                name = (process / "comm").read_text(errors="replace").rstrip("\n")
                found += [Holder(number, name, what, known) for what in uses]
    return found


def _uses(process: Path, device: str) -> list[str]:
    """What the process does with the filesystem, each thing once."""
    return list(dict.fromkeys(_every_use(process, device)))


def _every_use(process: Path, device: str) -> Iterator[str]:
    try:
        entries = parse_mountinfo((process / "mountinfo").read_bytes())
    except OSError as error:
        if error.errno == numbers.EINVAL:
            return  # it has ended and waits for its parent: it sees no mounts any more
        raise
    mount_ids = {entry.mount_id for entry in entries if entry.device == device}
    if not mount_ids:
        return
    for link, what in (("cwd", "working directory"), ("root", "root directory"), ("exe", "program")):
        with contextlib.suppress(FileNotFoundError):
            # O_PATH follows the magic link without asking the filesystem behind it.
            descriptor = os.open(process / link, os.O_PATH | os.O_CLOEXEC)
            try:
                if _mount_id(Path("/proc/self/fdinfo", str(descriptor))) in mount_ids:
                    yield f"{what} {os.readlink(process / link)}"
            finally:
                os.close(descriptor)
    for name in os.listdir(process / "fd"):
        with contextlib.suppress(FileNotFoundError):
            if _mount_id(process / "fdinfo" / name) in mount_ids:
                yield f"open file {os.readlink(process / 'fd' / name)}"
    major, minor = (int(part) for part in device.split(":"))
    mapped_device = f"{major:02x}:{minor:02x}".encode()
    for line in (process / "maps").read_bytes().splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[3] == mapped_device:
            yield f"mapped file {os.fsdecode(fields[5])}"


def _mount_id(information: Path) -> int | None:
    match = re.search(r"^mnt_id:\s*(\d+)$", information.read_text(errors="replace"), re.MULTILINE)
    return None if match is None else int(match[1])


def check_mountpoint(mountpoint: Path, may_hold_files: bool = False) -> None:
    """Raises MountpointError unless the path is a directory, and an empty one unless ``may_hold_files``."""
    try:
        status = os.stat(mountpoint)
        if not stat.S_ISDIR(status.st_mode):
            raise MountpointError(f"{mountpoint} is not a directory: a filesystem needs one to be mounted on")
        if os.listdir(mountpoint) and not may_hold_files:
            raise MountpointError(
                f"{mountpoint} is not empty: its files would be hidden; choose an empty directory"
            )
    except FileNotFoundError as error:
        raise MountpointError(f"{mountpoint} does not exist: make it with mkdir -p {mountpoint}") from error
    except NotADirectoryError as error:
        raise MountpointError(f"{mountpoint}: a part of this path is not a directory") from error
    except PermissionError as error:
        raise MountpointError(
            f"{mountpoint} cannot be read by you: use sudo, or a directory of your own"
        ) from error
    except OSError as error:
        raise MountpointError(f"{str(mountpoint)[:80]}… cannot be mounted on: {error.strerror}") from error
