"""The same random operations on the mount and on a plain tmpfs: every result, errno and tree is equal.

What differs by design is left out by the generator (see docs/semantics.md) and has tests of its own in
test_known_differences.py. ``DIFFERENTIAL_SEEDS=100:200`` runs other seeds than the usual few.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.mounted.comparison import Mismatch, Pair, shrink
from tests.mounted.generator import Generator
from tests.mounted.operations import Operation
from tests.mounted.running import KvfsMount, raw_tmpfs, wait_until

OPERATIONS = 1500
SHRINK_SECONDS = 40


def seeds() -> range:
    first, last = map(int, os.environ.get("DIFFERENTIAL_SEEDS", "1:5").split(":"))
    return range(first, last)


@pytest.fixture(scope="module")
def reference(scratch: Path) -> Iterator[Path]:
    """A plain tmpfs. Like the mount it leaves access times alone."""
    with raw_tmpfs(scratch / "reference", "size=1g,huge=within_size,noatime,nosuid,nodev") as directory:
        yield directory


@pytest.fixture(scope="module")
def attributes(reference: Path) -> bool:
    """Whether the plain tmpfs has user.* attributes to compare with; before Linux 6.6 it had none."""
    try:
        os.setxattr(reference, "user.probe", b"")
    except OSError:
        return False
    os.removexattr(reference, "user.probe")
    return True


def fail_with_shortest(
    log: Sequence[Operation], seed: int, attempt: Callable[[Sequence[Operation]], Mismatch | None]
) -> None:
    """Fail the test, with the shortest list of operations that still shows a difference."""
    shortest = shrink(log, lambda operations: attempt(operations) is not None, SHRINK_SECONDS)
    last = attempt(shortest)
    text = "\n".join(f"    {operation!r}," for operation in shortest)
    pytest.fail(f"seed {seed}: {last or 'the shortest list does not always fail'}\n{text}", pytrace=False)


@pytest.mark.parametrize("seed", seeds())
def test_every_result_is_that_of_a_plain_tmpfs(
    mount: KvfsMount, reference: Path, attributes: bool, seed: int
) -> None:
    def settle() -> None:
        wait_until(lambda: not mount.status()["unsealed"], 20, "everything is sealed")

    def attempt(operations: Sequence[Operation]) -> Mismatch | None:
        pair = Pair(str(reference), str(mount.path), settle)
        try:
            pair.run(operations)
        except Mismatch as mismatch:
            return mismatch
        finally:
            pair.close()
        return None

    generator = Generator(seed, users=os.geteuid() == 0, attributes=attributes)
    operations = list(itertools.islice(generator, OPERATIONS))
    previous = os.umask(0o022)
    try:
        mismatch = attempt(operations)
        if mismatch:
            fail_with_shortest(mismatch.log, seed, attempt)
    finally:
        os.umask(previous)
