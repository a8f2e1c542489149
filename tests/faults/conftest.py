"""Mounts that are killed, and disks that fail; the same proof as for all mounts that nothing is left."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.mounted.conftest import (  # noqa: F401
    _device_for_everyone,
    deadline,
    pytest_configure,
    pytest_runtest_setup,
    scratch,
    watchdog,
)


@pytest.fixture
def base(
    scratch: Path,  # noqa: F811
    request: pytest.FixtureRequest,
) -> Path:
    """A directory of a test's own."""
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)[:60]
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=scratch))
