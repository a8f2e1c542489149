"""Standard output that can fail: a full disk is an error of one line, and a reader that has gone is none."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvfs.errors import KvfsError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Output(io.FileIO):
    """Bytes to a descriptor. Once a write has failed, what follows is dropped: it has been told once."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._failed = False

    def write(self, data: ReadableBuffer, /) -> int:
        if not self._failed:
            try:
                return super().write(data)
            except BrokenPipeError:  # `| head -1` has seen enough; the verb goes on, to its own exit code
                self._failed = True
            except OSError as error:
                self._failed = True
                raise KvfsError(f"standard output cannot be written: {error.strerror}") from None
        return memoryview(data).nbytes


@contextmanager
def guarded_output() -> Iterator[None]:
    """Within it, printing raises KvfsError where standard output cannot be written, and never OSError: click
    and rich would make each its own of that."""
    before = sys.stdout
    if sys.__stdout__ is None:  # it was closed before we began
        with open(os.devnull, "w") as nowhere:
            sys.stdout = nowhere
            try:
                yield
            finally:
                sys.stdout = before
        return
    raw = _Output(before.fileno())
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(raw), before.encoding, before.errors, line_buffering=raw.isatty()
    )
    try:
        yield
    finally:
        guarded, sys.stdout = sys.stdout, before
        guarded.flush()
