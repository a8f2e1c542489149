"""Sizes and durations as people write and read them. Pure."""

from __future__ import annotations

import math
import re

from kvfs.errors import UsageError

_UNITS = ("K", "M", "G", "T", "P")
_NUMBER = r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*"
_SIZE = re.compile(_NUMBER + r"(?:(?P<unit>[KMGTP])(?:iB|B)?|(?P<percent>%)|B)?", re.IGNORECASE)
_DURATION = re.compile(_NUMBER + r"(?P<unit>ms|s|m|h|d)?")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


LONGEST_SIZE = 64


def parse_size(text: str, total: int | None = None) -> int:
    """Bytes meant by ``text``: "64G" = "64GiB" = 64 · 2³⁰, "1.5T", "1048576", or "50%" of ``total`` bytes.

    Units are binary. Raises UsageError for anything else, for zero, and for a percentage where there is no
    total to take it of.
    """
    match = _SIZE.fullmatch(text.strip()) if len(text) <= LONGEST_SIZE else None
    if match is None:
        raise UsageError(
            f"{text[:LONGEST_SIZE]!r} is not a size: write a number and a binary unit, as in 64G, 512M or 50%"
        )
    number = float(match["number"])
    if match["percent"]:
        if total is None:
            raise UsageError(f"{text!r}: a percentage has no meaning here, write a size such as 64G")
        if number > 100:
            raise UsageError(f"{text!r} is more than there is: write at most 100%")
        size = int(total * number / 100)
    elif "." in match["number"]:
        size = int(number * _factor(match["unit"]))
    else:
        size = int(match["number"]) * _factor(match["unit"])
    if size <= 0:
        raise UsageError(f"{text!r} is no room at all: write a size such as 64G")
    return size


def _factor(unit: str | None) -> int:
    return 1 if unit is None else 1 << (10 * (1 + _UNITS.index(unit.upper())))


def format_size(number: int) -> str:
    """``number`` bytes for a person: "64.0 GiB", "1.5 MiB", "17 B"."""
    if abs(number) < 1024:
        return f"{number} B"
    value = float(number)
    for unit in _UNITS:
        value /= 1024
        if abs(value) < 1023.95 or unit == _UNITS[-1]:
            break
    return f"{value:.1f} {unit}iB"


def format_count(number: int, noun: str) -> str:
    """``number`` things for a person: "0 pages", "1 page", "2 pages"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def parse_duration(text: str) -> float:
    """Seconds meant by ``text``: "500ms", "2s", "1.5m", "1h", "7d", or a bare number of seconds.

    Raises UsageError for anything else.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a duration: write a number and a unit, as in 500ms, 2s, 10m or 1h")
    return float(match["number"]) * _SECONDS[match["unit"] or "s"]


def format_duration(seconds: float) -> str:
    """``seconds`` for a person, in at most two units: "350 ms", "2.5 s", "3 m 20 s", "5 d 2 h"."""
    if seconds < 0:
        return "-" + format_duration(-seconds)
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s".replace(".0 s", " s")
    whole = math.floor(seconds + 0.5)
    for unit, size, smaller, smaller_size in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "m", 60),
        ("m", 60, "s", 1),
    ):
        if whole >= size:
            rest = whole % size // smaller_size
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"
