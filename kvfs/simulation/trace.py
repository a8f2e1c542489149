"""Traces: for each request the blocks of its prompt, as in the traces published with Mooncake."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvfs.errors import UsageError

Advance = Callable[[int], None]
"""Told of progress: so many more units of work are done."""


class _Line(msgspec.Struct):
    """What is needed of a line: ``{"timestamp": …, "input_length": …, "hash_ids": [0, 1, 2]}``."""

    hash_ids: list[int]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their time. A request is its blocks, the head of the prompt first; equal
    numbers are equal prefixes, and the numbers are 0, 1, 2 and so on in the order in which they come up."""

    requests: Sequence[Sequence[int]]
    references: int
    """Blocks of all requests together."""
    distinct: int

    @classmethod
    def of(cls, requests: Sequence[Sequence[int]]) -> Trace:
        """A trace of requests whose blocks have any numbers."""
        numbers: dict[int, int] = {}
        renamed = [
            tuple(numbers.setdefault(block, len(numbers)) for block in request) for request in requests
        ]
        return cls(renamed, sum(map(len, renamed)), len(numbers))


def read_trace(path: Path, advance: Advance = lambda _: None) -> Trace:
    """Reads a trace of JSON lines; ``advance`` is told of bytes.

    Raises UsageError, which names the file and the line, when it cannot be read or is not a trace.
    """
    decode = msgspec.json.Decoder(_Line).decode
    requests = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                advance(len(line))
                if line.isspace():
                    continue
                try:
                    requests.append(decode(line).hash_ids)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise UsageError(f"{path}, line {number}, is no request of a trace: {error}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    trace = Trace.of(requests)
    if not trace.references:
        raise UsageError(f"{path} holds no requests: each line is one, with its blocks as hash_ids")
    return trace
