from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.policy import SMALL, Entry, LeastRecentlyUsed


class Page:
    __slots__ = ("colder", "hotter", "name", "size")

    def __init__(self, name: str, size: int = SMALL) -> None:
        self.name = name
        self.size = size
        self.colder: Entry | None = None
        self.hotter: Entry | None = None

    def __repr__(self) -> str:
        return self.name


def order_of(*pages: Page) -> LeastRecentlyUsed[Page]:
    order = LeastRecentlyUsed[Page]()
    for page in pages:
        order.add(page)
    return order


def names(order: LeastRecentlyUsed[Page]) -> str:
    return "".join(page.name for page in order.victims())


def test_the_coldest_leaves_first() -> None:
    a, b, c = (Page(name) for name in "abc")
    order = order_of(a, b, c)
    assert names(order) == "abc"
    order.touch(a)
    assert names(order) == "bca"
    order.remove(c)
    assert names(order) == "ba"
    assert len(order) == 2
    assert c not in order
    assert a in order


def test_small_files_leave_after_all_others() -> None:
    order = order_of(Page("s", SMALL - 1), Page("a"), Page("t", 1), Page("b"))
    assert names(order) == "abst"


def test_a_file_that_grew_moves_to_the_large_ones_when_it_is_used() -> None:
    draft = Page("d", 0)
    order = order_of(draft, Page("a"))
    assert names(order) == "ad"
    draft.size = SMALL
    assert names(order) == "ad"
    order.touch(draft)
    order.add(Page("b"))
    assert names(order) == "adb"
    order.remove(draft)
    assert names(order) == "ab"


def test_an_empty_order_has_no_victims() -> None:
    order = order_of()
    assert list(order.victims()) == []
    assert len(order) == 0


def test_the_caller_may_remove_what_it_is_given() -> None:
    pages = [Page(name) for name in "abcdef"]
    order = order_of(*pages)
    given_out = []
    for page in order.victims():
        given_out.append(page.name)
        order.remove(page)
    assert given_out == list("abcdef")
    assert len(order) == 0


def test_the_caller_may_touch_what_it_is_given_without_going_round_for_ever() -> None:
    order = order_of(*(Page(name) for name in "abc"))
    given_out = []
    for page in order.victims():
        given_out.append(page.name)
        order.touch(page)
    assert given_out == list("abc")
    assert names(order) == "abc"


def test_what_another_task_removes_or_touches_meanwhile_is_not_given() -> None:
    a, b, c, d = (Page(name) for name in "abcd")
    order = order_of(a, b, c, d)
    walk = order.victims()
    assert next(walk) is a
    order.remove(b)
    order.touch(c)
    order.add(Page("new"))
    assert list(walk) == [d]
    assert names(order) == "adcnew"


def test_two_iterations_at_once_do_not_meet() -> None:
    order = order_of(*(Page(name) for name in "abc"))
    first, second = order.victims(), order.victims()
    assert [next(first).name, next(second).name, next(first).name] == ["a", "a", "b"]
    assert [page.name for page in second] == ["b", "c"]
    assert [page.name for page in first] == ["c"]
    assert names(order) == "abc"


def test_an_abandoned_iteration_leaves_no_trace() -> None:
    order = order_of(Page("a"), Page("b"))
    walk = order.victims()
    next(walk)
    walk.close()  # type: ignore[attr-defined]
    assert names(order) == "ab"
    for page in list(order.victims()):
        order.remove(page)
    assert list(order.victims()) == []


def test_wrong_use_is_refused() -> None:
    page = Page("a")
    order = order_of(page)
    with pytest.raises(ValueError, match="already"):
        order.add(page)
    order.remove(page)
    with pytest.raises(ValueError, match="not in the order"):
        order.touch(page)
    with pytest.raises(ValueError, match="not in the order"):
        order.remove(page)


def test_the_order_costs_an_entry_two_pointers() -> None:
    class Bare:
        __slots__ = ("name", "size")

    page = Page("a")
    order_of(page)
    assert sys.getsizeof(page) - sys.getsizeof(Bare()) == 16


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "touch", "remove"]), st.integers(0, 7), st.sampled_from([1, SMALL]))
    )
)
def test_it_agrees_with_a_list(operations: list[tuple[str, int, int]]) -> None:
    pages = [Page(str(number)) for number in range(8)]
    order = order_of()
    model: list[Page] = []
    for operation, number, size in operations:
        page = pages[number]
        if operation == "add" and page not in model:
            page.size = size
            order.add(page)
            model.append(page)
        elif operation == "touch" and page in model:
            page.size = size
            order.touch(page)
            model.remove(page)
            model.append(page)
        elif operation == "remove" and page in model:
            order.remove(page)
            model.remove(page)
        expected = sorted(model, key=lambda page: page.size < SMALL)
        assert list(order.victims()) == expected
        assert len(order) == len(model)
