"""The index against plain dictionaries: names, links, numbers, and who is told of names."""

from __future__ import annotations

import stat
import time
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvfs.errors import StalePage
from kvfs.index import DRAFT, FIRST_NUMBER, OTHER, ROOT_NUMBER, SEALED, Directory, Entry, Index
from kvfs.page import Owner

DIRECTORY = Owner(stat.S_IFDIR | 0o755, 1, 2)
FILE = Owner(stat.S_IFREG | 0o644, 3, 4)

NAMES = [b"a", b"b", b"\xff", b"a name with spaces"]


class NamesTold:
    """What the index told of names."""

    def __init__(self) -> None:
        self.names: dict[tuple[int, bytes], int] = {}

    def name_add(self, parent: int, name: bytes, number: int) -> None:
        self.names[parent, name] = number

    def name_remove(self, parent: int, name: bytes) -> None:
        assert (parent, name) in self.names, "a name is removed that was never told"
        del self.names[parent, name]


@dataclass(eq=False)
class Node:
    """A file or directory of the model, with the entry that stands for it."""

    entry: Entry
    children: dict[bytes, Node] = field(default_factory=dict)

    @property
    def is_directory(self) -> bool:
        return isinstance(self.entry, Directory)

    def below(self) -> list[Node]:
        """Itself and everything that its names lead to."""
        return [self, *(node for child in self.children.values() for node in child.below())]


def directory_of(node: Node) -> Directory:
    assert isinstance(node.entry, Directory)
    return node.entry


class IndexMachine(RuleBasedStateMachine):
    """Random changes of names on the index and on a tree of dictionaries."""

    @initialize(late=st.booleans())
    def start(self, late: bool) -> None:
        self.index = Index(DIRECTORY)
        self.root = Node(self.index.root)
        self.told = NamesTold()
        if not late:
            self.index.tell(self.told)
        self.late = late
        self.nameless: list[Node] = []
        self.most = 1

    def directories(self) -> list[Node]:
        return [node for node in self.root.below() if node.is_directory]

    def names(self) -> list[tuple[Node, bytes, Node]]:
        return [
            (parent, name, child) for parent in self.directories() for name, child in parent.children.items()
        ]

    def free_place(self, data: st.DataObject) -> tuple[Node, bytes] | None:
        parent = data.draw(st.sampled_from(self.directories()))
        free = [name for name in NAMES if name not in parent.children]
        return (parent, data.draw(st.sampled_from(free))) if free else None

    def lose(self, node: Node) -> None:
        """Notes that a name of the node is gone."""
        if node not in self.root.below():
            self.nameless.append(node)

    @rule(data=st.data(), owner=st.sampled_from([DIRECTORY, FILE, FILE]))
    def add(self, data: st.DataObject, owner: Owner) -> None:
        place = self.free_place(data)
        if place is None:
            return
        parent, name = place
        entry = self.index.add(directory_of(parent), name, Owner(owner.mode, owner.uid, owner.gid), DRAFT)
        assert entry.owner == owner
        assert entry.state == (OTHER if entry.is_directory else DRAFT)
        assert entry.lookups == 0
        assert entry.holding is None
        parent.children[name] = Node(entry)

    @rule(data=st.data())
    def link(self, data: st.DataObject) -> None:
        files = [child for _, _, child in self.names() if not child.is_directory]
        place = self.free_place(data)
        if not files or place is None:
            return
        node = data.draw(st.sampled_from(files))
        parent, name = place
        self.index.add_link(node.entry, directory_of(parent), name)
        parent.children[name] = node

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        removable = [found for found in self.names() if not found[2].children]
        if not removable:
            return
        parent, name, node = data.draw(st.sampled_from(removable))
        assert self.index.remove(directory_of(parent), name) is node.entry
        del parent.children[name]
        self.lose(node)

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        names = self.names()
        if not names:
            return
        parent, name, node = data.draw(st.sampled_from(names))
        target = data.draw(st.sampled_from(self.directories()))
        new_name = data.draw(st.sampled_from(NAMES))
        replaced = target.children.get(new_name)
        if target in node.below() or replaced is node:
            return
        if replaced is not None and (replaced.children or replaced.is_directory != node.is_directory):
            return
        given = self.index.move(directory_of(parent), name, directory_of(target), new_name)
        assert given is (None if replaced is None else replaced.entry)
        del parent.children[name]
        target.children[new_name] = node
        if replaced is not None:
            self.lose(replaced)

    @rule(data=st.data())
    def exchange(self, data: st.DataObject) -> None:
        names = self.names()
        if not names:
            return
        one = data.draw(st.sampled_from(names))
        other = data.draw(st.sampled_from(names))
        if one[0] in other[2].below() or other[0] in one[2].below():
            return
        self.index.exchange(directory_of(one[0]), one[1], directory_of(other[0]), other[1])
        one[0].children[one[1]], other[0].children[other[1]] = other[2], one[2]

    @precondition(lambda self: self.nameless)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(self.nameless))
        self.nameless.remove(node)
        number = node.entry.number
        self.index.drop(node.entry)
        assert self.index.by_number(number) is None
        self.index.drop(node.entry)  # once more does nothing

    @precondition(lambda self: self.late)
    @rule()
    def tell(self) -> None:
        self.index.tell(self.told)
        self.late = False

    @invariant()
    def every_name_leads_to_its_entry(self) -> None:
        names_of: dict[Node, list[tuple[Directory, bytes]]] = {}
        for parent, name, node in self.names():
            assert directory_of(parent).children[name] is node.entry
            path = directory_of(parent).child_path(name)
            assert self.index.find(path) is node.entry
            names_of.setdefault(node, []).append((directory_of(parent), name))
        for node, names in names_of.items():
            assert len(node.entry.names()) == len(names)
            assert set(node.entry.names()) == set(names)
            assert node.entry.path() in [parent.child_path(name) for parent, name in names]
        for parent in self.directories():
            assert set(directory_of(parent).children) == set(parent.children)
        assert self.index.find(b"") is self.index.root
        assert self.index.find(b"no such name/below it") is None

    @invariant()
    def what_has_no_name_has_no_path(self) -> None:
        for node in self.nameless:
            assert node.entry.names() == []
            with pytest.raises(StalePage):
                node.entry.path()

    @invariant()
    def numbers_are_unique_and_used_again(self) -> None:
        known = {node.entry for node in [*self.root.below(), *self.nameless]}
        assert len(self.index) == len(known)
        self.most = max(self.most, len(known))
        assert set(self.index.entries()) == known
        for entry in known:
            assert self.index.by_number(entry.number) is entry
            if entry is not self.index.root:
                assert FIRST_NUMBER <= entry.number < FIRST_NUMBER + self.most
        assert self.index.root.number == ROOT_NUMBER

    @invariant()
    def exactly_the_names_that_exist_were_told(self) -> None:
        if not self.late:
            expected = {(parent.entry.number, name): node.entry.number for parent, name, node in self.names()}
            assert self.told.names == expected


IndexMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestIndexAgainstDictionaries = IndexMachine.TestCase


def test_numbers_outside_the_table_mean_nothing() -> None:
    index = Index(DIRECTORY)
    for number in (-1, 0, 2, FIRST_NUMBER - 1, FIRST_NUMBER, 1 << 63):
        assert index.by_number(number) is None


def test_the_root_is_never_dropped() -> None:
    index = Index(DIRECTORY)
    index.drop(index.root)
    assert index.by_number(ROOT_NUMBER) is index.root
    assert index.root.path() == b""


def test_an_entry_whose_number_was_given_on_does_not_take_it_away() -> None:
    index = Index(DIRECTORY)
    old = index.add(index.root, b"old", FILE, SEALED)
    index.remove(index.root, b"old")
    index.drop(old)
    new = index.add(index.root, b"new", FILE, SEALED)
    assert new.number == old.number
    index.drop(old)
    assert index.by_number(new.number) is new


def test_equal_owners_and_sizes_are_one_object() -> None:
    index = Index(DIRECTORY)
    first = index.add(index.root, b"1", Owner(FILE.mode, FILE.uid, FILE.gid), DRAFT)
    second = index.add(index.root, b"2", Owner(FILE.mode, FILE.uid, FILE.gid), DRAFT)
    assert first.owner is second.owner
    size = 123_456_789
    assert index.intern_size(size) is index.intern_size(int(str(size)))


def test_sizes_of_all_kinds_do_not_pile_up() -> None:
    index = Index(DIRECTORY)
    for size in range(10_000, 30_000):
        assert index.intern_size(size) == size
    assert len(index._sizes) <= 4097


def test_the_first_name_passes_to_a_link() -> None:
    index = Index(DIRECTORY)
    entry = index.add(index.root, b"first", FILE, SEALED)
    index.add_link(entry, index.root, b"second")
    index.add_link(entry, index.root, b"third")
    index.remove(index.root, b"first")
    assert entry.path() == b"third"
    index.remove(index.root, b"third")
    assert entry.names() == [(index.root, b"second")]
    assert entry.links is None


def seconds_a_link(count: int) -> float:
    """The time that a link takes to be made, renamed and removed, of a file that has so many."""
    index = Index(DIRECTORY)
    entry = index.add(index.root, b"first", FILE, SEALED)
    names = [b"%d" % number for number in range(count)]
    start = time.perf_counter()
    for name in names:
        index.add_link(entry, index.root, name)
    for name in names:
        index.move(index.root, name, index.root, b"moved " + name)
    index.remove(index.root, b"first")
    for name in names:
        index.remove(index.root, b"moved " + name)
    assert entry.names() == []
    return (time.perf_counter() - start) / count


def test_the_thousandth_link_costs_no_more_than_the_first() -> None:
    few, many = (min(seconds_a_link(count) for _ in range(3)) for count in (100, 4_000))
    assert many < 5 * few
