"""The filesystem's answers: names and attributes. `kvfs.fs.files` has those that concern open files."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence

import pyfuse3
from pyfuse3 import FUSEError, InodeT

from kvfs.errors import AttributeMissing, NoSuchPage, StalePage
from kvfs.fs import control
from kvfs.fs.attributes import (
    ExtendedAttributes,
    entry_attributes,
    missing_entry,
    without_privileges,
)
from kvfs.fs.control import ControlFiles
from kvfs.fs.files import Files
from kvfs.fs.guard import guard
from kvfs.fs.lifetimes import NAMES as LIFETIMES
from kvfs.fs.lifetimes import LifetimeAttributes
from kvfs.fs.requests import NAMES, Requests
from kvfs.index import Directory, Entry
from kvfs.leaving import let_go
from kvfs.page import RESERVED, Owner, new_owner
from kvfs.pool import Pool
from kvfs.syscalls import RENAME_EXCHANGE, RENAME_NOREPLACE

NAME_MAX = 255


@guard
class Operations(pyfuse3.Operations):
    """The handlers that pyfuse3 calls. They run on the event loop; see `guard` for their exceptions."""

    supports_dot_lookup = False
    enable_writeback_cache = False

    def __init__(self, pool: Pool, files: Files, control_files: ControlFiles) -> None:
        super().__init__()
        self._pool = pool
        self._files = files
        self._control = control_files
        self._attributes = ExtendedAttributes(pool)
        self._requests = Requests(pool)
        self._lifetimes = LifetimeAttributes(pool)
        self._listings: dict[int, tuple[Directory | None, list[tuple[bytes, Entry | int]]]] = {}
        self._next_listing = 1

    # Finding entries

    def _entry(self, number: int) -> Entry:
        self._files.catch_up()
        entry = self._pool.index.by_number(number)
        if entry is None:
            raise StalePage(f"number {number} means nothing any more")
        return entry

    def _directory(self, number: int) -> Directory:
        if number == control.NUMBER:
            raise FUSEError(errno.EPERM)
        entry = self._entry(number)
        if not isinstance(entry, Directory):
            raise FUSEError(errno.ENOTDIR)
        return entry

    async def _changing(self, number: int, name: bytes) -> Directory:
        """The directory in which ``name`` is to be made, removed or replaced."""
        directory = self._directory(number)
        if len(name) > NAME_MAX:
            raise FUSEError(errno.ENAMETOOLONG)
        if directory is self._pool.index.root and name.startswith(RESERVED):
            raise FUSEError(errno.EPERM)
        await self._child(directory, name)
        return directory

    async def _taking(self, number: int, name: bytes) -> Directory:
        """The directory in which ``name`` is about to be given to what may be in DRAM."""
        directory = await self._changing(number, name)
        self._pool.names.require_linked(directory)
        await self._pool.history.vacated(directory.child_path(name))
        return directory

    async def _child(self, directory: Directory, name: bytes) -> Entry | None:
        """What has a name. Until the SSD has been walked it may have pages that the index does not know."""
        entry = directory.children.get(name)
        if entry is None and self._pool.storage is not None:
            entry = await self._pool.storage.walk.find(directory, name)
        return entry

    async def _walked(self, *entries: Entry | None) -> None:
        """Waits for the walk over the SSD before something that it may be about to find changes its name."""
        storage = self._pool.storage
        if storage is not None and any(
            entry is not None and (entry.stored is not None or entry.is_directory) for entry in entries
        ):
            await storage.walked.wait()

    def _reply(self, entry: Entry) -> pyfuse3.EntryAttributes:
        """Tells the kernel of an entry, which counts the reference."""
        reply = entry_attributes(entry, self._pool.status(entry))
        entry.lookups += 1
        return reply

    async def lookup(
        self, parent_inode: InodeT, name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        if parent_inode == control.NUMBER:
            number = self._control.number(name)
            if number is None:
                raise FUSEError(errno.ENOENT)
            return self._control.attributes(number)
        directory = self._entry(parent_inode)
        if not isinstance(directory, Directory):
            raise FUSEError(errno.ENOTDIR)
        if directory is self._pool.index.root and name == control.NAME:
            return self._control.attributes(control.NUMBER)
        if len(name) > NAME_MAX:
            raise FUSEError(errno.ENAMETOOLONG)
        entry = await self._child(directory, name)
        if entry is not None:
            return self._reply(entry)
        self._pool.face.name_searched(directory.number, name, ctx.pid)
        storage = self._pool.storage
        return missing_entry() if storage is None or storage.walked.is_set() else missing_entry(0.0)

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        self._files.catch_up()
        for number, lookups in inode_list:
            if not self._control.is_control(number):
                await let_go(self._pool.forget(number, lookups))

    async def getattr(self, inode: InodeT, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        if self._control.is_control(inode):
            return self._control.attributes(inode)
        entry = self._entry(inode)
        return entry_attributes(entry, self._pool.status(entry))

    # Changing attributes

    async def setattr(
        self,
        inode: InodeT,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        if self._control.is_control(inode):
            raise FUSEError(errno.EPERM)
        entry = self._entry(inode)
        if fields.update_size:
            await self._files.resize(entry, attr.st_size, ctx.pid)
        owner = entry.owner
        mode = owner.mode
        if fields.update_mode:
            mode = stat.S_IFMT(mode) | stat.S_IMODE(attr.st_mode)
        elif fields.update_uid or fields.update_gid:
            mode = without_privileges(mode)
        wanted = Owner(
            mode,
            attr.st_uid if fields.update_uid else owner.uid,
            attr.st_gid if fields.update_gid else owner.gid,
        )
        if wanted != owner or fields.update_mode or fields.update_uid or fields.update_gid:
            self._pool.set_owner(entry, wanted)
        if fields.update_atime or fields.update_mtime:
            status = self._pool.status(entry)
            self._pool.set_times(
                entry,
                attr.st_atime_ns if fields.update_atime else status.st_atime_ns,
                attr.st_mtime_ns if fields.update_mtime else status.st_mtime_ns,
            )
        return entry_attributes(entry, self._pool.status(entry))

    async def getxattr(self, inode: InodeT, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        if self._control.is_control(inode):
            raise AttributeMissing(os.fsdecode(name))
        entry, text = self._entry(inode), os.fsdecode(name)
        if text in LIFETIMES:
            return await self._lifetimes.get(entry, text)
        return await (self._requests if text in NAMES else self._attributes).get(entry, text)

    async def setxattr(self, inode: InodeT, name: bytes, value: bytes, ctx: pyfuse3.RequestContext) -> None:
        if self._control.is_control(inode):
            raise FUSEError(errno.EPERM)
        entry, text = self._entry(inode), os.fsdecode(name)
        if text in NAMES:
            await self._requests.set(entry, text, value, ctx.uid)
        elif text in LIFETIMES:
            await self._lifetimes.set(entry, text, value, ctx.uid)
        else:
            await self._attributes.set(entry, text, value)

    async def removexattr(self, inode: InodeT, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        if self._control.is_control(inode):
            raise FUSEError(errno.EPERM)
        entry, text = self._entry(inode), os.fsdecode(name)
        if text in LIFETIMES:
            await self._lifetimes.remove(entry, text, ctx.uid)
        else:
            await self._attributes.remove(entry, text)

    async def listxattr(self, inode: InodeT, ctx: pyfuse3.RequestContext) -> list[bytes]:
        if self._control.is_control(inode):
            return []
        return [os.fsencode(name) for name in await self._attributes.list(self._entry(inode))]

    # New names

    def _owner(self, parent: Directory, mode: int, ctx: pyfuse3.RequestContext) -> Owner:
        return new_owner(parent.owner, mode, ctx.uid, ctx.gid)

    async def _made(self, make: Callable[[], Entry]) -> Entry:
        """Makes an entry; where there is no room for even that, evicts a little and tries once more."""
        try:
            return make()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        await self._pool.evictor.for_a_name()
        return make()

    async def create(
        self, parent_inode: InodeT, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        parent = await self._taking(parent_inode, name)
        existing = parent.children.get(name)
        if existing is not None and not flags & os.O_EXCL:
            # Somebody made it since the kernel looked; the file that is there is the one to open.
            info = await self._files.open(existing, flags, ctx.pid)
            return info, self._reply(existing)
        owner = self._owner(parent, stat.S_IFREG | stat.S_IMODE(mode), ctx)
        entry = await self._made(lambda: self._pool.names.create(parent, name, owner))
        info = self._files.created(entry)
        await self._pool.evictor.expect_growth()
        return info, self._reply(entry)

    async def mknod(
        self, parent_inode: InodeT, name: bytes, mode: int, rdev: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        if parent_inode == control.NUMBER:
            return self._control.make_socket(name, mode, ctx.uid)
        parent = await self._taking(parent_inode, name)
        owner = self._owner(parent, mode, ctx)
        if stat.S_ISREG(mode):
            entry = await self._made(lambda: self._pool.names.create(parent, name, owner))
            self._pool.remove_writer(entry)
        elif stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            raise FUSEError(errno.EPERM)
        else:
            entry = await self._made(lambda: self._pool.names.create_other(parent, name, owner))
        return self._reply(entry)

    async def mkdir(
        self, parent_inode: InodeT, name: bytes, mode: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        parent = await self._taking(parent_inode, name)
        owner = self._owner(parent, mode, ctx)
        return self._reply(await self._made(lambda: self._pool.names.create_directory(parent, name, owner)))

    async def symlink(
        self, parent_inode: InodeT, name: bytes, target: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        parent = await self._taking(parent_inode, name)
        owner = self._owner(parent, stat.S_IFLNK | 0o777, ctx)
        return self._reply(
            await self._made(lambda: self._pool.names.create_other(parent, name, owner, target))
        )

    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        parent = await self._taking(new_parent_inode, new_name)
        entry = self._entry(inode)
        await self._walked(entry)
        self._pool.names.link(entry, parent, new_name)
        return self._reply(entry)

    async def readlink(self, inode: InodeT, ctx: pyfuse3.RequestContext) -> bytes:
        if self._control.is_control(inode):
            return self._control.link(inode)
        entry = self._entry(inode)
        if not stat.S_ISLNK(entry.owner.mode):
            raise FUSEError(errno.EINVAL)
        fd = self._pool.tier.open(entry.path(), os.O_RDONLY)
        try:
            return os.read(fd, 4096)
        finally:
            os.close(fd)

    # Names that go or move

    async def unlink(self, parent_inode: InodeT, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        parent = await self._changing(parent_inode, name)
        await self._walked(parent.children.get(name))
        await let_go(self._pool.names.unlink(parent, name))

    async def rmdir(self, parent_inode: InodeT, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        parent = await self._changing(parent_inode, name)
        await self._walked(parent.children.get(name))
        self._pool.names.remove_directory(parent, name)

    async def rename(
        self,
        parent_inode_old: InodeT,
        name_old: bytes,
        parent_inode_new: InodeT,
        name_new: bytes,
        flags: int,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        if flags & ~(RENAME_NOREPLACE | RENAME_EXCHANGE):
            raise FUSEError(errno.EINVAL)
        old = await self._changing(parent_inode_old, name_old)
        new = await self._taking(parent_inode_new, name_new)
        await self._walked(old.children.get(name_old), new.children.get(name_new))
        if flags & RENAME_EXCHANGE and self._pool.storage is not None:
            await self._pool.history.vacated(old.child_path(name_old))
            await self._pool.storage.precautions.before_exchange(
                old.children.get(name_old), new.children.get(name_new)
            )
        await let_go(self._pool.names.rename(old, name_old, new, name_new, flags))

    # Listings

    async def opendir(self, inode: InodeT, ctx: pyfuse3.RequestContext) -> int:
        if inode != control.NUMBER:
            self._directory(inode)
            if self._pool.storage is not None:
                await self._pool.storage.walk.listable()
        handle = self._next_listing
        self._next_listing += 1
        if inode == control.NUMBER:
            self._listings[handle] = (None, list(self._control.names()))
        else:
            self._listings[handle] = (self._directory(inode), [])
        return handle

    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        directory, names = self._listings[fh]
        if start_id == 0 and directory is not None:  # a rewound listing shows what is there now
            names = list(directory.children.items())
            self._listings[fh] = (directory, names)
        for place in range(start_id, len(names)):
            name, entry = names[place]
            if isinstance(entry, int):
                pyfuse3.readdir_reply(token, name, self._control.attributes(entry), place + 1)
            elif directory is not None and directory.children.get(name) is entry:
                try:
                    attributes = entry_attributes(entry, self._pool.status(entry))
                except NoSuchPage:  # it vanished from the tier, and is forgotten by now
                    continue
                if not pyfuse3.readdir_reply(token, name, attributes, place + 1):
                    return
                entry.lookups += 1

    async def releasedir(self, fh: int) -> None:
        del self._listings[fh]

    # Open files: kvfs.fs.files

    async def open(self, inode: InodeT, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        if self._control.is_control(inode):
            return self._files.open_text(await self._control.text(inode), flags)
        return await self._files.open(self._entry(inode), flags, ctx.pid)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        return self._files.read_text(fh, off, size)

    async def release(self, fh: int) -> None:
        self._files.catch_up()
        self._files.release(fh)

    async def fsync(self, fh: int, datasync: bool) -> None:
        """DRAM has nothing that could be more durable."""

    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        """DRAM has nothing that could be more durable."""

    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        room = self._pool.room()
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = room.block_size
        data.f_blocks = room.total_bytes // room.block_size
        data.f_bfree = data.f_bavail = room.free_bytes // room.block_size
        data.f_files = room.total_inodes
        data.f_ffree = data.f_favail = room.free_inodes
        data.f_namemax = NAME_MAX
        return data
