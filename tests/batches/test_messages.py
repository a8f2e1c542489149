"""Messages without a socket."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.errors import UsageError
from kvfs.service import messages
from kvfs.service.messages import (
    LARGEST_MESSAGE,
    LONGEST_KEY,
    MOST_DESCRIPTORS,
    Codes,
    Commit,
    Exists,
    Hello,
    Open,
    PageStatus,
    Stats,
    decode_answer,
    decode_request,
    encode,
    split_keys,
    split_sizes,
)

NUMBERS = st.integers(1, (1 << 63) - 1)
KEYS = st.lists(st.binary(min_size=1, max_size=LONGEST_KEY), max_size=60)


@given(NUMBERS, KEYS, st.floats(0, 30))
def test_a_request_is_read_as_it_was_written(number: int, keys: list[bytes], seconds: float) -> None:
    for request in (Exists(number, keys), Open(number, keys, seconds), Hello(number)):
        assert decode_request(encode(request)) == request


@given(NUMBERS, st.lists(st.integers(0, 133)))
def test_an_answer_is_read_as_it_was_written(number: int, codes: list[int]) -> None:
    assert decode_answer(encode(Codes(number, codes))) == (number, Codes(number, codes))
    page = PageStatus(1, "xxh3-128:0:1", "dram", 0, True)
    stats = Stats(number, [0, 2], [page, None])
    assert decode_answer(encode(stats)) == (number, stats)


@given(st.binary(max_size=200))
def test_what_is_no_message_is_a_usage_error(packet: bytes) -> None:
    for decode in (decode_request, decode_answer):
        with suppress(UsageError):
            decode(packet)


@given(
    st.recursive(st.none() | st.integers() | st.binary() | st.text() | st.floats(), st.lists, max_leaves=8)
)
def test_any_value_in_msgpack_is_a_message_or_a_usage_error(value: object) -> None:
    try:
        packet = msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError):
        return
    for decode in (decode_request, decode_answer):
        with suppress(UsageError):
            decode(packet)


def test_a_field_that_a_later_version_adds_is_passed_over() -> None:
    packet = msgspec.msgpack.encode([1, 7, [b"key"], "of a later version"])
    assert decode_request(packet) == Exists(7, [b"key"])


@given(KEYS, st.integers(1, 40))
def test_keys_are_split_into_runs_that_fit(keys: list[bytes], most: int) -> None:
    largest = (1 << 63) - 1
    runs = list(split_keys(keys, most, beside=1))
    assert [key for run in runs for key in keys[run]] == keys
    for run in runs:
        part = keys[run]
        assert 1 <= len(part) <= most
        assert len(encode(Commit(largest, [largest] * len(part), part))) <= LARGEST_MESSAGE


def test_runs_are_no_shorter_than_they_must() -> None:
    assert list(split_keys([b"k"] * 300, MOST_DESCRIPTORS)) == [slice(0, 253), slice(253, 300)]
    assert list(split_sizes([1] * 300)) == [slice(0, 253), slice(253, 300)]
    longest = [b"k" * LONGEST_KEY] * 20
    assert [run.stop - run.start for run in split_keys(longest)] == [16, 4]


def test_a_key_that_is_too_long_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="3999"):
        list(split_keys([b"k" * (LONGEST_KEY + 1)]))


def test_every_code_that_an_answer_may_have_is_one_byte_and_means_an_error() -> None:
    assert messages.DONE == 0 != messages.ABSENT < 128
