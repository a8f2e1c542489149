"""Names that come, go and move: what mkdir, link, rename and their like mean for the pool.

A change is made on the tier first and then in the index, without an await in between.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from kvfs.errors import DirectoryNotEmpty, KvfsError, NameTaken, NameTooLong, NoSuchPage, NotSupported
from kvfs.holding import Holding
from kvfs.index import DRAFT, LONGEST_PATH, OTHER, STORED, Directory, Entry, require_reachable
from kvfs.page import OWNER, Owner
from kvfs.steps import step
from kvfs.syscalls import RENAME_EXCHANGE, RENAME_NOREPLACE

if TYPE_CHECKING:
    from kvfs.pool import Pool


def _is_stored(entry: Entry | None) -> bool:
    """Whether DRAM has no file of it."""
    return entry is not None and entry.state == STORED


def _needs_ssd(entry: Entry | None) -> bool:
    """Whether only the SSD has it, or something in it."""
    if isinstance(entry, Directory):
        return any(map(_is_stored, entry.below()))
    return _is_stored(entry)


class Naming:
    """The changes that a program can make to the names of a pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def _may_be_on_ssd(self, entry: Entry) -> bool:
        """Whether the SSD may have a copy of something, as far as that is known."""
        storage = self._pool.storage
        return entry.stored is not None or (storage is not None and not storage.walked.is_set())

    # New entries

    def create(self, parent: Directory, name: bytes, owner: Owner) -> Entry:
        """A new empty draft, held for writing. Raises FileExistsError."""
        pool = self._pool
        path = self._new_path(parent, name)
        write_fd = pool.idle.open(lambda: pool.tier.create(path))
        try:
            read_fd = pool.idle.open(lambda: pool.tier.open(path, os.O_RDONLY))
        except OSError:
            os.close(write_fd)
            pool.tier.unlink(path)
            raise
        pool.directories.use(parent)
        entry = pool.index.add(parent, name, owner, DRAFT)
        entry.holding = Holding(read_fd)
        entry.holding.kept_if_empty = False
        pool.begin_writing(entry, write_fd)
        return entry

    def create_other(self, parent: Directory, name: bytes, owner: Owner, content: bytes = b"") -> Entry:
        """A symlink (its target as ``content``), fifo or socket: a small file on the tier. Never a page."""
        pool = self._pool
        path = self._new_path(parent, name)
        if stat.S_IFMT(owner.mode) not in (stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK):
            raise NotSupported("device nodes are not kept")
        fd = pool.tier.create(path)
        try:
            pool.tier.set_attribute(fd, OWNER, owner.format().encode())
            os.write(fd, content)
        except OSError:
            pool.tier.unlink(path)
            raise
        finally:
            os.close(fd)
        pool.directories.use(parent)
        return pool.index.add(parent, name, owner, OTHER)

    def create_directory(self, parent: Directory, name: bytes, owner: Owner) -> Entry:
        pool = self._pool
        path = self._new_path(parent, name)
        pool.tier.mkdir(path)
        pool.tier.set_attribute(path, OWNER, owner.format().encode())
        pool.history.make_directory(path, owner)
        pool.directories.use(parent)
        return pool.index.add(parent, name, owner, OTHER)

    def require_linked(self, directory: Directory) -> None:
        """NoSuchPage for a directory that was removed: nothing new can be in it."""
        if directory.parent is None and directory is not self._pool.index.root:
            raise NoSuchPage("the directory was removed")

    def _new_path(self, parent: Directory, name: bytes) -> bytes:
        """Where a new name lies; NoSuchPage in a removed directory, NameTooLong beyond the limit."""
        self.require_linked(parent)
        path = parent.child_path(name)
        if len(path) >= LONGEST_PATH:
            raise NameTooLong("the path from the root of the mount is too long")
        if _is_stored(parent.children.get(name)):  # DRAM has nothing there that would be in the way
            raise NameTaken("there is a page of this name on the SSD")
        return path

    def link(self, entry: Entry, parent: Directory, name: bytes) -> None:
        """A hard link."""
        pool = self._pool
        path = self._new_path(parent, name)
        if entry.parent is None:
            raise NoSuchPage("the file was removed")
        if _is_stored(entry):
            pool.directories.touch(parent)
        else:
            pool.tier.link(entry.path(), path)
            pool.directories.use(parent)
        if self._may_be_on_ssd(entry):
            pool.history.link(entry.path(), path, vacates=[entry.path()] if _is_stored(entry) else ())
        pool.index.add_link(entry, parent, name)
        pool.changed(entry)

    # Names that go or move

    def unlink(self, parent: Directory, name: bytes) -> int:
        """Takes a name away. Returns a descriptor to close, whose closing may free much memory, or -1."""
        pool = self._pool
        path, entry = parent.child_path(name), parent.children.get(name)
        if entry is not None:
            pool.idle.secure(entry)
        if _is_stored(entry):
            pool.directories.touch(parent)
        else:
            try:
                pool.tier.unlink(path)
            except FileNotFoundError:
                if entry is None:
                    raise
        step("unlink.dram")
        if entry is not None and self._may_be_on_ssd(entry):
            pool.history.unlink(path)
        pool.directories.use(parent)
        removed = pool.index.remove(parent, name)
        if removed.parent is not None:  # it has another name
            pool.changed(removed)
        return pool.detached(removed)

    def remove_directory(self, parent: Directory, name: bytes) -> None:
        pool = self._pool
        path = parent.child_path(name)
        self._require_empty(parent.children.get(name))
        try:
            pool.tier.rmdir(path)
        except FileNotFoundError:
            if name not in parent.children:
                raise
        pool.history.remove_directory(path)
        pool.directories.use(parent)
        pool.detached(pool.index.remove(parent, name))

    def rename(self, old: Directory, old_name: bytes, new: Directory, new_name: bytes, flags: int) -> int:
        """rename(2) with its flags. Returns a descriptor to close, of what was replaced, or -1."""
        pool = self._pool
        self.require_linked(new)
        one, other = old.children.get(old_name), new.children.get(new_name)
        if isinstance(one, Directory):
            require_reachable(one, len(new.child_path(new_name)))
        if isinstance(other, Directory) and flags & RENAME_EXCHANGE:
            require_reachable(other, len(old.child_path(old_name)))
        if other is not None and other is not one and not flags:
            self._keep_for_the_kernel(other)
        try:
            step("rename.begun")
            self._rename_in_dram(one, old.child_path(old_name), other, new.child_path(new_name), flags)
        except (OSError, KvfsError):
            if other is not None:
                pool.settle(other)
            raise
        if one is None:
            raise NoSuchPage("the tier knew a name that the index did not")
        step("rename.dram")
        for directory in (old, new):
            pool.directories.use(directory)
            if _is_stored(one) or _is_stored(other):
                pool.directories.touch(directory)
        if one is not other:
            self._rename_on_ssd(one, old.child_path(old_name), other, new.child_path(new_name), flags)
        step("rename.queued")
        if flags & RENAME_EXCHANGE:
            assert other is not None
            pool.index.exchange(old, old_name, new, new_name)
            pool.idle.changed(one)
            pool.idle.changed(other)
            return -1
        if one is other:  # two hard links of one file: POSIX leaves both
            return -1
        replaced = pool.index.move(old, old_name, new, new_name)
        pool.idle.changed(one)
        return -1 if replaced is None else pool.detached(replaced)

    def _require_empty(self, entry: Entry | None) -> None:
        """With an SSD, DRAM may have less in a directory than there is."""
        if self._pool.storage is not None and isinstance(entry, Directory) and entry.children:
            raise DirectoryNotEmpty("there are names in the directory")

    def _rename_in_dram(
        self, one: Entry | None, old: bytes, other: Entry | None, new: bytes, flags: int
    ) -> None:
        """What is only on the SSD is not there: it is neither moved nor in the way by itself."""
        tier = self._pool.tier
        if not _is_stored(one) and not _is_stored(other):
            if one is not None and other is not one and not flags:
                self._require_empty(other)
            tier.rename(old, new, flags)
            return
        if flags & RENAME_NOREPLACE and other is not None:
            raise NameTaken("the new name is taken")
        if one is None or (flags & RENAME_EXCHANGE and other is None):
            raise NoSuchPage("one of the names does not exist")
        if not _is_stored(one):
            tier.rename(old, new)
        elif other is not None and not _is_stored(other):
            if flags & RENAME_EXCHANGE:
                tier.rename(new, old)
            else:
                tier.unlink(new)

    def _rename_on_ssd(self, one: Entry, old: bytes, other: Entry | None, new: bytes, flags: int) -> None:
        """A page that is not stored yet will be under its new name; what it replaces must go there."""
        history = self._pool.history
        if self._may_be_on_ssd(one) or one.is_directory:
            vacates = [old] if _needs_ssd(one) else []
            if flags & RENAME_EXCHANGE and _needs_ssd(other):
                vacates.append(new)
            history.rename(old, new, flags & RENAME_EXCHANGE, vacates=vacates)
        elif other is not None and (self._may_be_on_ssd(other) or other.is_directory):
            if flags & RENAME_EXCHANGE:
                history.rename(new, old, 0, vacates=[new] if _needs_ssd(other) else ())
            else:
                history.unlink(new)

    def _keep_for_the_kernel(self, entry: Entry) -> None:
        """Another file is about to take the name: who has just looked it up opens this one all the same. Of a
        page that is only on the SSD there is nothing to keep: they look the name up again."""
        pool = self._pool
        if entry.is_file and not _is_stored(entry) and pool.lookups(entry) and not entry.links:
            with suppress(NoSuchPage):
                pool.hold(entry).until_forgotten = True
