"""Which boundaries are legal, told twice: as kvfs does it, and by trying everything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.engine_shims.recovery import (
    Group,
    Restoration,
    checkpoint,
    common_boundaries,
    full_attention,
    legal_boundaries,
    restoration,
    sliding_window,
)


def tokens(group: Group, pages: range) -> tuple[int, int]:
    return pages.start * group.page_tokens, pages.stop * group.page_tokens


@pytest.mark.parametrize(
    ("group", "needed"),
    [
        (full_attention(64), (128, 512)),
        (sliding_window(64, 100), (384, 512)),
        (sliding_window(64, 128), (384, 512)),
        (sliding_window(64, 129), (320, 512)),
        (sliding_window(64, 100_000), (128, 512)),
        (checkpoint(64), (448, 512)),
    ],
)
def test_what_is_needed_of_512_tokens_after_128(group: Group, needed: tuple[int, int]) -> None:
    assert tokens(group, group.pages_needed(128, 512)) == needed


def test_a_window_of_one_token_needs_nothing_before() -> None:
    group = sliding_window(16, 0)
    assert not group.pages_needed(0, 64)
    assert group.boundaries([False, False]) == {0, 16, 32}


def test_full_attention_ends_at_the_first_gap() -> None:
    assert full_attention(16).boundaries([True, True, False, True]) == {0, 16, 32}


def test_a_window_begins_again_behind_a_gap() -> None:
    assert sliding_window(16, 20).boundaries([True, False, True, True, True]) == {0, 16, 64, 80}


def test_a_checkpoint_is_worth_something_at_its_place_only() -> None:
    assert checkpoint(16).boundaries([False, True, False, True]) == {0, 32, 64}


def test_what_the_engine_has_is_not_asked_for() -> None:
    present = [False, False, True, True]
    assert full_attention(16).boundaries(present, 32) == {32, 48, 64}
    assert full_attention(16).boundaries(present, 31) == {31}


def test_all_groups_and_all_ranks_agree() -> None:
    groups = [full_attention(16), sliding_window(16, 30), checkpoint(32)]
    present = [[True] * 6, [True, False, True, True, True, True], [True, True, False]]
    first = legal_boundaries(groups, present)
    assert first == {0, 64}
    assert common_boundaries([first, {0, 32}]) == {0}
    assert restoration(groups, first, 0, 95) == Restoration(64, (range(4), range(2, 4), range(1, 2)))
    assert restoration(groups, first, 0, 63) == Restoration(0, (range(0), range(0), range(0)))


def test_a_model_without_state() -> None:
    assert legal_boundaries([], [], 7) == {7}


def test_one_list_of_pages_for_each_group() -> None:
    with pytest.raises(ValueError, match="zip"):
        legal_boundaries([full_attention(16)], [])


@pytest.mark.parametrize("arguments", [(0, None), (-1, 5), (16, -1)])
def test_impossible_groups(arguments: tuple[int, int | None]) -> None:
    with pytest.raises(ValueError, match="tokens"):
        Group(*arguments)


def test_boundaries_are_ends_of_pages() -> None:
    with pytest.raises(ValueError, match="whole number of pages"):
        full_attention(16).pages_needed(0, 40)


GROUPS = st.one_of(
    st.builds(full_attention, st.sampled_from([1, 2, 3, 4])),
    st.builds(sliding_window, st.sampled_from([1, 2, 3, 4]), st.integers(0, 9)),
    st.builds(checkpoint, st.sampled_from([1, 2, 3, 4])),
)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[Group], list[list[bool]], int]:
    length = draw(st.integers(0, 24))
    groups = draw(st.lists(GROUPS, min_size=1, max_size=4))
    present = [
        draw(st.lists(st.booleans(), min_size=count, max_size=count))
        for count in (length // group.page_tokens for group in groups)
    ]
    return groups, present, draw(st.integers(0, length))


def can_go_on(group: Group, present: list[bool], start: int, boundary: int) -> bool:
    """Token by token: is everything at hand that the token after ``boundary`` needs?"""
    size = group.page_tokens
    if boundary % size or boundary > len(present) * size:
        return False
    reach = boundary if group.tokens_needed is None else min(group.tokens_needed, boundary)
    return all(
        present[token // size]
        for token in range(boundary - reach, boundary)
        if (token // size + 1) * size > start
    )


@given(layouts())
def test_every_boundary_and_no_other(layout: tuple[list[Group], list[list[bool]], int]) -> None:
    groups, present, start = layout
    expected = {start} | {
        boundary
        for boundary in range(start + 1, 25)
        if all(can_go_on(group, pages, start, boundary) for group, pages in zip(groups, present, strict=True))
    }
    found = legal_boundaries(groups, present, start)
    assert found == expected
    chosen = restoration(groups, found, start, 23)
    assert chosen.boundary == max(one for one in expected if one <= 23)
    for group, pages, needed in zip(groups, present, chosen.pages, strict=True):
        assert all(pages[page] for page in needed)
        if chosen.boundary > start:
            last = chosen.boundary // group.page_tokens
            for page in needed:  # none of them can be left out
                without = [there and number != page for number, there in enumerate(pages[:last])]
                assert not can_go_on(group, without, start, chosen.boundary)
