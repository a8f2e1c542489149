"""Whether a tier that failed or hung may be asked again. Pure: the caller gives the time.

One object for reading and one for writing: a filesystem that turned read-only still serves its pages. The
caller asks ``may_try`` before each use, and says afterwards how it went; a call that missed its deadline has
``failed``. While a tier is failed only one caller at a time may try, after a pause that doubles from failure
to failure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvfs.errors import TierFailed
from kvfs.sizes import format_duration

FIRST_PAUSE: Final = 1.0
LAST_PAUSE: Final = 60.0


@dataclass(frozen=True, slots=True)
class HealthStatistics:
    """``failed_since`` in the caller's seconds, None while the tier works; ``failures`` since the start."""

    failed_since: float | None
    reason: str
    next_try: float
    failures: int


class Health:
    """Times are seconds of any clock that only goes forward."""

    def __init__(self, name: str, first_pause: float = FIRST_PAUSE, last_pause: float = LAST_PAUSE) -> None:
        self.name = name
        self._first_pause = first_pause
        self._last_pause = last_pause
        self._failed_since: float | None = None
        self._reason = ""
        self._pause = first_pause
        self._next_try = 0.0
        self._is_trying = False
        self._failures = 0

    @property
    def failures(self) -> int:
        """How often it failed so far."""
        return self._failures

    @property
    def is_failed(self) -> bool:
        return self._failed_since is not None

    def may_try(self, now: float) -> bool:
        """Whether the tier may be asked now. Where it is failed, the answer is yes once for each pause."""
        if self._failed_since is None:
            return True
        if now < self._next_try:
            return False
        self._next_try = now + self._pause
        self._is_trying = True
        return True

    def require(self, now: float) -> None:
        """Raises TierFailed where ``may_try`` says no."""
        if not self.may_try(now):
            assert self._failed_since is not None
            since = format_duration(now - self._failed_since)
            raise TierFailed(f"the {self.name} failed {since} ago and is not tried again yet: {self._reason}")

    def succeeded(self) -> bool:
        """The tier answered; says whether it had failed before."""
        recovered = self._failed_since is not None
        self._failed_since = None
        self._reason = ""
        self._is_trying = False
        return recovered

    def failed(self, reason: str, now: float) -> bool:
        """The tier failed, or did not answer in time; says whether it had worked before.

        What was under way when it failed, and fails too, does not lengthen the pause.
        """
        self._failures += 1
        self._reason = reason
        if self._failed_since is None:
            self._failed_since = now
            self._pause = self._first_pause
        elif self._is_trying:
            self._pause = min(2 * self._pause, self._last_pause)
        else:
            return False
        worked = not self._is_trying
        self._is_trying = False
        self._next_try = now + self._pause
        return worked

    def statistics(self) -> HealthStatistics:
        return HealthStatistics(self._failed_since, self._reason, self._next_try, self._failures)
