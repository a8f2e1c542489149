from __future__ import annotations

import logging

import pytest

from kvfs import counters
from kvfs.counters import Counters, LimitedLog
from tests.conftest import LogGuard


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(counters, "time", clock)
    return clock


def limited(interval: float = 1.0) -> LimitedLog:
    return LimitedLog(logging.getLogger("kvfs.test"), interval)


def test_the_first_of_a_kind_is_logged_at_once(
    caplog: pytest.LogCaptureFixture, expect_log: LogGuard
) -> None:
    expect_log("the disk is full")
    limited().warning("full", "the disk is full")
    assert caplog.messages == ["the disk is full"]


def test_ten_thousand_in_a_second_are_one_line_and_a_count(
    caplog: pytest.LogCaptureFixture, expect_log: LogGuard, clock: Clock
) -> None:
    expect_log("the disk is full")
    log = limited()
    for _ in range(10_000):
        log.warning("full", "the disk is full")
        clock.now += 0.00005
    assert caplog.messages == ["the disk is full"]
    clock.now += 1.0
    log.warning("full", "the disk is full")
    assert caplog.messages == ["the disk is full", "the disk is full (and 9999 more like it)"]
    clock.now += 1.0
    log.warning("full", "the disk is full")
    assert caplog.messages[2:] == ["the disk is full"], "what was counted once is not counted again"


def test_kinds_do_not_hold_each_other_up(
    caplog: pytest.LogCaptureFixture, expect_log: LogGuard, clock: Clock
) -> None:
    expect_log("the disk is full")
    expect_log("something else")
    log = limited()
    for _ in range(3):
        log.warning("full", "the disk is full")
        log.warning("else", "something else")
    assert caplog.messages == ["the disk is full", "something else"]


def test_the_interval_is_counted_from_the_last_line(
    caplog: pytest.LogCaptureFixture, expect_log: LogGuard, clock: Clock
) -> None:
    expect_log("the disk is full")
    log = limited(interval=10.0)
    log.warning("full", "the disk is full")
    for _ in range(9):
        clock.now += 1.0
        log.warning("full", "the disk is full")
    clock.now += 1.0
    log.warning("full", "the disk is full")
    assert caplog.messages == ["the disk is full", "the disk is full (and 9 more like it)"]


def test_a_clock_that_began_at_zero_does_not_swallow_the_first_line(
    caplog: pytest.LogCaptureFixture, expect_log: LogGuard, clock: Clock
) -> None:
    expect_log("the disk is full")
    clock.now = 0.0
    limited().warning("full", "the disk is full")
    assert len(caplog.messages) == 1


def test_a_message_with_a_percent_sign_is_not_a_format(
    caplog: pytest.LogCaptureFixture, expect_log: LogGuard
) -> None:
    expect_log("100%s")
    limited().warning("full", "100%s and %d")
    assert caplog.messages == ["100%s and %d"]


def test_counters_of_two_pools_are_apart() -> None:
    one, other = Counters(), Counters()
    one.misses["evicted"] += 1
    one.failures["holes"] += 2
    assert other.misses == {}
    assert other.failures == {}
    assert one.misses["never seen"] == 0


def test_a_bug_is_logged_with_its_trace(caplog: pytest.LogCaptureFixture, expect_log: LogGuard) -> None:
    expect_log("it could not be done")
    log = limited()
    for _ in range(3):
        log.warning("bug", "it could not be done", ValueError("why"))
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[0] is ValueError
