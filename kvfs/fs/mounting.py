"""Mounting: a connection to the kernel's FUSE, by mount(2) as root or through fusermount3."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import stat
import subprocess
from pathlib import Path

from kvfs import mounts, syscalls
from kvfs.errors import MountpointError, NotPermitted, Unavailable

SOURCE = "kvfs"
SUBTYPE = "kvfs"

READ_AHEAD_KIB = 1024
"""Read-ahead of the mount. The kernel's 128 KiB make small requests where the daemon moves the bytes."""

_FLAGS = {
    "ro": syscalls.MS_RDONLY,
    "noexec": syscalls.MS_NOEXEC,
    "noatime": syscalls.MS_NOATIME,
    "nosymfollow": syscalls.MS_NOSYMFOLLOW,
}
_FUSE_OPTIONS = frozenset(("allow_other", "default_permissions"))


def mount(mountpoint: Path, options: tuple[str, ...]) -> int:
    """Mounts kvfs and returns the descriptor of the connection, on which the kernel's INIT waits.

    Raises Unavailable (no /dev/fuse or fusermount3), NotPermitted, MountpointError.
    """
    if os.geteuid() == 0:
        return _mount_as_root(mountpoint, options)
    return _mount_with_helper(mountpoint, options)


def _open_device() -> int:
    try:
        return os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise Unavailable(
            f"/dev/fuse cannot be opened ({error.strerror}): load it with modprobe fuse"
        ) from None


def _mount_as_root(mountpoint: Path, options: tuple[str, ...]) -> int:
    source, flags = SOURCE, syscalls.MS_NOSUID | syscalls.MS_NODEV
    device = _open_device()
    mode = stat.S_IFMT(os.stat(mountpoint).st_mode)
    data = [f"fd={device}", f"rootmode={mode:o}", "user_id=0", "group_id=0", "default_permissions"]
    if "allow_root" not in options:
        data.append("allow_other")
    for option in options:
        if option in _FLAGS:
            flags |= _FLAGS[option]
        elif option.startswith("fsname="):
            source = option.removeprefix("fsname=")
    try:
        syscalls.mount(source, mountpoint, f"fuse.{SUBTYPE}", flags, ",".join(data))
    except OSError as error:
        os.close(device)
        if isinstance(error, PermissionError):
            raise NotPermitted(
                f"mounting on {mountpoint} is not permitted: a container needs CAP_SYS_ADMIN and /dev/fuse"
            ) from None
        raise MountpointError(f"{mountpoint} cannot be mounted on: {error.strerror}") from None
    return device


def _mount_with_helper(mountpoint: Path, options: tuple[str, ...]) -> int:
    """fusermount3 opens the device and hands it back over a socket."""
    words = [f"fsname={SOURCE}", f"subtype={SUBTYPE}", "default_permissions", "nosuid", "nodev"]
    words += [option for option in options if option not in words and option != "allow_root"]
    ours, helpers = socket.socketpair()
    with ours, helpers:
        try:
            result = subprocess.run(
                ["fusermount3", "-o", ",".join(words), "--", str(mountpoint)],
                env={**os.environ, "_FUSE_COMMFD": str(helpers.fileno())},
                pass_fds=[helpers.fileno()],
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        except FileNotFoundError:
            raise Unavailable("fusermount3 is not there: apt-get install fuse3, or mount as root") from None
        if result.returncode != 0:
            raise NotPermitted(result.stderr.strip().rpartition("\n")[2] or "fusermount3 failed")
        descriptors = array.array("i")
        _, ancillary, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(descriptors.itemsize))
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: descriptors.itemsize])
    if not descriptors:
        raise Unavailable("fusermount3 handed over no connection")
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]


def find_device(mountpoint: Path) -> str:
    """The mount's device, "major:minor", by which /sys knows it; "" when it is gone."""
    entries = [entry for entry in mounts.find(mountpoint) if entry.fstype == mounts.FSTYPE]
    return entries[-1].device if entries else ""


def widen_read_ahead(device: str) -> str:
    """Lets the kernel read ahead further; returns why it could not, or ""."""
    try:
        Path("/sys/class/bdi", device, "read_ahead_kb").write_text(str(READ_AHEAD_KIB))
    except OSError as error:
        return f"read-ahead stays at the kernel's default: {error.strerror}"
    return ""


def abort(device: str) -> None:
    """Ends the connection: whoever still uses the mount gets ENOTCONN or ECONNABORTED."""
    minor = device.partition(":")[2]
    if os.geteuid() != 0:
        Path("/sys/fs/fuse/connections", minor, "abort").write_text("1")
        return
    # Containers, and machines without systemd, have nothing mounted at /sys/fs/fuse/connections.
    with contextlib.ExitStack() as opened:
        filesystem = syscalls.make_filesystem("fusectl", {})
        opened.callback(os.close, filesystem)
        root = syscalls.mount_detached(filesystem)
        opened.callback(os.close, root)
        file = os.open(f"{minor}/abort", os.O_WRONLY | os.O_CLOEXEC, dir_fd=root)
        opened.callback(os.close, file)
        os.write(file, b"1")
