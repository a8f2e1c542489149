"""Mounts for the tests of the socket and its client; the same proof as for all that nothing is left."""

from __future__ import annotations

from tests.mounted.conftest import (  # noqa: F401
    _device_for_everyone,
    deadline,
    make_mount,
    pytest_configure,
    pytest_runtest_setup,
    scratch,
    watchdog,
)
