"""What a key may look like. Pure."""

from __future__ import annotations

import os
from typing import Final

from kvfs.errors import UsageError
from kvfs.page import RESERVED, shown

Keys = list[str] | tuple[str, ...]

_LONGEST_NAME: Final = 255
_LONGEST_KEY: Final = 3999
_RESERVED: Final = os.fsdecode(RESERVED)


def check(key: str) -> str:
    """The key. Raises UsageError where it is no path below a mount."""
    if not isinstance(key, str):
        raise UsageError(f"{key!r} is no key: a key is a str, the path of a page below the mount")
    parts = key.split("/")
    if "" in parts or "." in parts or ".." in parts or "\0" in key:
        reason = (
            "write the path below the mount as in 'model/ab/abcdef', without '/' at either end, '.' or '..'"
        )
    elif key.startswith(_RESERVED):
        reason = f"names in the root of a mount that begin with {_RESERVED} are its own"
    elif _is_long(key, parts):
        reason = f"a name has at most {_LONGEST_NAME} bytes, a path {_LONGEST_KEY}"
    else:
        return key
    raise UsageError(f"{shown(os.fsencode(key[:300]))!r} is no key: {reason}")


def _is_long(key: str, parts: list[str]) -> bool:
    longest = max(len(os.fsencode(part)) for part in parts)
    return longest > _LONGEST_NAME or len(os.fsencode(key)) > _LONGEST_KEY
