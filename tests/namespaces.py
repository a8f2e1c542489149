"""Mount namespaces, for tests that hide something or look from elsewhere."""

from __future__ import annotations

import subprocess

import pytest


def skip_unless_namespaces_can_be_private() -> None:
    """Skip where the root directory is no mount, as in a chroot: unshare cannot keep to itself what happens
    in a new mount namespace then, and refuses."""
    tried = subprocess.run(["unshare", "-m", "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no private mount namespace can be made: {tried.stderr.strip()}")
