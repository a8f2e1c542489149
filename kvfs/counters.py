"""What the daemon counts, for status and metrics."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Events since the mount; owned by the event loop."""

    hits: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    evictions: int = 0
    evicted_bytes: int = 0
    sealed: int = 0
    sealed_bytes: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    small_page_files: int = 0
    """Pages of at least a hugepage that could not be moved to hugepages."""
    adopted: int = 0
    dropped_at_start: int = 0


class LimitedLog:
    """At most one line a second for each kind of event, with the number of those it stands for."""

    def __init__(self, logger: logging.Logger, interval: float = 1.0) -> None:
        self._logger = logger
        self._interval = interval
        self._last: dict[str, float] = {}
        self._held: Counter[str] = Counter()

    def warning(self, kind: str, message: str, error: Exception | None = None) -> None:
        """``error``: with its trace."""
        now = time.monotonic()
        if now - self._last.get(kind, -self._interval) < self._interval:
            self._held[kind] += 1
            return
        self._last[kind] = now
        held = self._held.pop(kind, 0)
        more = f" (and {held} more like it)" if held else ""
        self._logger.warning("%s%s", message, more, exc_info=error)
