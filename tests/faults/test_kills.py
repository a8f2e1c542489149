"""The daemon killed at every step, again and again: no page is lost, no wrong byte read, sums are right."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.steps import STEPS
from kvfs.tiers.ssd_base import MOVING_STEPS
from kvfs.tiers.ssd_base import STEPS as STORING_STEPS
from tests.faults.crashing import CrashingMount, Killed
from tests.faults.promises import Promises
from tests.faults.workload import Workload

EVERY_STEP = (*STEPS, *(f"ssd.{step}" for step in (*STORING_STEPS, *MOVING_STEPS)))
ROUNDS = int(os.environ.get("KVFS_FAULT_ROUNDS", "40"))
SEED = int(os.environ.get("KVFS_FAULT_SEED", "1"))
SECONDS_A_ROUND = 15
MOST_CALLS = 120


class Rounds:
    """One disk, one program, and one end of the daemon after the other. ``reached`` counts the steps at which
    it was killed; "" is any moment between."""

    def __init__(self, mount: CrashingMount, chance: random.Random) -> None:
        self._mount = mount
        self._chance = chance
        self._promises = Promises()
        self._workload = Workload(mount, self._promises, chance)
        self._has_dram = True
        self.reached: Counter[str] = Counter()

    def run(self, step: str, *, reboot: bool, settle: bool = True) -> None:
        """One round: what the round before left is checked, then the program goes on until the daemon is
        killed at ``step``, or else after some calls, at most MOST_CALLS."""
        try:
            self._serve(step, settle=settle)
        except Killed:
            self._end_round(step, reboot=reboot)
        else:
            self._mount.kill()
            self._end_round("", reboot=reboot)

    def _end_round(self, step: str, *, reboot: bool) -> None:
        self.reached[step.partition(":")[0]] += 1
        self._has_dram = self._has_dram and not reboot
        if reboot:
            self._mount.reboot()

    def _serve(self, step: str, *, settle: bool) -> None:
        self._mount.start(step)
        self.check(settle=settle)
        for _ in range(self._chance.randrange(MOST_CALLS)):
            self._workload.step()

    def check(self, *, settle: bool) -> None:
        """The mount keeps its promises. Raises Killed where the daemon was killed meanwhile."""
        mount, promises = self._mount, self._promises
        try:
            found = mount.find()
            broken = promises.broken_by(found, has_dram=self._has_dram)
            assert not broken, "\n".join([*broken, mount.logged])
            promises.go_on_with(found)
            self._has_dram = True
            assert not [name for name in found if Path(name).name.startswith(".kvfs-")]
            if settle:
                mount.check_accounts()
                promises.settled()
        except (OSError, AssertionError, TimeoutError) as error:
            if mount.was_killed():
                raise Killed from error
            raise

    def run_through(self, step: str, *, reboot: bool) -> None:
        """A round whose daemon comes to every step there is, and must be killed at this one."""
        try:
            self._mount.start(step)
            self.check(settle=True)
            self._workload.all_steps()
        except Killed:
            self._end_round(step, reboot=reboot)
        else:
            pytest.fail(f"the daemon never came to {step}")

    def end(self) -> None:
        """A last look, and everything goes."""
        self._mount.start()
        self.check(settle=True)
        self._mount.end()


@pytest.fixture
def mount(scratch: Path, request: pytest.FixtureRequest) -> Iterator[CrashingMount]:
    base = scratch / "".join(c if c.isalnum() else "-" for c in request.node.name)[:60]
    base.mkdir()
    made = CrashingMount(
        base / "mount",
        base / "ssd",
        *("--settle", "0s", "--ssd-write-delay", "0s", "--ssd-read-path", "direct"),
    )
    yield made
    made.close()
    if made.process is not None:
        made.process.wait(10)
    assert "Traceback" not in made.log_file.read_text(), made.logged
    shutil.rmtree(base)


@pytest.mark.deadline(SECONDS_A_ROUND * ROUNDS)
@pytest.mark.as_root
def test_random_kills(mount: CrashingMount) -> None:
    """Half of the rounds lose DRAM too, as a machine that goes down does."""
    chance = random.Random(SEED)
    rounds = Rounds(mount, chance)
    for number in range(ROUNDS):
        step = f"{chance.choice(EVERY_STEP)}:{int(2 ** (chance.random() * 5))}"
        reboot = chance.random() < 0.5
        print(f"round {number}: {step}{', reboot' if reboot else ''}", flush=True)
        rounds.run(step, reboot=reboot, settle=chance.random() < 0.75)
    rounds.end()
    print(dict(sorted(rounds.reached.items())), flush=True)
    assert rounds.reached.total() == ROUNDS


@pytest.mark.deadline(300)
@pytest.mark.as_root
def test_killed_at_each_step(mount: CrashingMount) -> None:
    """Each step once with DRAM kept and the next without, and the other way round."""
    rounds = Rounds(mount, random.Random(0))
    for number, step in enumerate(EVERY_STEP):
        rounds.run_through(step, reboot=number % 2 == 0)
    rounds.end()
    assert set(rounds.reached) == set(EVERY_STEP)
