"""Where a new page is to lie: the directory of its key, made if need be, and whether the peer may write
there."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvfs.errors import KvfsError, NoSuchPage, UsageError, means_no_room
from kvfs.index import Directory, Entry
from kvfs.page import Owner, new_owner
from kvfs.service.finding import FORBIDDEN, check_key
from kvfs.service.messages import DONE
from kvfs.service.peers import SEARCH, WRITE
from kvfs.service.replies import code_of

if TYPE_CHECKING:
    from kvfs.pool import Pool
    from kvfs.service.peers import Peer

PERMISSIONS = 0o777


@dataclass(frozen=True, slots=True)
class Place:
    """A name in a directory, and the owner and mode that the page is to have."""

    parent: Directory
    name: bytes
    owner: Owner


class Places:
    """Belongs to the event loop. What awaits is checked again when the page gets its name."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def prepare(self, key: bytes, peer: Peer, mode: int) -> Place | int:
        """The place of a key, or the code for why there is none. Waits for the SSD where it has something
        else under the name."""
        try:
            *directories, name = check_key(key).split(b"/")
            parent: Directory = self._pool.index.root
            for directory in directories:
                if not peer.may(parent.owner, SEARCH):
                    return FORBIDDEN
                found = await self._child(parent, directory)
                if found is None and not peer.may(parent.owner, WRITE):
                    return FORBIDDEN
                if found is None:
                    found = await self._make_directory(parent, directory, peer, mode)
                if not isinstance(found, Directory):
                    raise UsageError("a file is on the way to the key")
                parent = found
            mode = stat.S_IFREG | mode & PERMISSIONS
            place = Place(parent, name, new_owner(parent.owner, mode, peer.uid, peer.gid))
            await self._take(place)
            return self.check(place, peer) or place
        except (KvfsError, OSError) as error:
            return code_of(error)

    def check(self, place: Place, peer: Peer) -> int:
        """Whether the name can be given to a page now, as the mount would check it: 0, or the code."""
        parent = place.parent
        if parent.parent is None and parent is not self._pool.index.root:
            return NoSuchPage.errno  # the directory was removed
        existing = parent.children.get(place.name)
        if not peer.may(parent.owner, WRITE | SEARCH):
            return FORBIDDEN
        if existing is None:
            return DONE
        if not existing.is_file:
            return UsageError.errno
        return DONE if peer.may_replace(parent, existing) else FORBIDDEN

    async def _child(self, directory: Directory, name: bytes) -> Entry | None:
        """What has a name. Until the SSD has been walked it may have pages that the index does not know."""
        found = directory.children.get(name)
        if found is None and self._pool.storage is not None:
            found = await self._pool.storage.walk.find(directory, name)
        return found

    async def _take(self, place: Place) -> None:
        """Waits until the name can be given to something in DRAM."""
        existing = await self._child(place.parent, place.name)
        storage = self._pool.storage
        if storage is not None and existing is not None and existing.stored is not None:
            await storage.walked.wait()
        await self._pool.history.vacated(place.parent.child_path(place.name))

    async def _make_directory(self, parent: Directory, name: bytes, peer: Peer, mode: int) -> Entry:
        """As mkdir -p would: with x where the page has r."""
        await self._pool.history.vacated(parent.child_path(name))
        permissions = mode & PERMISSIONS | (mode & 0o444) >> 2 | 0o300
        owner = new_owner(parent.owner, stat.S_IFDIR | permissions, peer.uid, peer.gid)
        for is_last in (False, True):
            if (found := parent.children.get(name)) is not None:  # somebody was quicker
                return found
            try:
                made = self._pool.names.create_directory(parent, name, owner)
            except OSError as error:
                if is_last or not means_no_room(error):
                    raise
                await self._pool.evictor.for_a_name()
            else:
                self._pool.face.invalidate(parent.number, name)
                return made
        raise AssertionError
