"""What the mount shows of an entry: stat fields and extended attributes."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

import pyfuse3

from kvfs.errors import AttributeMissing, NotSupported
from kvfs.index import DRAFT, SEALED, STORED, UNCHECKED, Entry
from kvfs.page import DIGEST, PIN, TTL, USER
from kvfs.tiers.base import AttributeNames

if TYPE_CHECKING:
    from kvfs.pool import Pool

CACHE_SECONDS = 3600.0
"""How long the kernel may remember names and the attributes of pages: it is told of every change."""
DIRECTORY_SECONDS = 1.0
"""A directory also changes by eviction, of which only its names are told."""

OWN = "user.kvfs."
READ_ONLY = ("digest", "tier", "hits", "sealed")
"""Our attributes of a page. Writes to them are accepted and ignored, so that cp -a and rsync -X work."""
LARGEST_VALUE = 65536
"""Bytes of users' own attributes on one file, all together."""


def entry_attributes(entry: Entry, status: os.stat_result) -> pyfuse3.EntryAttributes:
    """The reply to a lookup or getattr of ``entry``, whose file has ``status``."""
    attributes = pyfuse3.EntryAttributes()
    owner = entry.owner
    attributes.st_ino = entry.number
    attributes.st_mode = owner.mode
    attributes.st_uid = owner.uid
    attributes.st_gid = owner.gid
    attributes.st_nlink = status.st_nlink
    attributes.st_size = status.st_size
    attributes.st_blocks = status.st_blocks
    attributes.st_blksize = status.st_blksize
    attributes.st_atime_ns = status.st_atime_ns
    attributes.st_mtime_ns = status.st_mtime_ns
    # The tier's own also tells of sealing, of pages that move between tiers, and of names that only DRAM has.
    attributes.st_ctime_ns = max(entry.changed_ns, status.st_mtime_ns)
    if entry.is_directory:
        attributes.st_size = 0
    attributes.entry_timeout = CACHE_SECONDS
    if entry.state == DRAFT:
        attributes.attr_timeout = 0
    elif entry.is_directory:
        attributes.attr_timeout = DIRECTORY_SECONDS
    else:
        attributes.attr_timeout = CACHE_SECONDS
    return attributes


def missing_entry(seconds: float = CACHE_SECONDS) -> pyfuse3.EntryAttributes:
    """The reply that lets the kernel remember, for so long, that there is no such name."""
    attributes = pyfuse3.EntryAttributes()
    attributes.st_ino = pyfuse3.InodeT(0)
    attributes.entry_timeout = seconds
    return attributes


def without_privileges(mode: int) -> int:
    """The mode of a file after a change of owner."""
    if stat.S_ISDIR(mode):
        return mode
    mode &= ~stat.S_ISUID
    return mode & ~stat.S_ISGID if mode & stat.S_IXGRP else mode


class ExtendedAttributes:
    """user.* attributes of entries: users' own, and user.kvfs.* of pages. Those of a page that is only on the
    SSD are there: who asks for them waits for the disk."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def get(self, entry: Entry, name: str) -> bytes:
        if name.startswith(OWN):
            return await self._own(entry, name.removeprefix(OWN))
        self._require_user(name)
        return await self._read(entry, name)

    async def set(self, entry: Entry, name: str, value: bytes) -> None:
        if name.startswith(OWN):
            self._require_read_only(name)
            return
        self._require_user(name)
        self._require_file_or_directory(entry)
        if len(value) > LARGEST_VALUE:
            raise OSError(errno.E2BIG, os.strerror(errno.E2BIG))
        if len(value) + await self._stored_bytes(entry, name) > LARGEST_VALUE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if entry.state != STORED:
            self._pool.tier.set_attribute(self._target(entry), name, value)
        self._pool.changed(entry)
        if entry.stored is not None or (entry.is_directory and entry.parent is not None):
            self._pool.history.set_attribute(entry.path(), name, value)

    async def _stored_bytes(self, entry: Entry, but: str) -> int:
        """What the users' own attributes of a file occupy: the kernel does not count them in the pool."""
        others = [name for name in await self._names(entry) if name.startswith(USER) and name != but]
        return sum([len(name) + len(await self._read(entry, name)) for name in others])

    async def remove(self, entry: Entry, name: str) -> None:
        if name.startswith(OWN):
            self._require_read_only(name)
            return
        self._require_user(name)
        if entry.state == STORED:
            await self._read(entry, name)  # or it is missing
        else:
            self._pool.tier.remove_attribute(self._target(entry), name)
        self._pool.changed(entry)
        if entry.stored is not None or (entry.is_directory and entry.parent is not None):
            self._pool.history.remove_attribute(entry.path(), name)

    async def list(self, entry: Entry) -> AttributeNames:
        kept = await self._names(entry)
        names = [name for name in kept if name.startswith(USER)]
        names += [OWN + name for name in (PIN, TTL) if name in kept]
        if entry.is_file:
            names += [
                OWN + name
                for name in READ_ONLY
                if name != "digest" or entry.state in (SEALED, UNCHECKED, STORED)
            ]
        return names

    async def _own(self, entry: Entry, name: str) -> bytes:
        if not entry.is_file or name not in READ_ONLY:
            raise AttributeMissing(name)
        is_page = entry.state in (SEALED, UNCHECKED, STORED)
        if name == "tier":
            return b"ssd" if entry.state == STORED else self._pool.tier.name.encode()
        if name == "hits":
            self._pool.uses.collect()
            return b"%d" % entry.hits
        if name == "sealed":
            return b"%d" % is_page
        if not is_page:
            raise AttributeMissing(name)
        return await self._read(entry, DIGEST)

    async def _read(self, entry: Entry, name: str) -> bytes:
        if entry.state == STORED and self._pool.storage is not None:
            return await self._pool.storage.read_attribute(entry, name)
        return self._pool.tier.get_attribute(self._target(entry), name)

    async def _names(self, entry: Entry) -> AttributeNames:
        if entry.state == STORED and self._pool.storage is not None:
            return await self._pool.storage.list_attributes(entry)
        return self._pool.tier.list_attributes(self._target(entry))

    def _target(self, entry: Entry) -> bytes | int:
        return entry.path() if entry.holding is None else entry.holding.read_fd

    @staticmethod
    def _require_user(name: str) -> None:
        if name == USER:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if not name.startswith(USER):
            raise NotSupported(f"only user.* attributes are kept, not {name}")

    @staticmethod
    def _require_file_or_directory(entry: Entry) -> None:
        if not entry.is_file and not entry.is_directory:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    @staticmethod
    def _require_read_only(name: str) -> None:
        if name.removeprefix(OWN) not in READ_ONLY:
            raise NotSupported(f"{name} is not an attribute of kvfs")
