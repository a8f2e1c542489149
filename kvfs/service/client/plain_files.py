"""Pages as the files that they are below the mount: calls that wait for the kernel, one key each.

Everything can be done this way, by any program. It costs a request of the kernel for each step of each key,
where the socket takes one for a whole batch.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, Final, ParamSpec, TypeVar

from kvfs import page
from kvfs.errors import (
    KvfsError,
    NoSuchPage,
    NotMounted,
    WrongSize,
    from_errno,
    means_absent,
    means_no_attribute,
    means_no_daemon,
)
from kvfs.service.client.keys import check

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_OWN: Final = b"user.kvfs."
_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_ABSENT: Final = "{} is not on {}: it was never put there, or was evicted; compute it, and put it again"


def _told(
    call: Callable[Concatenate[Files, str, Parameters], Result],
) -> Callable[Concatenate[Files, str, Parameters], Result]:
    """Turns what the kernel says into an error of this package that names the key."""

    @wraps(call)
    def wrapper(
        self: Files, key: str, /, *arguments: Parameters.args, **options: Parameters.kwargs
    ) -> Result:
        try:
            return call(self, key, *arguments, **options)
        except OSError as error:
            raise self.error(error, key) from None

    return wrapper


@dataclass(frozen=True, slots=True)
class PageStat:
    """What is known of a page. ``digest`` is None while it is not sealed; ``tier`` is where it is read from,
    "dram" or "ssd"; ``size`` is in bytes."""

    size: int
    digest: str | None
    tier: str
    hits: int
    pinned: bool


class Files:
    """The files below one mount. Holds nothing, so any thread may use it."""

    def __init__(self, mountpoint: str) -> None:
        self.mountpoint = mountpoint
        self._root = os.fsencode(mountpoint) + b"/"

    def path(self, key: str) -> bytes:
        """Raises UsageError where the key is none."""
        return self._root + os.fsencode(check(key))

    def error(self, error: OSError, key: str) -> KvfsError:
        """What the kernel's answer means for a key."""
        text = page.shown(os.fsencode(key))
        if means_no_daemon(error):
            return NotMounted(f"the daemon of {self.mountpoint} is gone: kvfs mount serves its pages again")
        if means_absent(error):
            return from_errno(error.errno or 0, _ABSENT.format(text, self.mountpoint))
        return from_errno(error.errno or 0, f"{text} on {self.mountpoint}: {error.strerror}")

    # Reading

    @_told
    def open(self, key: str) -> int:
        """A descriptor for reading."""
        return os.open(self.path(key), os.O_RDONLY | os.O_CLOEXEC)

    @_told
    def read(self, key: str) -> bytes:
        """The bytes of a page."""
        descriptor = os.open(self.path(key), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return content_of(key, descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)

    @_told
    def read_into(self, key: str, target: memoryview) -> int:
        """Fills ``target`` with the page, which must be exactly as long; its length in bytes."""
        descriptor = os.open(self.path(key), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return fill(key, descriptor, target)
        finally:
            os.close(descriptor)

    def exists(self, key: str) -> bool:
        try:
            return stat.S_ISREG(os.stat(self.path(key)).st_mode)
        except OSError as error:
            if means_absent(error):
                return False
            raise self.error(error, key) from None

    # Writing

    @_told
    def put(self, key: str, content: memoryview) -> None:
        """A new page under a name of its own, which then takes the place of what the key had."""
        temporary, descriptor = self.create(key, content.nbytes)
        try:
            try:
                write(descriptor, content)
            finally:
                os.close(descriptor)
            os.rename(temporary, self.path(key))
        except BaseException:
            self.discard(temporary)
            raise

    @_told
    def create(self, key: str, size: int) -> tuple[bytes, int]:
        """A file beside that of the key, with room for ``size`` bytes; its path, and a descriptor of it."""
        directory = os.path.dirname(self.path(key))
        temporary = directory + f"/.put-{secrets.token_hex(8)}.tmp".encode()
        try:
            descriptor = os.open(temporary, _NEW, 0o666)
        except FileNotFoundError:
            os.makedirs(directory, exist_ok=True)
            descriptor = os.open(temporary, _NEW, 0o666)
        try:
            os.posix_fallocate(descriptor, 0, size)
        except BaseException:
            os.close(descriptor)
            self.discard(temporary)
            raise
        return temporary, descriptor

    @_told
    def publish(self, key: str, temporary: bytes) -> None:
        os.rename(temporary, self.path(key))

    def discard(self, temporary: bytes) -> None:
        with suppress(FileNotFoundError):
            os.unlink(temporary)

    def delete(self, key: str) -> bool:
        """Whether there was one."""
        try:
            os.unlink(self.path(key))
        except OSError as error:
            if means_absent(error):
                return False
            raise self.error(error, key) from None
        return True

    # What the mount knows of a page, and is asked to do with it

    def touch(self, key: str) -> bool:
        """Uses a page without reading it; whether there is one."""
        try:
            os.close(self.open(key))
        except NoSuchPage:
            return False
        return True

    def prefetch(self, key: str) -> bool:
        """Brings a page into DRAM; whether there is one."""
        return self._attribute(key, b"prefetch") is not None

    @_told
    def pin(self, key: str, pinned: bool) -> bool:
        """Whether there is such a page."""
        try:
            os.setxattr(self.path(key), _OWN + b"pin", b"1" if pinned else b"0")
        except OSError as error:
            if means_absent(error):
                return False
            raise
        return True

    def stat(self, key: str) -> PageStat | None:
        """None where there is no such page."""
        try:
            size = os.stat(self.path(key)).st_size
        except OSError as error:
            if means_absent(error):
                return None
            raise self.error(error, key) from None
        digest, tier, hits, pin = (
            self._attribute(key, name) for name in (b"digest", b"tier", b"hits", b"pin")
        )
        return PageStat(size, digest, tier or "dram", int(hits or 0), pin == "1")

    @_told
    def _attribute(self, key: str, name: bytes) -> str | None:
        """What the mount says of a page; None where it says nothing, or there is none."""
        try:
            return os.getxattr(self.path(key), _OWN + name).decode()
        except OSError as error:
            if means_absent(error) or means_no_attribute(error):
                return None
            raise


def write(descriptor: int, content: memoryview) -> None:
    """Writes all of it, from the start of the file."""
    done = os.pwrite(descriptor, content, 0)
    while done < content.nbytes:
        done += os.pwrite(descriptor, content[done:], done)


def content_of(key: str, descriptor: int, size: int) -> bytes:
    """A whole page of ``size`` bytes."""
    content = os.pread(descriptor, size, 0)  # one call where the kernel has no reason to stop
    if len(content) == size:
        return content
    target = bytearray(size)
    fill(key, descriptor, memoryview(target))
    return bytes(target)


def fill(key: str, descriptor: int, target: memoryview) -> int:
    """Reads a page into memory of exactly its size, in bytes, which is returned; WrongSize for another."""
    beyond = bytearray(1)  # one byte more, so that no stat is needed to see a longer page
    done = os.preadv(descriptor, [target, beyond], 0)
    while 0 < done < target.nbytes:
        more = os.preadv(descriptor, [target[done:], beyond], done)
        if not more:
            break
        done += more
    if done != target.nbytes:
        raise WrongSize.of(key, os.fstat(descriptor).st_size, target.nbytes)
    return done
