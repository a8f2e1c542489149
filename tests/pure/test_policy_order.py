"""In which order the default policy lets pages go."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import pytest

from kvfs.policy import SMALL, ExpectedReuse

PAGE = 1 << 20
_numbers = itertools.count(1)


class Page:
    __slots__ = ("name", "number", "size")

    def __init__(self, name: str, size: int = PAGE) -> None:
        self.name = name
        self.number = next(_numbers)
        self.size = size

    def __repr__(self) -> str:
        return self.name


@pytest.fixture(autouse=True)
def _small_numbers() -> None:
    """Each test begins to number its pages anew."""
    global _numbers
    _numbers = itertools.count(1)


def pages(names: str, size: int = PAGE) -> list[Page]:
    return [Page(name, size) for name in names]


def order_of(some: Iterable[Page]) -> ExpectedReuse[Page]:
    order: ExpectedReuse[Page] = ExpectedReuse()
    for page in some:
        order.add(page)
    return order


def names(victims: Iterable[Page]) -> str:
    return "".join(page.name for page in victims)


def emptied(order: ExpectedReuse[Page]) -> Iterator[Page]:
    """The pages as they leave."""
    for page in order.victims():
        order.remove(page, evicted=True)
        yield page


# Alone


def test_pages_that_nothing_tells_apart_leave_in_the_order_of_their_use() -> None:
    order = order_of(pages("abcd"))
    assert names(order.victims()) == "abcd"
    assert names(emptied(order)) == "abcd"
    assert len(order) == 0


def test_what_is_used_leaves_later() -> None:
    a, b, c = some = pages("abc")
    order = order_of(some)
    order.touch(a)
    assert names(order.victims()) == "bca"
    assert [order.uses(page) for page in (a, b, c)] == [2, 1, 1]


def test_small_pages_leave_after_all_others() -> None:
    order = order_of([*pages("ab", SMALL - 1), *pages("cd", SMALL)])
    assert names(order.victims()) == "cdab"
    assert names(emptied(order)) == "cdab"


def test_looking_changes_nothing() -> None:
    order = order_of(pages("abcdef"))
    order.use(pages("ghij"))
    first = names(order.victims())
    assert names(order.victims()) == first
    look = order.victims()
    next(look)
    del look
    assert names(order.victims()) == first


def test_wrong_use_is_refused() -> None:
    a, b = pages("ab")
    order = order_of([a])
    with pytest.raises(ValueError, match="in the order already"):
        order.add(a)
    with pytest.raises(ValueError, match="in the order already"):
        order.restore([(a, 0)])
    for call in (order.touch, order.remove, order.uses, order.pin, order.unpin):
        with pytest.raises(ValueError, match="not in the order"):
            call(b)
    stranger = Page("s")
    stranger.number = a.number
    assert stranger not in order
    with pytest.raises(ValueError, match="of its number"):
        order.add(stranger)


# Chains


def test_a_chain_leaves_from_its_end() -> None:
    order: ExpectedReuse[Page] = ExpectedReuse()
    order.use(pages("abcdef"))
    assert names(order.victims()) == "fedcba"
    assert names(emptied(order)) == "fedcba"


def test_what_two_chains_share_leaves_after_both() -> None:
    a, b, c, d, e, f = pages("abcdef")
    order: ExpectedReuse[Page] = ExpectedReuse()
    order.use([a, b, c, d])
    order.use([a, b, e, f])
    left = names(emptied(order))
    assert left.endswith("ba")
    assert left.index("d") < left.index("c")
    assert left.index("f") < left.index("e")


def test_a_chain_that_comes_page_by_page_is_one() -> None:
    order: ExpectedReuse[Page] = ExpectedReuse()
    before = None
    for page in pages("abcdef"):
        order.add(page, after=before)
        before = page
    assert names(emptied(order)) == "fedcba"


def test_the_head_stays_while_the_tail_is_in_use() -> None:
    order: ExpectedReuse[Page] = ExpectedReuse()
    chain = pages("abc")
    order.use(chain)
    order.add(Page("x"))
    given = []
    for page in order.victims():
        given.append(page)
        if page is not chain[-1]:
            order.remove(page)
    assert names(given) == "cxba"  # the head goes when there is nothing else


def test_pages_that_come_together_leave_the_last_first() -> None:
    order: ExpectedReuse[Page] = ExpectedReuse()
    order.use_together(pages("abc"))
    order.use_together(pages("de"))
    assert names(emptied(order)) == "cbaed"


def test_a_chain_cannot_close_to_a_ring() -> None:
    a, b, c = chain = pages("abc")
    order: ExpectedReuse[Page] = ExpectedReuse()
    order.use(chain)
    order.use([c, b, a])
    order.use([b, b, c, b])
    assert sorted(names(emptied(order))) == ["a", "b", "c"]


# Groups


def test_a_group_leaves_together() -> None:
    a, b = pages("ab")
    order = order_of([a, b])
    for member in pages("123"):
        order.attach(member, a)
    order.touch(a)
    assert sorted(names(order.victims())[1:4]) == ["1", "2", "3"]
    assert names(order.victims())[0] == "b"
    left = names(emptied(order))
    assert left[0] == "b"
    assert sorted(left[1:4]) == ["1", "2", "3"]
    assert left[4] == "a"


def test_what_is_attached_to_a_member_is_of_the_same_group() -> None:
    a, b, c = pages("abc")
    order = order_of([a])
    order.attach(b, a)
    order.attach(c, b)
    order.remove(b)
    assert sorted(names(order.victims())) == ["a", "c"]
    order.remove(a)
    assert names(order.victims()) == "c"


def test_who_has_lost_their_leader_are_the_next_to_leave() -> None:
    a, b, c = pages("abc")
    order = order_of([a, b])
    order.attach(c, b)
    order.remove(b)
    assert names(order.victims()) == "ca"


def test_a_group_with_a_pinned_member_stays() -> None:
    a, b, c = pages("abc")
    order: ExpectedReuse[Page] = ExpectedReuse()
    order.add(a)
    order.add(b)
    order.attach(c, a)
    order.pin(c)
    assert names(order.victims()) == "b"
    order.unpin(c)
    assert names(order.victims()) == "cab"


# Bounds


def test_protected_pages_leave_first_where_they_hold_too_much() -> None:
    order: ExpectedReuse[Page] = ExpectedReuse()
    for page in pages("xyz"):
        order.add(page)
    for page in pages("abc"):
        order.add(page)
        order.touch(page)
    assert order.statistics().protected_bytes == 3 * PAGE
    assert names(order.victims()) == "xyzabc"
    order.protected_percent = 40  # two of five may stay
    assert names(emptied(order)) == "axbycz"
    assert order.statistics().protected_bytes == 0


def test_pinned_pages_stay() -> None:
    a, b, _ = some = pages("abc")
    order = order_of(some)
    order.pin(a)
    order.pin(a)
    order.pin(b)
    assert names(order.victims()) == "c"
    order.touch(a)
    assert names(order.victims()) == "c"
    order.remove(b)
    order.unpin(a)
    assert names(order.victims()) == "ca"
    order.add(b)
    assert names(order.victims()) == "cab", "what comes back is not pinned"


def test_the_head_of_a_pinned_tail_leaves_last() -> None:
    a, b, x = pages("abx")
    order: ExpectedReuse[Page] = ExpectedReuse()
    order.use([a, b])
    order.pin(b)
    order.add(x)
    assert names(order.victims()) == "xa"


def test_an_unpinned_page_is_where_its_age_belongs() -> None:
    some = pages("abcdefgh")
    order: ExpectedReuse[Page] = ExpectedReuse()
    for page in some:
        order.add(page)
    for page in some:
        order.pin(page)
        order.unpin(page)
    order.pin(some[3])
    order.pin(some[5])
    order.unpin(some[5])
    order.unpin(some[3])
    assert names(order.victims()) == "abcdefgh"


# While somebody looks


def test_what_is_used_after_the_start_is_not_given() -> None:
    a, b, c, _ = some = pages("abcd")
    order = order_of(some)
    look = order.victims()
    assert next(look) is a
    order.touch(b)
    order.remove(c)
    order.add(Page("e"))
    assert names(look) == "d"
    assert names(order.victims()) == "adbe"


def test_what_is_given_may_be_touched_without_going_round_for_ever() -> None:
    order = order_of(pages("abc"))
    given = []
    for page in order.victims():
        given.append(page)
        order.touch(page)
    assert names(given) == "abc"


def test_two_looks_at_once_do_not_give_the_same_page() -> None:
    order = order_of(pages("abcd"))
    one, other = order.victims(), order.victims()
    given = [next(one), next(one), next(other), *one, *other]
    assert len(given) >= 4
    del one, other
    assert names(order.victims()) == "abcd"


# What an earlier daemon had


def test_restored_pages_are_colder_than_what_is_here() -> None:
    order = order_of(pages("x"))
    a, b, c = pages("abc")
    order.restore([(a, 0), (b, 0), (c, 0)])
    assert names(order.victims()) == "abcx"
    order.touch(a)
    assert names(order.victims()) == "bcxa"


def test_hits_of_restored_pages_count() -> None:
    a, b = pages("ab")
    order: ExpectedReuse[Page] = ExpectedReuse()
    order.restore([(a, 0), (b, 1000)])
    assert [order.uses(page) for page in (a, b)] == [1, 127]
    assert order.statistics().protected_bytes == PAGE
