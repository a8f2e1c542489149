from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.errors import UsageError
from kvfs.sizes import format_count, format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64G", 64 << 30),
        ("64GiB", 64 << 30),
        ("64gb", 64 << 30),
        (" 512 M ", 512 << 20),
        ("1048576", 1048576),
        ("17B", 17),
        ("1.5T", 3 << 39),
        ("2P", 2 << 50),
        ("50%", 500),
        ("12.5%", 125),
        ("100%", 1000),
    ],
)
def test_sizes_are_binary(text: str, size: int) -> None:
    assert parse_size(text, total=1000) == size


@pytest.mark.parametrize(
    "text", ["", "G", "0", "0%", "-1G", "1e9", "64X", "64 GG", "1,5G", "101%", "٣G", "nan"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write"):
        parse_size(text, total=1000)


def test_a_percentage_needs_a_total() -> None:
    with pytest.raises(UsageError, match="percentage"):
        parse_size("50%")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (17, "17 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 19, "1.5 MiB"),
        (64 << 30, "64.0 GiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(("number", "text"), [(0, "0 pages"), (1, "1 page"), (2, "2 pages")])
def test_counts_for_people(number: int, text: str) -> None:
    assert format_count(number, "page") == text


@given(st.integers(min_value=1, max_value=1 << 60))
def test_a_formatted_size_reads_back_to_within_its_rounding(size: int) -> None:
    back = parse_size(format_size(size))
    assert abs(back - size) <= max(1, size * 0.051)


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("2s", 2), ("2", 2), ("1.5m", 90), ("1h", 3600), ("7d", 604800)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "-1s", "1w", "1 hour", "1h30m"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.35, "350 ms"),
        (2, "2 s"),
        (2.5, "2.5 s"),
        (59.96, "1 m"),
        (200, "3 m 20 s"),
        (3600, "1 h"),
        (439200, "5 d 2 h"),
        (-2, "-2 s"),
    ],
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
