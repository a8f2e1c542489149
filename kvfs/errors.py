"""Every error the package raises on purpose.

One tree with two sides. The user side is what a person meets at the command line: each class has an exit
code that does not change between releases, and ``str(error)`` is one line that says what to do. The data
side is what the pool and the tiers raise: each class has an errno, which the filesystem face hands to the
program that made the call. Anything outside this tree is a bug: the command line prints its trace and exits
with ``EXIT_BUG``; the filesystem face logs it and answers EIO.
"""

from __future__ import annotations

import errno as numbers
import os
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

_TOLD_IN_WORDS = (
    numbers.EIO,
    numbers.ENOSPC,
    numbers.EDQUOT,
    numbers.EROFS,
    numbers.EFBIG,
    numbers.ENODEV,
    numbers.ENXIO,
    numbers.ETIMEDOUT,
    numbers.EMFILE,
    numbers.ENFILE,
    numbers.ENOMEM,
)

EXIT_OK = 0
EXIT_BUG = 70
EXIT_INTERRUPTED = 130


class KvfsError(Exception):
    """The root of the tree. ``str(error)`` is one line for a person."""

    exit_code: ClassVar[int] = 1
    errno: ClassVar[int] = numbers.EIO
    meaning: ClassVar[str] = "any other failure; the line on stderr says which"


class UsageError(KvfsError):
    """An argument, a size or an option that cannot be understood."""

    exit_code = 2
    errno = numbers.EINVAL
    meaning = "wrong arguments: an unknown option, a size that does not parse, a pool larger than memory"


class ConfigError(KvfsError):
    """A configuration file or environment variable that cannot be used."""

    exit_code = 3
    errno = numbers.EINVAL
    meaning = "the configuration file or a KVFS_* variable is wrong: unknown key, wrong type, unreadable"


class MountpointError(KvfsError):
    """The mountpoint cannot be mounted on."""

    exit_code = 4
    errno = numbers.ENOTDIR
    meaning = "the mountpoint is missing, not a directory, not empty, or holds another filesystem"


class StateInUse(KvfsError):
    """Another live daemon holds the state directory."""

    exit_code = 5
    errno = numbers.EBUSY
    meaning = "kvfs already serves this mountpoint, or another daemon holds its state"


class AlreadyMounted(StateInUse):
    """A live kvfs serves this mountpoint."""


class TierInUse(StateInUse):
    """Another live daemon owns the directory of a tier."""


class Unavailable(KvfsError):
    """The machine lacks something that was asked for."""

    exit_code = 6
    errno = numbers.ENODEV
    meaning = "something needed is not there: /dev/fuse, fusermount3, hugepages under --hugepages require"


class Busy(KvfsError):
    """The mount, or some of its pages, are in use: it was not unmounted, they did not leave DRAM."""

    exit_code = 7
    errno = numbers.EBUSY
    meaning = "umount: programs still use the mount; evict: pages are in use. They are listed"


class NotMounted(KvfsError):
    """No kvfs is mounted at this path, or its daemon is gone."""

    exit_code = 8
    errno = numbers.EINVAL
    meaning = "no live kvfs is mounted at this path"


class NotPermitted(KvfsError):
    """The caller's privileges do not suffice."""

    exit_code = 9
    errno = numbers.EPERM
    meaning = "not permitted: the verb needs root, or the user who made the mount"


class DaemonFailed(KvfsError):
    """The daemon did not start, does not answer, or did not end."""

    exit_code = 10
    meaning = "the daemon did not start, does not answer, or did not end; the line on stderr says why"


class TierUnusable(KvfsError):
    """A directory that cannot be made a tier, or not this one."""

    exit_code = 11
    errno = numbers.ENODEV
    meaning = "a directory cannot be a tier: files of others in it, another layout, no extended attributes"


class DamagedPages(KvfsError):
    """Pages are not as they were stored."""

    exit_code = 12
    meaning = "verify: damaged pages were found; they are listed, and with --repair taken away"


class NoSuchPage(KvfsError):
    """Nothing has this name."""

    errno = numbers.ENOENT


class NameTaken(KvfsError):
    """Something else has this name."""

    errno = numbers.EEXIST


class DirectoryNotEmpty(KvfsError):
    """There are names in a directory that is to go."""

    errno = numbers.ENOTEMPTY


class StalePage(KvfsError):
    """The name now means another file: the kernel has to look it up again."""

    errno = numbers.ESTALE


class OutOfRoom(KvfsError):
    """The pool is full and nothing can be evicted now."""

    errno = numbers.ENOSPC


class TierFull(OutOfRoom):
    """A tier has no room: evict from it so much, then try once more. Both are 0 where it is not known."""

    def __init__(self, message: str, missing_bytes: int = 0, missing_inodes: int = 0) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes
        self.missing_inodes = missing_inodes


class TierUncounted(OutOfRoom):
    """What a tier holds is still being counted: wait. Evicting would be for nothing."""


class NotWanted(TierFull):
    """A tier is full of what is worth more than the page that was to be stored."""


class TooManyPins(KvfsError):
    """Pinned pages take as much of DRAM as they may."""

    errno = numbers.ENOSPC


class PageInUse(KvfsError):
    """Somebody uses a page, or writes it: it cannot leave DRAM now."""

    errno = numbers.EBUSY


class WrongSize(UsageError):
    """Memory that was given for a page has another size."""

    @classmethod
    def of(cls, key: str, size: int, given: int) -> WrongSize:
        return cls(f"{key!r} has {size} bytes, and the memory {given}: give it memory of the same size")


class VersionMismatch(KvfsError):
    """The client and the daemon of a mount do not speak the same version of their protocol."""

    errno = numbers.EPROTO


class ConnectionLost(KvfsError):
    """The daemon of a mount ended, or was restarted, while it was asked."""

    errno = numbers.ECONNRESET


class TooManyFiles(KvfsError):
    """This process has as many files open as it may (RLIMIT_NOFILE)."""

    errno = numbers.EMFILE


class TooManyMappings(KvfsError):
    """This process has as much mapped as the kernel allows (vm.max_map_count)."""

    errno = numbers.ENOMEM


class TimedOut(KvfsError):
    """A tier did not answer in time."""

    errno = numbers.ETIMEDOUT


class FileTooLarge(KvfsError):
    """One file asks for more than half of the pool."""

    errno = numbers.EFBIG


class CorruptPage(KvfsError):
    """The bytes of a page do not match its digest."""

    errno = numbers.EIO


class DamagedPage(CorruptPage):
    """The file of a page is not as it was stored; ``reason`` is one word, for counters and quarantine.
    ``inode`` is the file's, where there is one."""

    def __init__(self, message: str, reason: str = "bytes", inode: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.inode = inode


class TierFailed(KvfsError):
    """A tier failed or hung, and is not asked again yet."""


class NameTooLong(KvfsError):
    """A name or an attribute is longer than a tier can hold."""

    errno = numbers.ENAMETOOLONG


class AttributeMissing(KvfsError):
    """The file has no attribute of this name."""

    errno = numbers.ENODATA


class NotSupported(KvfsError):
    """The operation has no meaning on this filesystem."""

    errno = numbers.EOPNOTSUPP


class NotStorable(NotSupported):
    """A tier can never hold this page: its name, its attributes or its size do not fit, or its place is
    taken by something that is not ours."""


class IncompleteIdentity(UsageError):
    """What an engine caches cannot be named: a field of its manifest is missing or impossible, or a file of
    its model cannot be read."""


_BY_ERRNO: dict[int, type[KvfsError]] = {
    numbers.ENOENT: NoSuchPage,
    numbers.ENOTDIR: NoSuchPage,
    numbers.ESTALE: NoSuchPage,
    numbers.EACCES: NotPermitted,
    numbers.EPERM: NotPermitted,
    numbers.ENOSPC: OutOfRoom,
    numbers.EDQUOT: OutOfRoom,
    numbers.EFBIG: FileTooLarge,
    numbers.EIO: CorruptPage,
    numbers.ETIMEDOUT: TimedOut,
    numbers.ENAMETOOLONG: NameTooLong,
    numbers.EMFILE: TooManyFiles,
    numbers.ENFILE: TooManyFiles,
    numbers.ENOMEM: TooManyMappings,
    numbers.ENOTCONN: NotMounted,
    numbers.ECONNABORTED: NotMounted,
    numbers.EBUSY: PageInUse,
    numbers.EISDIR: UsageError,
    numbers.EINVAL: UsageError,
    numbers.EPROTO: VersionMismatch,
    numbers.EOPNOTSUPP: NotSupported,
}


def from_errno(number: int, message: str) -> KvfsError:
    """The error of this package for a number that the kernel, or the daemon, gave; KvfsError for a number
    without a class of its own."""
    return _BY_ERRNO.get(number, KvfsError)(message)


def means_absent(error: OSError) -> bool:
    """Whether there is nothing under a name, or not any more."""
    return error.errno in (numbers.ENOENT, numbers.ENOTDIR, numbers.ESTALE)


def means_no_daemon(error: OSError) -> bool:
    """Whether the daemon of a mount is gone."""
    return error.errno in (numbers.ENOTCONN, numbers.ECONNABORTED)


def means_no_attribute(error: OSError) -> bool:
    """Whether a file has no attribute of the name that was asked for."""
    return error.errno == numbers.ENODATA


def means_no_room(error: OSError) -> bool:
    """Whether a filesystem is full, or the quota of who writes."""
    return error.errno in (numbers.ENOSPC, numbers.EDQUOT)


def means_too_large(error: OSError) -> bool:
    """Whether a name or an attribute is larger than a filesystem takes."""
    return error.errno in (numbers.ENAMETOOLONG, numbers.E2BIG, numbers.ERANGE)


def means_in_the_way(error: OSError) -> bool:
    """Whether something of another kind, or another filesystem, lies where a file or directory was to be."""
    return error.errno in (
        numbers.EISDIR,
        numbers.ENOTDIR,
        numbers.ENOTEMPTY,
        numbers.EEXIST,
        numbers.ELOOP,
        numbers.EXDEV,
    )


def means_no_memory(error: OSError) -> bool:
    """Whether the kernel has no memory for something, or allows no more mappings."""
    return error.errno == numbers.ENOMEM


def means_unsupported(error: OSError) -> bool:
    """Whether a filesystem cannot do what it was asked: to write past its cache, say."""
    return error.errno in (numbers.EINVAL, numbers.EOPNOTSUPP)


def means_forbidden(error: OSError) -> bool:
    """Whether the kernel lacks a call, or this host forbids it: io_uring in a container, say."""
    return error.errno in (numbers.ENOSYS, numbers.EPERM, numbers.EACCES)


def told_in_words(message: str) -> OSError | None:
    """The failure of a disk or of this host that a library tells in words only; None where it is another."""
    for number in _TOLD_IN_WORDS:
        if os.strerror(number) in message:
            return OSError(number, os.strerror(number))
    return None


class ExitCode(NamedTuple):
    """One row of the table of exit codes."""

    code: int
    meaning: str


def _descendants(kind: type[KvfsError]) -> Iterator[type[KvfsError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _descendants(child)


def exit_codes() -> list[ExitCode]:
    """The table of exit codes, by number: what ``kvfs --help`` and the README show."""
    rows = {
        EXIT_OK: "done",
        EXIT_BUG: "a bug in kvfs: a trace is printed, please report it",
        EXIT_INTERRUPTED: "interrupted from the keyboard",
    }
    for kind in _descendants(KvfsError):
        rows.setdefault(kind.exit_code, kind.meaning)
    return [ExitCode(code, meaning) for code, meaning in sorted(rows.items())]


def from_exit_code(code: int, message: str) -> KvfsError:
    """The error that another process of kvfs reported with its exit code and its line."""
    for kind in _descendants(KvfsError):
        if kind.exit_code == code:
            return kind(message)
    return DaemonFailed(message)
