"""What the default policy learns: which pages come back, and when."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from kvfs.policy import ExpectedReuse
from kvfs.policy.classes import CLASSES, USES_STEP
from kvfs.policy.ghosts import Ghost, Ghosts
from kvfs.policy.hazards import Hazards
from kvfs.simulation.baselines import Lru
from kvfs.simulation.replay import DefaultPolicy, MakeCache, replay
from kvfs.simulation.trace import Trace


def hit_rate(make: MakeCache, requests: list[list[int]], pool_blocks: int) -> float:
    return replay(Trace.of(requests), "", make, pool_blocks).hit_rate


def fit(hazards: Hazards, remembered: float = 1.0) -> None:
    for _ in hazards.fit(remembered):
        pass


# Hazards


def test_before_anything_is_known_the_older_is_worth_less() -> None:
    hazards = Hazards()
    worths = [hazards.worth(number, age) for age in range(0, 5000, 50) for number in (3, 8)]
    assert worths == sorted(worths, reverse=True)


def test_a_class_whose_pages_are_used_again_is_worth_more() -> None:
    hazards = Hazards()
    good, bad = 10, 200
    for _ in range(100):
        hazards.used(good, 100, 1.0)
        hazards.ended(bad, 10_000, 1.0)
    fit(hazards)
    for age in (0, 50, 99, 1000, 9000):
        assert hazards.worth(good, age) > 2 * hazards.worth(bad, age) > 0


def test_what_is_worth_waiting_for_is_worth_more_the_nearer_it_comes() -> None:
    """Pages that are all used at an age of 1,000: as that comes nearer, less has to be paid for it."""
    hazards = Hazards()
    for _ in range(1000):
        hazards.used(5, 1000, 1.0)
    hazards.watch((5, age, 1.0) for age in range(100, 20_000, 100))
    fit(hazards)
    assert hazards.worth(5, 1) < hazards.worth(5, 300) < hazards.worth(5, 800)
    assert hazards.worth(5, 800) > 10 * hazards.worth(5, 15_000)


def test_pages_that_are_still_there_count() -> None:
    """A use among many that have waited as long for one in vain is not a use of every page."""
    worths = []
    for waiting in (0, 1000):
        hazards = Hazards()
        for _ in range(20):
            hazards.used(7, 500, 1.0)
        hazards.watch((7, 600, 1.0) for _ in range(waiting))
        fit(hazards)
        worths.append(hazards.worth(7, 100))
    assert worths[0] > 10 * worths[1]


def test_old_evidence_fades() -> None:
    hazards = Hazards()
    for _ in range(500):
        hazards.used(1, 100, 1.0)
    fit(hazards, 0.5)
    was = hazards.worth(1, 50)
    for _ in range(20):
        for _ in range(100):
            hazards.ended(1, 5000, 1.0)
        fit(hazards, 0.5)
    assert hazards.worth(1, 50) < was / 10


def test_a_fit_of_every_class_is_made_of_short_steps() -> None:
    hazards = Hazards()
    chance = random.Random(2)
    for number in range(CLASSES):
        for _ in range(20):
            hazards.used(number, chance.randrange(1 << 20), 1.0)
    assert sum(1 for _ in hazards.fit(1.0)) > CLASSES / 32


# Ghosts


def test_a_ghost_is_given_back_once() -> None:
    ghosts = Ghosts()
    ghost = Ghost(17, 0xFFFFFFFF, 300, 255)
    assert ghosts.put(0x12345678, ghost) is None
    assert ghosts.take(0x12345679) is None
    assert ghosts.take(0x12345678) == ghost
    assert ghosts.take(0x12345678) is None


def test_in_a_full_row_the_first_ghost_makes_room() -> None:
    ghosts = Ghosts()
    rows = len(ghosts) // 8
    for number in range(8):
        assert ghosts.put(1 + number * rows, Ghost(number, 0, 1, 1)) is None
    gone = ghosts.put(1 + 8 * rows, Ghost(8, 0, 1, 1))
    assert gone is not None
    assert gone.number == 0
    assert ghosts.take(1) is None
    assert {number for number, _, _ in ghosts.sample(0, 1)} == set(range(1, 9))


@pytest.mark.parametrize("pages", [0, 10_000, 100_000, 1_000_000])
def test_there_are_two_to_four_places_for_a_page(pages: int) -> None:
    ghosts = Ghosts()
    ghosts.fit(pages)
    assert len(ghosts) == 1 << 14 or 2 * pages < len(ghosts) <= 4 * pages
    ghosts.put(99, Ghost(1, 2, 3, 4))
    ghosts.fit(pages // 2)
    assert ghosts.take(99) == Ghost(1, 2, 3, 4)


# The policy


class Page:
    def __init__(self, number: int, key: int) -> None:
        self.number = number
        self.size = 1 << 20
        self.key = key


def test_uses_are_remembered_of_what_comes_back() -> None:
    order: ExpectedReuse[Page] = ExpectedReuse(key_of=lambda page: page.key)
    page = Page(1, 5)
    order.add(page)
    order.touch(page)
    order.touch(page)
    order.remove(page, evicted=True)
    again = Page(2, 5)
    order.add(again)
    assert order.uses(again) == 4
    order.remove(again)  # removed by somebody: it is not to come back
    order.add(Page(3, 5))
    assert [order.uses(one) for one in order.victims()] == [1]


def scans_and_a_hot_set(hot: int, scan: int, rounds: int) -> Iterator[list[int]]:
    """Some blocks that are used again and again, and many that never are."""
    fresh = itertools.count(10**6)
    for _ in range(rounds):
        for block in range(hot):
            yield [block]
        for _ in range(scan):
            yield [next(fresh)]


def test_a_scan_does_not_wash_the_hot_pages_away() -> None:
    """Between two uses of a hot page more pass by than there is room for: the last use tells nothing."""
    requests = list(scans_and_a_hot_set(hot=50, scan=150, rounds=100))
    assert hit_rate(Lru, requests, 100) == 0
    most = 99 * 50 / len(requests)
    assert hit_rate(DefaultPolicy, requests, 100) > 0.7 * most


def test_a_new_page_stays_for_a_while() -> None:
    """However little those are worth that are never used again: who stores a page expects to find it."""
    order: ExpectedReuse[Page] = ExpectedReuse(key_of=lambda page: page.key)
    hot = [Page(number, number) for number in range(1, 97)]
    for page in (*hot, *hot * 200):
        (order.touch if page in order else order.add)(page)
    numbers = itertools.count(97)
    new: list[Page] = []
    for key in range(1000, 1600):
        page = Page(next(numbers), key)
        order.add(page)
        new.append(page)
        if len(order) > 128:
            order.remove(next(order.victims()), evicted=True)
        if key % 4 == 0:
            order.use_together(hot)
        assert all(page in order for page in new[-7:])
    assert all(page in order for page in hot)


def test_of_a_loop_larger_than_the_pool_a_part_stays() -> None:
    requests = [[block] for _ in range(60) for block in range(400)]
    assert hit_rate(Lru, requests, 200) == 0
    assert hit_rate(DefaultPolicy, requests, 200) > 0.4


def test_a_prompt_that_all_share_stays() -> None:
    fresh = itertools.count(100)
    shared = list(range(20))
    requests = [shared + [next(fresh) for _ in range(60)] for _ in range(300)]
    assert hit_rate(DefaultPolicy, requests, 40) == pytest.approx(299 * 20 / (300 * 80))


def test_what_is_popular_stays() -> None:
    """Independent choices, of which a few are made often: the best is to keep what was used most."""
    chance = random.Random(7)
    weights = [1 / (rank + 1) for rank in range(2000)]
    requests = [[block] for block in chance.choices(range(2000), weights, k=40_000)]
    assert hit_rate(DefaultPolicy, requests, 200) > hit_rate(Lru, requests, 200) + 0.03


def test_steps_of_uses() -> None:
    assert list(USES_STEP[:9]) == [0, 1, 2, 3, 4, 4, 4, 4, 5]
    assert list(USES_STEP[15:18]) == [5, 6, 6]
    assert USES_STEP[127] == 6
