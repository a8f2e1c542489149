"""When pages expire, by their numbers; and the text in which a lifetime is kept."""

from __future__ import annotations

import random

import pytest

from kvfs.page import Lifetime
from kvfs.policy import Expiry


def test_pages_are_due_at_their_second_the_earliest_first() -> None:
    expiry = Expiry()
    for number, second in ((5, 300), (70, 100), (6, 200)):
        expiry.set(number, second)
    assert len(expiry) == 3
    assert expiry.next_second() == 100
    assert expiry.take_due(99.9, 10) == []
    assert expiry.take_due(250, 1) == [70]
    assert expiry.take_due(250, 10) == [6]
    assert expiry.take_due(250, 10) == []
    assert sorted(expiry.overdue(250)) == [6, 70], "they were not discarded"
    expiry.discard(6)
    expiry.discard(6)
    assert list(expiry.overdue(250)) == [70]
    expiry.set(70, 100)
    assert expiry.take_due(250, 10) == [70], "told once more"
    assert (len(expiry), expiry.get(5), expiry.get(6), expiry.get(9999)) == (2, 300, 0, 0)


def test_what_was_said_last_counts() -> None:
    expiry = Expiry()
    expiry.set(1, 100)
    expiry.set(1, 200)
    assert expiry.take_due(150, 10) == []
    assert expiry.take_due(200, 10) == [1]
    expiry.set(2, 100)
    expiry.discard(2)
    assert expiry.take_due(1000, 10) == []
    expiry.set(3, -5)
    assert expiry.take_due(1, 10) == [3]
    expiry.set(4, 1 << 40)
    assert expiry.get(4) == 0xFFFFFFFF


def test_it_is_as_a_dictionary_would_have_it() -> None:
    chance = random.Random(3)
    expiry, expected = Expiry(), dict[int, int]()
    now = 1000
    for _ in range(20_000):
        number = chance.randrange(1, 200)
        if chance.random() < 0.7:
            expected[number] = now + chance.randrange(50)
            expiry.set(number, expected[number])
        elif chance.random() < 0.5:
            expected.pop(number, None)
            expiry.discard(number)
        else:
            now += chance.randrange(5)
            due = expiry.take_due(now, 1000)
            assert set(due) == {number for number, second in expected.items() if second <= now}
            for number in due:
                expected.pop(number, None)
                expiry.discard(number)
        assert len(expiry) == len(expected)


def test_pages_that_come_and_go_cost_nothing() -> None:
    expiry = Expiry()
    for turn in range(50_000):
        expiry.set(turn % 10 + 1, 1_000_000 + turn)
    assert expiry._queued <= 2 * 10 + 1024 + 1
    assert sum(map(len, expiry._queues.values())) == expiry._queued
    assert len(expiry._seconds) == len(expiry._queues)


@pytest.mark.parametrize(
    ("lifetime", "text"),
    [
        (Lifetime(3600), "3600 0"),
        (Lifetime(0.25, 7), "0.25 7"),
        (Lifetime(3_153_600_000.0, 1_764_547_200_000_000_001), "3153600000 1764547200000000001"),
    ],
)
def test_a_lifetime_is_a_text(lifetime: Lifetime, text: str) -> None:
    assert lifetime.format() == str(lifetime) == text
    assert Lifetime.parse(text.encode()) == lifetime


@pytest.mark.parametrize(
    "text", ["", "3600", "0 0", "-1 0", "1e3 0", "1 01", "1 0 ", "1.0001 0", "\udcff 0", b"\xff"]
)
def test_any_other_text_is_none(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"lifetime|decode"):
        Lifetime.parse(text)
