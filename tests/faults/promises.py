"""What a mount owes to the program that used it, whatever ends the daemon: told by the program's own calls.

Each version of a file has a number, and each name the versions that it had. Before a call is made it is noted
what may be found if it is the last one; afterwards, what is there for certain.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable


class Promises:
    """``now``: which version each name has, as far as the program knows.

    The time that counts begins when both tiers had everything last (``settled``). ``may``: what each name may
    have after a crash, None for nothing: all that it had in that time, since the SSD follows a little later.
    ``kept`` and ``stored``: versions that were seen sealed, and seen on the SSD; they outlive the daemon, and
    the machine, under one of the names that they had in that time. ``firm``: names that mean exactly one
    version while DRAM is there, whatever the SSD did not follow.
    """

    def __init__(self) -> None:
        self.now: dict[str, int] = {}
        self.may: defaultdict[str, set[int | None]] = defaultdict(set)
        self.kept: set[int] = set()
        self.stored: set[int] = set()
        self.firm: dict[str, int] = {}
        self._names: defaultdict[int, set[str]] = defaultdict(set)

    def _note(self, *words: object) -> None:
        """For whoever looks into a failure."""
        print(f"{time.monotonic():.4f}", *words)

    # Before a call

    def will_have(self, name: str, version: int | None) -> None:
        """A name is about to mean a version, or nothing."""
        self._note(name, "will have", version)
        old = self.now.get(name)
        self.may[name] |= {old, version, None}
        self.firm.pop(name, None)
        if old is not None and old != version:
            self._may_end(name, old)
        if version is not None:
            self._names[version].add(name)

    def _may_end(self, name: str, version: int) -> None:
        if all(other == name for other, one in self.now.items() if one == version):
            self.kept.discard(version)
            self.stored.discard(version)

    def will_move(self, old: str, new: str) -> None:
        """What ``old`` means gets the name ``new`` in its place."""
        self._note(old, "will be", new)
        version = self.now[old]
        was_kept, was_stored = version in self.kept, version in self.stored
        self.will_have(new, version)
        self.may[old] |= {version, None}
        self.firm.pop(old, None)
        if was_kept:
            self.kept.add(version)
        if was_stored:
            self.stored.add(version)

    # After it

    def has(self, name: str, version: int) -> None:
        self.now[name] = version

    def has_moved(self, old: str, new: str) -> None:
        self.now[new] = self.now.pop(old)

    def has_nothing(self, name: str) -> None:
        self.now.pop(name, None)

    def is_sealed(self, name: str) -> None:
        """A name was seen to mean a page."""
        self._note(name, "is sealed")
        self.kept.add(self.now[name])
        self.firm[name] = self.now[name]

    def is_stored(self, name: str) -> None:
        """The page was seen to be on the SSD."""
        self._note(name, "is stored")
        self.kept.add(self.now[name])
        self.stored.add(self.now[name])

    def settled(self) -> None:
        """Both tiers have exactly what the program knows, and the SSD has all of it."""
        self._note("settled")
        self._begin()
        self.stored = set(self.kept)

    def _begin(self) -> None:
        self.may.clear()
        self._names.clear()
        for name, version in self.now.items():
            self.may[name].add(version)
            self._names[version].add(name)
        self.kept = set(self.now.values())
        self.firm = dict(self.now)

    # After a crash

    def broken_by(self, found: dict[str, int], *, has_dram: bool) -> list[str]:
        """What was promised and is not so; ``found`` is what every name means after a crash."""
        broken = [
            f"{name} has version {version} and may have {self.may.get(name)}"
            for name, version in found.items()
            if version not in self.may.get(name, ())
        ]
        broken += [
            f"{name} is gone and may have {may}"
            for name, may in self.may.items()
            if name not in found and None not in may
        ]
        broken += [
            f"version {version} is lost: it had the names {self._names[version]}"
            for version in (self.kept if has_dram else self.stored)
            if all(found.get(name) != version for name in self._names[version])
        ]
        if has_dram:
            broken += [
                f"{name} has version {found.get(name)} and was seen sealed as {version}"
                for name, version in self.firm.items()
                if found.get(name) != version
            ]
        return broken

    def go_on_with(self, found: dict[str, int]) -> None:
        """The program takes what it found for what is there. The SSD may still have what it had."""
        for name in {*found, *self.may}:
            self.may[name].add(found.get(name))
        for name, version in found.items():
            self._names[version].add(name)
        self.now = dict(found)
        self.kept = set(found.values())
        self.stored &= self.kept
        self.firm = dict(found)

    def expected_gone(self, names: Iterable[str]) -> list[str]:
        """Which of these names, found to mean nothing, had a page."""
        return [name for name in names if self.now.get(name) in self.kept]
