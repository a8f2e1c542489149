"""From keys to entries, as one peer may see them: without a step through the kernel, and without waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfs.errors import NotPermitted, UsageError
from kvfs.index import LONGEST_PATH, SEALED, STORED, UNCHECKED, Directory, Entry
from kvfs.page import RESERVED, shown
from kvfs.service.messages import ABSENT
from kvfs.service.peers import READ, SEARCH, Peer

if TYPE_CHECKING:
    from kvfs.pool import Pool

FORBIDDEN = NotPermitted.errno
LONGEST_NAME = 255

_PAGES = frozenset((SEALED, STORED, UNCHECKED))


def check_key(key: bytes) -> bytes:
    """The key of a page that is to be made. Raises UsageError where it is no path below a mount."""
    names = key.split(b"/")
    is_reserved = key.startswith(RESERVED)
    is_strange = any(name in (b"", b".", b"..") or len(name) > LONGEST_NAME for name in names)
    if is_reserved or is_strange or b"\0" in key or len(key) >= LONGEST_PATH:
        raise UsageError(f"{shown(key[:300])!r} is no key: it is to be a path below the mount")
    return key


def split(key: bytes) -> tuple[bytes, bytes]:
    """The path of the directory, b"" for the root, and the name. What begins with "/" is in no directory."""
    path, slash, name = key.rpartition(b"/")
    return path or slash, name


class Finder:
    """The keys of one turn of one request: it remembers the directories on their way, and whose pages it has
    met, which are few. Across an await they may change: make another one."""

    def __init__(self, pool: Pool, peer: Peer) -> None:
        self._root = pool.index.root
        self._peer = peer
        self._directories: dict[bytes, Directory | int] = {}
        self._readable: dict[int, bool] = {}

    def find(self, key: bytes) -> Entry | int:
        """The entry of a page; or a code, which is `ABSENT` where there is none."""
        path, name = split(key)
        directory = self._directories.get(path)
        if directory is None:
            directory = self.directory(path)
        if isinstance(directory, int):
            return directory
        entry = directory.children.get(name)
        if entry is None:
            return ABSENT
        return entry if entry.state in _PAGES else ABSENT

    def find_readable(self, key: bytes) -> Entry | int:
        """The same for somebody who wants the bytes."""
        entry = self.find(key)
        if isinstance(entry, int):
            return entry
        owner = entry.owner
        readable = self._readable.get(id(owner))  # equal owners are one object
        if readable is None:
            readable = self._readable[id(owner)] = self._peer.may(owner, READ)
        return entry if readable else FORBIDDEN

    def directory(self, path: bytes) -> Directory | int:
        """The directory at a path that the peer may walk; or a code."""
        found = self._directories.get(path)
        if found is None:
            found = self._directories[path] = self._walk_to(path)
        return found

    def _walk_to(self, path: bytes) -> Directory | int:
        entry: Entry | None = self._root
        if path:
            parent_path, _, name = path.rpartition(b"/")
            parent = self.directory(parent_path)
            if isinstance(parent, int):
                return parent
            entry = parent.children.get(name)
        if not isinstance(entry, Directory):
            return ABSENT
        return entry if self._peer.may(entry.owner, SEARCH) else FORBIDDEN
