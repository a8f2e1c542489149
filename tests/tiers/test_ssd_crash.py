"""SIGKILL at every change that the tier makes to the disk: what is found is the state before or after."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest

from kvfs import syscalls
from kvfs.syscalls import RENAME_EXCHANGE
from kvfs.tiers import ssd_following as following
from kvfs.tiers.ssd import SsdTier
from kvfs.tiers.ssd_base import STEPS
from kvfs.tiers.ssd_uses import Use
from tests.conftest import LogGuard
from tests.tiers.ssds import (
    DIRECTORY,
    attach,
    check_accounts,
    named,
    read,
    scan,
    store,
    temporaries,
    write,
)

Pages = dict[bytes, bytes]
"""The content of every page by its path."""


def start(work: Callable[[], None]) -> int:
    """Runs ``work`` in a child that ends with 0 when all went well; its process id."""
    child = os.fork()
    if not child:
        run(work)
    return child


def run(work: Callable[[], None]) -> NoReturn:
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def wait(child: int) -> int:
    """How a child ended: its exit code, or the negative number of the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_myself(*_arguments: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at_change(wanted: int) -> None:
    """From now on this process ends at the start of the so many-th change that it makes to a disk."""
    changes = 0

    def watch(module: object, name: str) -> None:
        genuine = getattr(module, name)

        def call(*arguments: object, **named_arguments: object) -> object:
            nonlocal changes
            changes += 1
            if changes == wanted:
                kill_myself()
            return genuine(*arguments, **named_arguments)

        setattr(module, name, call)

    for name in (
        "rename",
        "unlink",
        "link",
        "mkdir",
        "rmdir",
        "setxattr",
        "removexattr",
        "ftruncate",
        "utime",
    ):
        watch(os, name)
    watch(os, "pwrite")
    watch(syscalls, "renameat2")


def check_what_is_found(ssd: Path, *states: Pages) -> SsdTier:
    """After a crash every path holds what it held in one of the states, whole; the accounts are right."""
    tier = attach(ssd)
    assert tier.suspect
    assert temporaries(ssd) == []
    stored, findings = scan(tier)
    assert findings.foreign == 0
    assert set(findings.damaged) <= {"bytes"}
    found = {one.path: read(tier, one.path) for one in stored if not one.is_directory}
    for path in {path for state in states for path in state} | set(found):
        assert found.get(path) in [state.get(path) for state in states]
    for one in stored:
        if one.is_directory:
            assert one.record.owner is not None
    check_accounts(tier)
    return tier


@pytest.mark.parametrize("step", STEPS)
def test_killed_at_a_step_of_storing(ssd: Path, step: str) -> None:
    old, new = {b"a/page": b"old" * 3000}, {b"a/page": b"new" * 5000, b"b/c/link": b"new" * 5000}
    tier = attach(ssd)
    store(tier, b"a/page", old[b"a/page"])
    tier.close()

    def work() -> None:
        doomed = attach(ssd, step=lambda reached: kill_myself() if reached == step else None)
        doomed.publish_page(write(doomed, new[b"a/page"]), named(*new))

    assert wait(start(work)) == -signal.SIGKILL
    tier = check_what_is_found(ssd, old, new)
    assert tier.leftovers == (0 if step == "renamed" else 2 if step == "directory" else 1)
    for path, content in new.items():
        store(tier, path, content)
        assert read(tier, path) == content
    tier.close()


ONE, TWO, THREE, FOUR, NEW, LINKED = (bytes([letter]) * 5000 * (letter - 48) for letter in b"123456")
SETUP: Pages = {b"a/b/one": ONE, b"a/b/two": TWO, b"a/c/three": THREE, b"four": FOUR}


class Change(NamedTuple):
    """Something that is done to a tier, and what then has other content than before; None: nothing."""

    do: Callable[[SsdTier], object]
    result: dict[bytes, bytes | None]


CHANGES = [
    Change(lambda tier: store(tier, b"a/b/one", NEW), {b"a/b/one": NEW}),
    Change(
        lambda tier: tier.publish_page(write(tier, LINKED), named(b"d/e/five", b"f/six", b"four")),
        {b"d/e/five": LINKED, b"f/six": LINKED, b"four": LINKED},
    ),
    Change(
        lambda tier: following.rename(tier, b"a/b/two", b"g/h/two", 0, [DIRECTORY, DIRECTORY]),
        {b"a/b/two": None, b"g/h/two": TWO},
    ),
    Change(
        lambda tier: following.rename(tier, b"a/c/three", b"a/b/one"), {b"a/c/three": None, b"a/b/one": THREE}
    ),
    Change(
        lambda tier: following.rename(tier, b"a/b", b"i/moved", 0, [DIRECTORY]),
        {b"a/b/one": None, b"i/moved/one": THREE},
    ),
    Change(
        lambda tier: following.rename(tier, b"i", b"d", RENAME_EXCHANGE),
        {b"i/moved/one": None, b"d/e/five": None, b"d/moved/one": THREE, b"i/e/five": LINKED},
    ),
    Change(
        lambda tier: following.rename(tier, b"f/six", b"g/h/two", RENAME_EXCHANGE),
        {b"f/six": TWO, b"g/h/two": LINKED},
    ),
    Change(lambda tier: following.link(tier, b"f/six", b"k/link", [DIRECTORY]), {b"k/link": TWO}),
    Change(lambda tier: following.unlink(tier, b"four"), {b"four": None}),
    Change(lambda tier: tier.set_aside(b"d/moved/one", "bytes"), {b"d/moved/one": None}),
    Change(lambda tier: following.set_attribute(tier, b"f/six", "user.mine", b"x" * 500), {}),
    Change(lambda tier: tier.record_uses([Use(b"f/six", 7, 1_700_000_000_000_000_000)]), {}),
    Change(lambda tier: following.rmdir(tier, b"a/c"), {}),
    Change(lambda tier: tier.shrink_quarantine(0), {}),
    Change(lambda tier: following.unlink(tier, b"f/six"), {b"f/six": None}),
]


def states() -> list[Pages]:
    """The content of all pages before the first change, and after each."""
    made = [SETUP]
    for change in CHANGES:
        now = made[-1] | change.result
        made.append({path: content for path, content in now.items() if content is not None})
    return made


def prepare(ssd: Path) -> None:
    tier = attach(ssd)
    for path, content in SETUP.items():
        store(tier, path, content)
    tier.close()


def test_the_changes_do_what_the_next_test_believes(ssd: Path, expect_log: LogGuard) -> None:
    expect_log("d/moved/one is quarantined")
    prepare(ssd)
    for change, before, after in zip(CHANGES, states(), states()[1:], strict=False):
        tier = check_what_is_found(ssd, before)
        change.do(tier)
        tier.close()
        check_what_is_found(ssd, after).close()


def test_killed_at_any_change_that_is_made_to_the_disk(disk: Path, expect_log: LogGuard) -> None:
    """As many rounds as it takes, each killed one step later than the one before."""
    expect_log("d/moved/one is quarantined")  # the note was made, and the move is finished by the walk
    home = Path(tempfile.mkdtemp(dir=disk))
    rounds = 0
    ended = -signal.SIGKILL
    while ended == -signal.SIGKILL:
        rounds += 1
        ssd = home / str(rounds)
        prepare(ssd)
        reading, writing = os.pipe()

        def work(ssd: Path = ssd, step: int = rounds, writing: int = writing) -> None:
            doomed = attach(ssd)
            kill_at_change(step)
            for change in CHANGES:
                change.do(doomed)
                os.write(writing, b".")

        child = start(work)
        os.close(writing)
        with open(reading, "rb") as pipe:
            done = len(pipe.read())
        ended = wait(child)
        check_what_is_found(ssd, *states()[done : done + 2]).close()
    assert ended == 0
    assert rounds > 60
    shutil.rmtree(home)


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_any_moment_again_and_again(ssd: Path, seed: int) -> None:
    """The same tier is taken, changed by two threads, and killed, in a dozen rounds."""
    randomly = random.Random(seed)
    found_pages = 0
    for number in range(12):

        def work(number: int = number) -> None:
            doomed = attach(ssd, 32 << 20)
            scan(doomed)
            threads = [
                threading.Thread(
                    target=change_at_random, args=(doomed, random.Random(1000 * number + thread))
                )
                for thread in range(2)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        child = start(work)
        time.sleep(0.1 + 0.4 * randomly.random())
        os.kill(child, signal.SIGKILL)
        assert wait(child) == -signal.SIGKILL
        tier = attach(ssd, 32 << 20)
        stored, findings = scan(tier)
        assert findings.damaged == {}
        for one in stored:
            if not one.is_directory:
                read(tier, one.path)
        found_pages += findings.pages
        assert temporaries(ssd) == []
        check_accounts(tier)
        tier.close()
    assert found_pages > 50


def change_at_random(tier: SsdTier, randomly: random.Random) -> None:
    while True:
        path, other = (b"%d/%d" % (randomly.randrange(6), randomly.randrange(10)) for _ in range(2))
        action = randomly.random()
        if action < 0.5:
            store(tier, path, randomly.randbytes(randomly.choice([100, 5000, 70_000, 300_000])))
        elif action < 0.7:
            following.rename(
                tier, path, other, randomly.choice([0, RENAME_EXCHANGE]), [DIRECTORY], [DIRECTORY]
            )
        elif action < 0.8:
            following.link(tier, path, other, [DIRECTORY])
        elif action < 0.9:
            following.unlink(tier, path)
        else:
            one, another = (b"%d" % randomly.randrange(6) for _ in range(2))
            following.rename(tier, one, another, RENAME_EXCHANGE)
