"""Checks of FUSE: can kvfs mount, who can use the mount, and does the kernel move the bytes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import shutil
import stat
import struct
from pathlib import Path

from kvfs import syscalls
from kvfs.doctor.check import Check, is_root, read_setting
from kvfs.sizes import format_size

_DEVICE = "/dev/fuse"
_CONFIGURATION = Path("/etc/fuse.conf")
_MTAB = Path("/etc/mtab")
_MAX_PAGES = "/proc/sys/fs/fuse/max_pages_limit"
_WANTED_REQUEST = 512 << 10

# From <linux/fuse.h>: the header of a request, the beginning of INIT's body, and the reply to it.
_REQUEST_HEADER = struct.Struct("=IIQQIIIHH")
_INIT_IN = struct.Struct("=IIIII")
_INIT_OUT = struct.Struct("=IIIIHHIIHHII24x")
_REPLY_HEADER = struct.Struct("=IiQ")
_FUSE_INIT = 26
_FUSE_INIT_EXT = 1 << 30
_FUSE_PASSTHROUGH = 1 << 37 - 32
_BACKING_OPEN = 0x4010E501
_BACKING_MAP = struct.Struct("=iIQ")


def kernel() -> Check:
    system = os.uname()
    return Check("kernel", None, f"{system.sysname} {system.release} {system.machine}")


def device() -> Check:
    try:
        os.close(os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        return Check(
            "/dev/fuse",
            False,
            "missing",
            "kvfs cannot mount",
            "load the module (modprobe fuse); in a container pass the device in: --device /dev/fuse",
            needed=True,
        )
    except OSError as error:
        return Check(
            "/dev/fuse",
            False,
            f"cannot be opened: {error.strerror}",
            "kvfs cannot mount",
            "mount as root, or chmod 666 /dev/fuse as distributions do; in a container: --device /dev/fuse",
            needed=True,
        )
    return Check("/dev/fuse", True, "can be opened", needed=True)


def passthrough() -> Check:
    reason = passthrough_refusal()
    if not reason:
        return Check("passthrough", True, "tried: the kernel moves the bytes, at the speed of memory")
    return Check(
        "passthrough",
        False,
        reason,
        "every read and write goes through the daemon: several times slower, never wrong",
        "mount as root with CAP_SYS_ADMIN on Linux 6.9 or later built with CONFIG_FUSE_PASSTHROUGH "
        "(Debian 13, Debian 12 with backports, Ubuntu 24.04 with the HWE kernel)",
    )


def passthrough_refusal() -> str:
    """Why files cannot be passed through; "" when they can. Tried on a filesystem that is mounted nowhere."""
    with contextlib.ExitStack() as cleanup:
        try:
            connection = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            cleanup.callback(os.close, connection)
            options = {"fd": str(connection), "rootmode": "40000", "user_id": "0", "group_id": "0"}
            cleanup.callback(os.close, syscalls.make_filesystem("fuse", options))
        except OSError as error:
            return f"no FUSE filesystem could be made to try it: {error.strerror}"
        if not select.select([connection], [], [], 2.0)[0]:
            return "the kernel did not begin to speak FUSE"
        request = os.read(connection, 1 << 20)
        _, operation, unique, *_ = _REQUEST_HEADER.unpack_from(request)
        major, minor, readahead, flags, more_flags = _INIT_IN.unpack_from(request, _REQUEST_HEADER.size)
        if operation != _FUSE_INIT or not flags & _FUSE_INIT_EXT or not more_flags & _FUSE_PASSTHROUGH:
            return "this kernel does not offer it"
        body = _INIT_OUT.pack(
            major, minor, readahead, _FUSE_INIT_EXT, 16, 12, 1 << 20, 1, 256, 0, _FUSE_PASSTHROUGH, 1
        )
        os.write(connection, _REPLY_HEADER.pack(_REPLY_HEADER.size + len(body), 0, unique) + body)
        backing = os.memfd_create("kvfs-doctor", os.MFD_CLOEXEC)
        cleanup.callback(os.close, backing)
        try:
            fcntl.ioctl(connection, _BACKING_OPEN, _BACKING_MAP.pack(backing, 0, 0))
        except OSError as error:
            return f"the kernel offers it but refuses to open a backing file: {error.strerror}"
    return ""


def libfuse() -> Check:
    try:
        import pyfuse3
    except ImportError as error:
        return Check(
            "libfuse",
            False,
            f"pyfuse3 cannot be loaded: {error}",
            "kvfs cannot mount",
            "install libfuse 3 (apt install fuse3), then kvfs again",
            needed=True,
        )
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    names = [os.path.basename(path) for path in loaded if os.path.basename(path).startswith("libfuse3")]
    match = re.search(r"\.so\.(\d+\.\d+\.\d+)", " ".join(names))
    version = match[1] if match else "of unknown version"
    return Check("libfuse", True, f"{version}, pyfuse3 {pyfuse3.__version__}", needed=True)


def fusermount() -> Check:
    program = shutil.which("fusermount3")
    consequence = "users other than root can neither mount nor unmount"
    if program is None:
        ok = None if is_root() else False
        return Check("fusermount3", ok, "missing", consequence, "apt install fuse3", needed=not is_root())
    if not os.stat(program).st_mode & stat.S_ISUID:
        return Check(
            "fusermount3", None, f"{program} is not setuid root", consequence, f"chmod u+s {program}"
        )
    if not _MTAB.exists():
        ok = None if is_root() else False
        found, remedy = f"needs {_MTAB}, which is missing", f"as root: ln -s ../proc/self/mounts {_MTAB}"
        return Check("fusermount3", ok, found, consequence, remedy, needed=not is_root())
    return Check("fusermount3", True, program)


def other_users() -> Check:
    try:
        lines = _CONFIGURATION.read_text().splitlines()
    except OSError:
        lines = []
    if any(line.strip() == "user_allow_other" for line in lines):
        return Check("user_allow_other", True, f"set in {_CONFIGURATION}")
    return Check(
        "user_allow_other",
        None,
        f"not set in {_CONFIGURATION}",
        "a mount made by root is open to others all the same; one made by another user is that user's alone",
        f"as root: echo user_allow_other >>{_CONFIGURATION}",
    )


def request_size() -> Check:
    setting = read_setting(_MAX_PAGES)
    pages = int(setting) if setting is not None else 256
    size = pages * os.sysconf("SC_PAGE_SIZE")
    found = f"{format_size(size)} a request" + ("" if setting is not None else " (fixed in this kernel)")
    if size >= _WANTED_REQUEST:
        return Check("largest request", True, found)
    return Check(
        "largest request",
        False,
        found,
        "without passthrough, reads and writes are cut into small pieces and slow",
        f"sysctl fs.fuse.max_pages_limit={_WANTED_REQUEST // os.sysconf('SC_PAGE_SIZE')}",
    )
