"""Calls that may never return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Answer = TypeVar("Answer")


def answer_within(seconds: float, call: Callable[[], Answer]) -> Answer | None:
    """What ``call`` returns, or None when it has not returned in time; OSError as it raises it."""
    result: list[Answer | OSError] = []

    def ask() -> None:
        try:
            result.append(call())
        except OSError as error:
            result.append(error)

    # A thread that waits for something stuck cannot be interrupted, but it does not keep this process alive.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    if not result:
        return None
    if isinstance(result[0], OSError):
        raise result[0]
    return result[0]
