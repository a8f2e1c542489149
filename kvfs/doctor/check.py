"""The result of one check."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Check:
    """``ok`` is None for what is neither good nor bad, or cannot be known from here.

    ``found`` is what is there; ``consequence`` what that means for a mount, ``remedy`` what to do about it,
    both empty where there is nothing to say. ``needed``: without it kvfs cannot mount at all.
    """

    name: str
    ok: bool | None
    found: str
    consequence: str = ""
    remedy: str = ""
    needed: bool = False

    @property
    def prevents_mounting(self) -> bool:
        return self.needed and self.ok is False


def is_root() -> bool:
    return os.geteuid() == 0


def read_setting(path: str) -> str | None:
    """What a file of /proc or /sys holds, without the line's end; None where the kernel has no such file."""
    try:
        return Path(path).read_text().strip()
    except (FileNotFoundError, PermissionError):
        return None
