"""The names of the pool in memory: a tree of entries that mirrors the tiers, and their numbers.

Pure: no I/O. The tree speeds look-ups and carries what a file on a tier cannot (who has it open, its place in
the eviction order). Where it differs from the tier, the tier is right, and the caller removes the entry.
An entry costs memory for every page of the pool, so it holds no more than every page needs; what only open
pages need is in `kvfs.holding.Holding`.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from kvfs import policy
from kvfs.errors import NameTooLong, StalePage
from kvfs.page import Owner

if TYPE_CHECKING:
    from kvfs.holding import Holding

ROOT_NUMBER = 1
LONGEST_PATH = 4000
"""Bytes, a little below the kernel's PATH_MAX: some of our paths begin with /proc/self/fd."""
FIRST_NUMBER = 16
"""Numbers below it, other than the root's, are for the files that describe the mount."""


class Entry:
    """A file or a directory: its first name, its shown owner, its place in the eviction order.

    ``stored`` is None while the SSD has no copy of a page; see `kvfs.storage`. ``parent`` is None once the
    last name is gone. ``size`` is the page's size in bytes and 0 for a draft;
    ``lookups`` counts how often the kernel was told of the number, but
    for what the face counted since it was last asked. ``changed_ns`` is when a program last changed something
    of the entry other than its bytes and its place: ns since 1970, 0 for not since the start.
    ``ready_id`` is the backing id of a page that the channel can open although we hold no descriptor of it.
    """

    __slots__ = (
        "changed_ns",
        "colder",
        "hits",
        "holding",
        "hotter",
        "links",
        "lookups",
        "name",
        "number",
        "owner",
        "parent",
        "ready_id",
        "size",
        "state",
        "stored",
    )

    def __init__(self, number: int, parent: Directory | None, name: bytes, owner: Owner, state: int) -> None:
        self.number = number
        self.parent = parent
        self.name = name
        self.owner = owner
        self.state = state
        self.size = 0
        self.hits = 0
        self.lookups = 0
        self.changed_ns = 0
        self.links: dict[tuple[Directory, bytes], None] | None = None
        """The further names, in a dictionary because there may be thousands of them."""
        self.holding: Holding | None = None
        self.ready_id = 0
        self.stored: bytes | None = None
        self.colder: policy.Entry | None = None
        self.hotter: policy.Entry | None = None

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.owner.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.owner.mode)

    def names(self) -> list[tuple[Directory, bytes]]:
        """Every name: the first and the further hard links. Empty for what was unlinked."""
        first = [] if self.parent is None else [(self.parent, self.name)]
        return first + list(self.links or ())

    def path(self) -> bytes:
        """The relative path of the first name; b"" for the root. StalePage once the last name is gone: what
        has the name now is another file."""
        if self.parent is None and self.number != ROOT_NUMBER:
            raise StalePage(f"entry {self.number} has no name any more")
        parts = [self.name]
        directory = self.parent
        while directory is not None and directory.parent is not None:
            parts.append(directory.name)
            directory = directory.parent
        parts.reverse()
        return b"/".join(parts)


DRAFT = 0
"""Open for writing, mapped writable, empty, or waiting for its digest."""
SEALED = 1
"""A page: its digest is stored."""
UNCHECKED = 2
"""A page found at the start: its bytes are compared with its digest at the first open."""
OTHER = 3
"""A directory, symlink, fifo or socket."""
STORED = 4
"""A page whose bytes are on the SSD only."""


class Directory(Entry):
    """An entry that has children."""

    __slots__ = ("children",)

    def __init__(self, number: int, parent: Directory | None, name: bytes, owner: Owner) -> None:
        super().__init__(number, parent, name, owner, OTHER)
        self.children: dict[bytes, Entry] = {}

    def below(self) -> Iterator[Entry]:
        """Everything in it and in its directories."""
        for child in self.children.values():
            yield child
            if isinstance(child, Directory):
                yield from child.below()

    def child_path(self, name: bytes) -> bytes:
        """The relative path of a name in this directory."""
        path = self.path()
        return path + b"/" + name if path else name


def require_reachable(directory: Directory, path_length: int) -> None:
    """NameTooLong when something below a directory could not be named any more at its new place: the kernel
    takes paths of so many bytes only, and a restart finds everything by its path."""
    if path_length >= LONGEST_PATH:
        raise NameTooLong("the path from the root of the mount is too long")
    for name, child in directory.children.items():
        if isinstance(child, Directory):
            require_reachable(child, path_length + 1 + len(name))
        elif path_length + 1 + len(name) >= LONGEST_PATH:
            raise NameTooLong("a path below the directory would be too long")


class Names(Protocol):
    """Who wants to know which names exist, each in the directory with the number ``parent``, and the number
    of what it means."""

    def name_add(self, parent: int, name: bytes, number: int) -> None: ...

    def name_remove(self, parent: int, name: bytes) -> None: ...


class Index:
    """The tree and the numbers by which the kernel knows its entries."""

    def __init__(self, owner: Owner) -> None:
        self._owners: dict[Owner, Owner] = {}
        self._sizes: dict[int, int] = {}
        self._by_number: list[Entry | None] = [None] * FIRST_NUMBER
        self._free: list[int] = []
        self._names: Names | None = None
        self.directories_changed = 0
        """Goes up whenever a path may lead to another directory, or who may walk it may be another."""
        self.root = Directory(ROOT_NUMBER, None, b"", self.intern(owner))
        self._by_number[ROOT_NUMBER] = self.root

    def tell(self, names: Names) -> None:
        """Tells of every name now, and of every change from now on."""
        self._names = names
        for entry in self.entries():
            if isinstance(entry, Directory):
                for name, child in entry.children.items():
                    names.name_add(entry.number, name, child.number)

    def _insert(self, parent: Directory, name: bytes, entry: Entry) -> None:
        parent.children[name] = entry
        if isinstance(entry, Directory):
            self.directories_changed += 1
        if self._names is not None:
            self._names.name_add(parent.number, name, entry.number)

    def _take(self, parent: Directory, name: bytes) -> Entry:
        entry = parent.children.pop(name)
        if isinstance(entry, Directory):
            self.directories_changed += 1
        if self._names is not None:
            self._names.name_remove(parent.number, name)
        return entry

    def intern(self, owner: Owner) -> Owner:
        """One object for all entries of the same owner and mode."""
        return self._owners.setdefault(owner, owner)

    def intern_size(self, size: int) -> int:
        """One object for all pages of one size: pools hold few sizes, and many pages."""
        if len(self._sizes) > 4096:
            self._sizes.clear()
        return self._sizes.setdefault(size, size)

    def __len__(self) -> int:
        return len(self._by_number) - len(self._free) - FIRST_NUMBER + 1

    def by_number(self, number: int) -> Entry | None:
        return self._by_number[number] if 0 < number < len(self._by_number) else None

    def find(self, path: bytes) -> Entry | None:
        """The entry at a relative path, without touching a tier."""
        entry: Entry = self.root
        for name in path.split(b"/") if path else ():
            child = entry.children.get(name) if isinstance(entry, Directory) else None
            if child is None:
                return None
            entry = child
        return entry

    def add(self, parent: Directory, name: bytes, owner: Owner, state: int) -> Entry:
        """A new entry; the name must be free."""
        number = self._free.pop() if self._free else len(self._by_number)
        owner = self.intern(owner)
        entry: Entry
        if stat.S_ISDIR(owner.mode):
            entry = Directory(number, parent, name, owner)
        else:
            entry = Entry(number, parent, name, owner, state)
        if number == len(self._by_number):
            self._by_number.append(entry)
        else:
            self._by_number[number] = entry
        self._insert(parent, name, entry)
        return entry

    def add_link(self, entry: Entry, parent: Directory, name: bytes) -> None:
        """A further name of an entry."""
        if entry.parent is None:
            entry.parent, entry.name = parent, name
        else:
            if entry.links is None:
                entry.links = {}
            entry.links[parent, name] = None
        self._insert(parent, name, entry)

    def remove(self, parent: Directory, name: bytes) -> Entry:
        """Takes a name away. The entry keeps its number until `drop` is called."""
        entry = self._take(parent, name)
        if entry.parent is parent and entry.name == name:
            if entry.links:
                (entry.parent, entry.name), _ = entry.links.popitem()
            else:
                entry.parent = None
        elif entry.links:
            entry.links.pop((parent, name), None)
        entry.links = entry.links or None
        return entry

    def move(self, old: Directory, old_name: bytes, new: Directory, new_name: bytes) -> Entry | None:
        """Renames, replacing what has the new name; returns the replaced entry."""
        replaced = self.remove(new, new_name) if new_name in new.children else None
        moved = self._take(old, old_name)
        self._rename_link(moved, (old, old_name), (new, new_name))
        self._insert(new, new_name, moved)
        return replaced

    def exchange(self, one: Directory, one_name: bytes, other: Directory, other_name: bytes) -> None:
        """Two names change places."""
        first, second = one.children[one_name], other.children[other_name]
        if first is not second:
            self._rename_link(first, (one, one_name), (other, other_name))
            self._rename_link(second, (other, other_name), (one, one_name))
            self._insert(one, one_name, second)
            self._insert(other, other_name, first)

    @staticmethod
    def _rename_link(entry: Entry, old: tuple[Directory, bytes], new: tuple[Directory, bytes]) -> None:
        if (entry.parent, entry.name) == old:
            entry.parent, entry.name = new
        elif entry.links and old in entry.links:
            del entry.links[old]
            entry.links[new] = None

    def drop(self, entry: Entry) -> None:
        """Forgets an entry without a name; its number is given to another one later."""
        if self._by_number[entry.number] is entry and entry is not self.root:
            self._by_number[entry.number] = None
            self._free.append(entry.number)

    def entries(self) -> Iterator[Entry]:
        """Every entry that has a number, the root included."""
        return (entry for entry in self._by_number if entry is not None)
