"""Mounts that are killed, and disks that fail; the same proof as for all mounts that nothing is left."""

from tests.mounted.conftest import (  # noqa: F401
    _device_for_everyone,
    deadline,
    pytest_configure,
    pytest_runtest_setup,
    scratch,
    watchdog,
)
