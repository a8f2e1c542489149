"""Which pages wait for the SSD, which are left out, and when each is to be written."""

from __future__ import annotations

import random
import stat

import pytest

from kvfs.index import SEALED, Entry, Index
from kvfs.page import Owner
from kvfs.policy.admission import PLACES, Admission, History
from kvfs.storage.unstored import COLD, NOT_REUSED, NOT_STORABLE, Unstored

OWNER = Owner(stat.S_IFREG | 0o600, 0, 0)


class Pages:
    """Makes pages."""

    def __init__(self) -> None:
        self._index = Index(Owner(stat.S_IFDIR | 0o700, 0, 0))

    def page(self, size: int = 100) -> Entry:
        entry = self._index.add(self._index.root, b"%d" % len(self._index), OWNER, SEALED)
        entry.size = size
        return entry


@pytest.fixture
def pages() -> Pages:
    return Pages()


def test_a_page_settles_waits_and_is_gone(pages: Pages) -> None:
    unstored, page = Unstored(1.0, 30.0), pages.page()
    unstored.sealed(page, 5.0)
    assert unstored.is_settling(page)
    assert unstored.next_settled() == 6.0
    assert page not in unstored
    assert (len(unstored), unstored.waiting_bytes, unstored.total_bytes) == (1, 100, 100)
    assert unstored.settled(5.9) == []
    assert unstored.oldest(5.75) == 0.75
    assert unstored.settled(6.0) == [(page, 5.0)]
    unstored.want(page, 5.0)
    assert page in unstored
    assert (len(unstored), unstored.waiting_bytes, unstored.total_bytes) == (1, 100, 100)
    assert unstored.settled(100.0) == []
    unstored.forget(page)
    unstored.forget(page)
    assert (len(unstored), unstored.waiting_bytes, unstored.total_bytes) == (0, 0, 0)
    assert unstored.state(page) is None
    assert unstored.oldest(100.0) == 0.0


def test_what_is_left_out_is_counted_by_reason_and_does_not_wait(pages: Pages) -> None:
    unstored = Unstored(1.0, 30.0)
    one, other, third = pages.page(1), pages.page(10), pages.page(100)
    unstored.leave_out(one, NOT_STORABLE)
    unstored.leave_out(other, COLD)
    unstored.leave_out(third, COLD)
    assert len(unstored) == 0
    assert unstored.left_out() == {
        COLD: {"pages": 2, "bytes": 110},
        NOT_STORABLE: {"pages": 1, "bytes": 1},
    }
    assert unstored.left_out_as(COLD) == {other, third}
    unstored.want(third, 0.0)
    assert unstored.left_out()[COLD] == {"pages": 1, "bytes": 10}
    assert not unstored.is_left_out(third, COLD)
    assert unstored.is_left_out(other, COLD)


def test_one_that_was_refused_comes_last(pages: Pages) -> None:
    unstored = Unstored(0.0, 0.0)
    one, other = pages.page(), pages.page()
    for page in (one, other):
        unstored.want(page, 0.0)
    state = unstored.state(one)
    assert unstored.first(()) is one
    unstored.postpone(one)
    assert unstored.first(()) is other
    assert unstored.first((other,)) is one
    assert unstored.waiting() == [other, one]
    assert unstored.state(one) == state, "it is the same page as before"
    unstored.sealed(one, 1.0)
    assert unstored.state(one) != state


@pytest.mark.parametrize(
    ("settle", "delay", "waiting", "due"),
    [
        (1.0, 0.0, 0, 1.0),  # as soon as it has settled
        (1.0, 30.0, 0, 29.0),  # as late as may be
        (1.0, 30.0, 1000, 9.0),  # all that wait take 10 s at 100 bytes a second
        (1.0, 30.0, 10_000, 1.0),  # more than there is time for: at once
        (40.0, 30.0, 0, 40.0),  # never before it has settled
    ],
)
def test_when_writing_begins(pages: Pages, settle: float, delay: float, waiting: int, due: float) -> None:
    unstored = Unstored(settle, delay)
    page = pages.page(0)
    unstored.want(page, 0.0)
    unstored.want(pages.page(waiting), 0.5)
    assert unstored.due(page, 100.0) == due


def test_sums_are_right_whatever_happens(pages: Pages) -> None:
    chance = random.Random(5)
    unstored = Unstored(1.0, 30.0)
    all_pages = [pages.page(chance.randrange(1000)) for _ in range(50)]
    expected: dict[Entry, str] = {}
    for _ in range(3000):
        page = chance.choice(all_pages)
        what = chance.choice(["settling", "", NOT_REUSED, COLD, "forget"])
        if what == "settling":
            unstored.sealed(page, 0.0)
        elif what == "":
            unstored.want(page, 0.0)
        elif what == "forget":
            unstored.forget(page)
        else:
            unstored.leave_out(page, what)
        if what == "forget":
            expected.pop(page, None)
        else:
            expected[page] = what
        assert unstored.total_bytes == sum(page.size for page in expected)
        waiting = [page.size for page, where in expected.items() if where in ("", "settling")]
        assert (len(unstored), unstored.waiting_bytes) == (len(waiting), sum(waiting))
        for reason, found in unstored.left_out().items():
            those = [page.size for page, where in expected.items() if where == reason]
            assert found == {"pages": len(those), "bytes": sum(those)}


# What is admitted


def test_all_admits_all_and_remembers_nothing() -> None:
    admission = Admission("all")
    assert admission.admits(iter(()), 0)
    assert admission.admits([1 << 40], 0)


def test_reuse_admits_what_was_touched_twice() -> None:
    admission = Admission("reuse")
    name, content, other = 3 << 40, 5 << 40, 7 << 40
    assert not admission.admits([name, content], 0)
    assert admission.admits([other, content], 0), "the same bytes under another name"
    assert admission.admits([name, 9 << 40], 0), "other bytes under the same name"
    assert not admission.admits([11 << 40, 13 << 40], 0)
    assert admission.admits([15 << 40, 17 << 40], 1), "it was read meanwhile"


def test_the_history_is_bounded_and_forgets_the_oldest() -> None:
    chance = random.Random(7)
    history = History(1024)
    keys = [chance.randrange(1 << 64) for _ in range(3000)]
    assert sum(history.note(key) for key in keys) <= 2
    recent = sum(history.note(key) for key in keys[-200:])
    assert recent > 190
    long_ago = History(1024)
    for key in keys:
        long_ago.note(key)
    assert sum(long_ago.note(key) for key in keys[:200]) < 10
    assert Admission("reuse")._history._keys.itemsize * PLACES == 1 << 20
