"""Perform the same operations on two directories, and shrink a list of operations that tells them apart."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence

from tests.mounted.operations import Operation, Side
from tests.mounted.tree import differences, snapshot

LOOK_EVERY = 100


class Mismatch(AssertionError):
    """The two sides differ; ``log`` holds the operations up to there."""

    def __init__(self, what: str, log: Sequence[Operation]) -> None:
        super().__init__(what)
        self.log = list(log)


def opens_for_writing(operation: Operation) -> str | None:
    """The path that an operation changes the bytes of, if it does it by name."""
    name = operation[1]
    if name == "truncate":
        return str(operation[2])
    if name == "open":
        _, _, _, path, flags, _ = operation
        writes = flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC
        return str(path) if writes and not flags & os.O_PATH else None
    return None


class Pair:
    """The plain filesystem, which is right, and the mount, each in a fresh directory."""

    numbers = itertools.count()

    def __init__(self, expected: str, seen: str, settle: Callable[[], None]) -> None:
        name = f"run-{next(self.numbers)}"
        roots = f"{expected}/{name}/top", f"{seen}/{name}/top"
        for root in roots:
            os.makedirs(root)
            os.chmod(root, 0o777)
        self.expected, self.seen = map(Side, roots)
        self.settle = settle
        self.log: list[Operation] = []

    def close(self) -> None:
        for side in (self.expected, self.seen):
            side.close_all()
            shutil.rmtree(os.path.dirname(side.root))

    def perform(self, operation: Operation) -> None:
        """Perform on both; the readers of a file that is opened for writing let go of it before.

        A page that is opened for writing while somebody reads it becomes a new file, by design.
        """
        self.log.append(operation)
        if (path := opens_for_writing(operation)) is not None:
            for slot in self.expected.readers_of(path):
                for side in (self.expected, self.seen):
                    os.close(side.slots.pop(slot))
        expected, seen = self.expected.perform(operation), self.seen.perform(operation)
        if expected != seen:
            raise Mismatch(f"{operation}: expected {expected}, seen {seen}", self.log)

    def compare_trees(self, when: str) -> None:
        found = differences(snapshot(self.expected.root), snapshot(self.seen.root))
        if found:
            raise Mismatch(f"the trees differ {when}:\n" + "\n".join(found), self.log)

    def run(self, operations: Iterable[Operation]) -> None:
        """Perform all, and compare the trees in between, at the end, and when all is sealed."""
        for number, operation in enumerate(operations, 1):
            self.perform(operation)
            if number % LOOK_EVERY == 0:
                self.compare_trees(f"after {number} operations")
        self.compare_trees("at the end")
        self.expected.close_all()
        self.seen.close_all()
        self.compare_trees("when all is closed")
        self.settle()
        self.compare_trees("when all is sealed")


def shrink(
    log: Sequence[Operation], fails: Callable[[Sequence[Operation]], bool], seconds: float
) -> list[Operation]:
    """The shortest list that still fails and was found in ``seconds``, by leaving out ever smaller parts."""
    deadline = time.monotonic() + seconds
    kept = list(log)
    part = max(1, len(kept) // 2)
    while True:
        start = 0
        shorter = False
        while start < len(kept):
            if time.monotonic() > deadline:
                return kept
            attempt = kept[:start] + kept[start + part :]
            if attempt and fails(attempt):
                kept, shorter = attempt, True
            else:
                start += part
        if part == 1 and not shorter:
            return kept
        part = max(1, part // 2)
