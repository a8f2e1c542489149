"""From keys to entries, as one peer may see them: without a step through the kernel, and without waiting."""

from __future__ import annotations

from collections.abc import Iterable

from kvfs.errors import NotPermitted, UsageError
from kvfs.index import LONGEST_PATH, SEALED, STORED, UNCHECKED, Directory, Entry, Index
from kvfs.page import RESERVED, Owner, shown
from kvfs.service.messages import ABSENT
from kvfs.service.peers import READ, SEARCH, Peer

FORBIDDEN = NotPermitted.errno
LONGEST_NAME = 255

_PAGES = frozenset((SEALED, STORED, UNCHECKED))
_NOTHING: dict[bytes, Entry] = {}
_MOST_DIRECTORIES = 1 << 16


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
    """What one peer finds. It remembers the directories on the way for as long as none changes, and whose
    pages it has met: a key costs half a microsecond then, as long as nothing here is made a call of its own.
    """

    def __init__(self, index: Index, peer: Peer) -> None:
        self._index = index
        self._peer = peer
        self._is_root = peer.uid == 0
        self._children: dict[bytes, dict[bytes, Entry]] = {}
        """By path, what is in a directory; nothing where the peer may not walk, or there is none."""
        self._directories: dict[bytes, Directory] = {}
        self._refused: dict[bytes, int] = {}
        """The codes of paths below which nothing is found for another reason than that there is nothing."""
        self._readable: dict[Owner, bool] = {}
        self._begin_anew()

    def _begin_anew(self) -> None:
        for known in (self._children, self._directories, self._refused, self._readable):
            known.clear()
        self._seen = self._index.directories_changed
        root = self._index.root
        if self._peer.may(root.owner, SEARCH):
            self._children[b""], self._directories[b""] = root.children, root
        else:
            self._children[b""], self._refused[b""] = _NOTHING, FORBIDDEN

    def _refresh(self) -> None:
        if self._seen != self._index.directories_changed or len(self._children) > _MOST_DIRECTORIES:
            self._begin_anew()

    def find(self, keys: Iterable[bytes]) -> list[Entry | int]:
        """The entries of pages; or codes, which are `ABSENT` where there is none."""
        self._refresh()
        get = self._children.get
        found: list[Entry | int] = []
        for key in keys:
            path, slash, name = key.rpartition(b"/")
            if slash and not path:
                path = slash
            children = get(path)
            if children is None:
                children = self._enter(path)
            entry = children.get(name)
            if entry is None or entry.state not in _PAGES:
                found.append(self._refused.get(path, ABSENT))
            else:
                found.append(entry)
        return found

    def find_readable(self, keys: Iterable[bytes]) -> list[Entry | int]:
        """The same for somebody who wants the bytes."""
        found = self.find(keys)
        if not self._is_root:
            for place, entry in enumerate(found):
                if not isinstance(entry, int) and not self._may_read(entry.owner):
                    found[place] = FORBIDDEN
        return found

    def _may_read(self, owner: Owner) -> bool:
        may = self._readable.get(owner)
        if may is None:
            may = self._readable[owner] = self._peer.may(owner, READ)
        return may

    def directory(self, path: bytes) -> Directory | int:
        """The directory at a path that the peer may walk; or a code."""
        self._refresh()
        if path not in self._children:
            self._enter(path)
        return self._directories.get(path) or self._refused.get(path, ABSENT)

    def _enter(self, path: bytes) -> dict[bytes, Entry]:
        """Walks to a directory that was not met yet."""
        parent, slash, name = path.rpartition(b"/")
        if slash and not parent:
            parent = slash
        siblings = _NOTHING if parent == path else self._children.get(parent)
        if siblings is None:
            siblings = self._enter(parent)
        entry = siblings.get(name)
        children = _NOTHING
        if not isinstance(entry, Directory):
            if parent in self._refused:
                self._refused[path] = self._refused[parent]
        elif self._is_root or self._peer.may(entry.owner, SEARCH):
            children = entry.children
            self._directories[path] = entry
        else:
            self._refused[path] = FORBIDDEN
        self._children[path] = children
        return children
