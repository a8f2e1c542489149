from __future__ import annotations

import pytest

from kvfs.errors import TierFailed
from kvfs.tiers.ssd_health import Health
from kvfs.tiers.ssd_uses import Uses


def test_a_tier_that_works_may_always_be_asked() -> None:
    health = Health("SSD tier")
    assert not health.is_failed
    assert all(health.may_try(float(now)) for now in range(10))
    assert not health.succeeded()
    assert health.statistics().failed_since is None


def test_a_failed_tier_is_tried_again_with_growing_pauses() -> None:
    health = Health("SSD tier", first_pause=1.0, last_pause=8.0)
    assert health.failed("no answer within 10 s", 100.0)
    tries = []
    now = 100.0
    while now < 140.0:
        if health.may_try(now):
            tries.append(now)
            assert not health.failed("no answer within 10 s", now)
        now += 0.25
    assert tries == [101.0, 103.0, 107.0, 115.0, 123.0, 131.0, 139.0]
    assert health.statistics().failed_since == 100.0
    assert health.statistics().failures == 8


def test_one_at_a_time_may_try() -> None:
    health = Health("SSD tier")
    health.failed("EIO", 0.0)
    assert [health.may_try(1.5) for _ in range(3)] == [True, False, False]
    assert health.may_try(2.5)  # who tried first never said how it went


def test_what_was_under_way_does_not_lengthen_the_pause() -> None:
    health = Health("SSD tier")
    assert health.failed("EIO", 0.0)
    for _ in range(50):
        assert not health.failed("EIO", 0.1)
    assert health.may_try(1.0)


def test_success_ends_the_failure() -> None:
    health = Health("SSD tier")
    for now in (0.0, 1.0, 3.0):
        health.may_try(now)
        health.failed("EIO", now)
    assert health.succeeded()
    assert health.may_try(3.1)
    assert health.statistics().reason == ""
    assert health.failed("EIO", 50.0)
    assert health.may_try(51.0)


def test_what_is_refused_says_why_and_since_when() -> None:
    health = Health("SSD tier")
    health.require(0.0)
    health.failed("Input/output error", 10.0)
    with pytest.raises(TierFailed, match=r"^the SSD tier failed 500 ms ago.*Input/output error$"):
        health.require(10.5)


def test_uses_are_taken_in_batches_the_latest_first() -> None:
    uses: Uses[str] = Uses(interval=30, batch=2, limit=10)
    for number, key in enumerate("abcab"):
        uses.note(key, number)
    assert uses.take(0.0) == [("b", 4), ("a", 3)]
    assert uses.take(29.0) == []
    assert len(uses) == 1
    assert uses.take(30.0) == [("c", 2)]
    assert uses.take(90.0) == []


def test_uses_beyond_the_limit_are_those_of_long_ago() -> None:
    uses: Uses[int] = Uses(limit=100)
    for key in range(1000):
        uses.note(key, key)
    assert len(uses) == 100
    uses.forget(999)
    uses.forget(12345)
    assert [key for key, _ in uses.take_all()] == list(range(998, 899, -1))
    assert len(uses) == 0
