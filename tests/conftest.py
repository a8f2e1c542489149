"""What every test gets: an unexpected line in the log fails it."""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Iterator

import pytest


def pytest_configure() -> None:
    """What tests start is to obey Ctrl-C, also where a shell put the run into the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class LogGuard(logging.Handler):
    """Collects what the package logs at WARNING and above, and knows what the test said it expects."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.expected: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.name}: {record.getMessage()}")

    def __call__(self, pattern: str) -> None:
        """Expects one line or more that the regular expression matches somewhere."""
        self.expected.append(pattern)

    def verdict(self) -> list[str]:
        """What is wrong: lines nobody expected, and expectations without a line."""
        unexpected = [
            f"unexpected: {line}"
            for line in self.lines
            if not any(re.search(pattern, line) for pattern in self.expected)
        ]
        missing = [
            f"no log line matches {pattern!r}"
            for pattern in self.expected
            if not any(re.search(pattern, line) for line in self.lines)
        ]
        return unexpected + missing


@pytest.fixture(autouse=True)
def _log_guard() -> Iterator[LogGuard]:
    guard = LogGuard()
    logger = logging.getLogger("kvfs")
    logger.addHandler(guard)
    try:
        yield guard
    finally:
        logger.removeHandler(guard)
    if problems := guard.verdict():
        pytest.fail("\n".join(problems), pytrace=False)


@pytest.fixture
def expect_log(_log_guard: LogGuard) -> LogGuard:
    """``expect_log(pattern)`` allows, and demands, log lines of the package that match."""
    return _log_guard
