"""What can be set, and how what a person wrote becomes a value.

A parser takes text (a flag, an environment variable) or a TOML value, and raises UsageError with one line
that says what to write instead.
"""

from __future__ import annotations

import grp
import math
import os
import pwd
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfs.errors import UsageError
from kvfs.sizes import parse_size

_LARGEST_ID = 2**32 - 2
_LONGEST_FSNAME = 200
LEAST_IO_TIMEOUT_SECONDS = 0.1
"""A healthy disk that is busy can take as long; the tier would be given up for nothing."""


def _parse_pool(value: object) -> str | int:
    """Kept as written while it is a percentage: only later is it known of how much."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    text = _parse_text(value).strip()
    return text if text.endswith("%") else parse_size(text)


def _parse_text(value: object) -> str:
    if not isinstance(value, str):
        raise UsageError(f'{value!r} must be text, in quotes: "…"')
    return value


def _choice(*choices: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        text = _parse_text(value).lower()
        if text not in choices:
            raise UsageError(f"{value!r} is none of {', '.join(choices)}")
        return text

    return parse


def _parse_numa(value: object) -> str:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else _parse_text(value)
    text = text.strip().lower()
    if text in ("", "off", "interleave"):
        return text.removeprefix("off")
    if not text.isdecimal():
        raise UsageError(f"{value!r} is neither interleave nor the number of a NUMA node")
    return str(int(text))


def _parse_owner(value: object) -> tuple[int, int]:
    """User and group ids of "USER:GROUP", or of "USER", whose own group it then is."""
    user, separator, group = _parse_text(value).partition(":")
    if not user or (separator and not group):
        raise UsageError(f"{value!r} is not an owner: write USER:GROUP or USER, by name or number")
    if user.isdecimal():
        uid = int(user)
        gid = _group_of(uid)
    else:
        try:
            entry = pwd.getpwnam(user)
        except KeyError:
            raise UsageError(f"there is no user {user!r}: write USER:GROUP, by name or number") from None
        uid, gid = entry.pw_uid, entry.pw_gid
    if group.isdecimal():
        gid = int(group)
    elif group:
        try:
            gid = grp.getgrnam(group).gr_gid
        except KeyError:
            raise UsageError(f"there is no group {group!r}: write USER:GROUP, by name or number") from None
    if max(uid, gid) > _LARGEST_ID:
        raise UsageError(f"{value!r} is beyond the largest id, {_LARGEST_ID}")
    return uid, gid


def _group_of(uid: int) -> int:
    try:
        return pwd.getpwuid(uid).pw_gid
    except KeyError:
        return uid


def _parse_mode(value: object) -> int:
    text = _parse_text(value).strip()
    if not re.fullmatch(r"(0o)?[0-7]{3,5}", text) or int(text, 8) > 0o7777:
        raise UsageError(f"{value!r} is not a mode: write permission bits in octal, as in 0770")
    return int(text, 8)


def _parse_path(value: object) -> Path:
    text = _parse_text(value)
    if not text:
        raise UsageError("an empty path is no directory")
    return Path(os.path.abspath(text))


def _parse_ssd(value: object) -> str:
    if not _parse_text(value):
        raise UsageError("an empty path is no directory: without an SSD, leave it out")
    return str(_parse_path(value))


def _parse_seconds(value: object) -> float:
    """Seconds of "30", 30, "500ms", "1.5s", "2m", "1h"."""
    number, unit = value, "s"
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(ms|s|m|h|d|)\s*", value)
        if match is None:
            raise UsageError(f"{value!r} is not a time: write seconds, or 500ms, 30s, 5m, 1h")
        number, unit = match[1], match[2] or "s"
    if (
        isinstance(number, bool)
        or not isinstance(number, str | int | float)
        or not 0 <= float(number) < math.inf
    ):
        raise UsageError(f"{value!r} is not a time: write seconds, or 500ms, 30s, 5m, 1h")
    return float(number) * {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}[unit]


def _parse_io_timeout(value: object) -> float:
    seconds = _parse_seconds(value)
    if seconds < LEAST_IO_TIMEOUT_SECONDS:
        raise UsageError(
            f"{value!r} is too short for any disk: at least {LEAST_IO_TIMEOUT_SECONDS * 1000:.0f}ms"
        )
    return seconds


def _parse_flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = value.strip().lower() if isinstance(value, str) else None
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off", ""):
        return False
    raise UsageError(f"{value!r} is neither yes nor no: write true or false")


def _parse_percent(value: object) -> float:
    try:
        number = float(value.strip().removesuffix("%") if isinstance(value, str) else value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise UsageError(f"{value!r} is not a percentage: write a number, as in 5") from None
    if not 0 <= number <= 100:
        raise UsageError(f"{value!r} is not a percentage: write a number from 0 to 100")
    return number


def _parse_reserve(value: object) -> float:
    number = _parse_percent(value)
    if not 0 < number <= 50:
        raise UsageError(f"{value!r}: the reserve is more than 0 and at most 50 percent of the pool")
    return number


def _parse_pins(value: object) -> float:
    number = _parse_percent(value)
    if number > 75:
        raise UsageError(f"{value!r}: pinned pages take at most 75 percent of the pool: others need room too")
    return number


_PLAIN_OPTIONS = (
    "ro",
    "noexec",
    "noatime",
    "nosymfollow",
    "allow_other",
    "allow_root",
    "default_permissions",
)
_OPPOSITES = {
    "rw": "ro",
    "defaults": "ro",
    "exec": "noexec",
    **dict.fromkeys(("atime", "relatime", "strictatime"), "noatime"),
}
#: Others of mount(8) that go with any filesystem: here they hold anyway, or have nothing to change.
_ALWAYS_SO = frozenset(
    (
        *("suid", "nosuid", "dev", "nodev", "sync", "async", "dirsync", "silent", "loud", "mand", "nomand"),
        *("norelatime", "nostrictatime", "diratime", "nodiratime", "lazytime", "nolazytime"),
        *("iversion", "noiversion"),
    )
)
_FOR_OTHERS = frozenset(("auto", "noauto", "nofail", "_netdev", "user", "nouser", "users", "owner", "group"))
_FOR_OTHERS_PREFIXES = ("x-", "X-", "user=", "comment=")


def parse_mount_options(value: object) -> tuple[str, ...]:
    """The options that mean something to the mount, each once, in the order given.

    ``value`` is text with commas between, or a list of such texts. Options that fstab lines carry and that
    change nothing here are dropped. Raises UsageError naming the first option that is unknown.
    """
    texts = [_parse_text(item) for item in value] if isinstance(value, list | tuple) else [_parse_text(value)]
    chosen: list[str] = []
    for option in (part.strip() for text in texts for part in text.split(",")):
        if option in _OPPOSITES:
            chosen = [other for other in chosen if other != _OPPOSITES[option]]
        elif not option or option in _ALWAYS_SO | _FOR_OTHERS or option.startswith(_FOR_OTHERS_PREFIXES):
            pass
        elif option in _PLAIN_OPTIONS:
            if option not in chosen:
                chosen.append(option)
        elif option.startswith("fsname="):
            if not option.isprintable() or not 0 < len(option.removeprefix("fsname=")) <= _LONGEST_FSNAME:
                limits = f"NAME is 1 to {_LONGEST_FSNAME} printable characters"
                raise UsageError(f"mount option {option[:40]!r}: write fsname=NAME, where {limits}")
            chosen = [other for other in chosen if not other.startswith("fsname=")] + [option]
        else:
            known = ", ".join((*_PLAIN_OPTIONS, "fsname=NAME"))
            raise UsageError(f"mount option {option!r} is unknown; known are {known}")
    if "allow_other" in chosen and "allow_root" in chosen:
        raise UsageError("mount options allow_other and allow_root exclude each other: choose one")
    return tuple(chosen)


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that can be set.

    ``name`` is the key in the file and, with dashes, the flag; ``fields`` are those of Config that it fills:
    one, or as many as the parser returns values. ``default`` is given the environment.
    """

    name: str
    fields: tuple[str, ...]
    parse: Callable[[object], Any]
    default: Callable[[Mapping[str, str]], Any]

    @property
    def variable(self) -> str:
        """The name of the environment variable."""
        return f"KVFS_{self.name.upper()}"


def default_state_dir(environment: Mapping[str, str]) -> Path:
    """Where the state of the caller's mounts lives unless something else is asked for."""
    if os.geteuid() == 0:
        return Path("/run/kvfs")
    runtime = environment.get("XDG_RUNTIME_DIR")
    return Path(runtime, "kvfs") if runtime else Path(f"/tmp/kvfs-{os.geteuid()}")


def _default_owner(environment: Mapping[str, str]) -> tuple[int, int]:
    """Who called sudo to become root, else who calls."""
    if os.geteuid() != 0:
        return os.getuid(), os.getgid()
    try:
        return int(environment["SUDO_UID"]), int(environment["SUDO_GID"])
    except (KeyError, ValueError):
        return os.getuid(), os.getgid()


SETTINGS = (
    Setting("pool", ("pool_bytes",), _parse_pool, lambda _: None),
    Setting("hugepages", ("hugepages",), _choice("prefer", "require", "off"), lambda _: "prefer"),
    Setting("numa", ("numa",), _parse_numa, lambda _: ""),
    Setting("owner", ("owner_uid", "owner_gid"), _parse_owner, _default_owner),
    Setting("mode", ("mode",), _parse_mode, lambda _: 0o770),
    Setting("state_dir", ("state_dir",), _parse_path, default_state_dir),
    Setting("foreground", ("foreground",), _parse_flag, lambda _: False),
    Setting("options", ("mount_options",), parse_mount_options, lambda _: ()),
    Setting("passthrough", ("passthrough",), _choice("auto", "off"), lambda _: "auto"),
    Setting("reserve_percent", ("reserve_percent",), _parse_reserve, lambda _: 5.0),
    Setting("pin_percent", ("pin_percent",), _parse_pins, lambda _: 25.0),
    Setting("protected_percent", ("protected_percent",), _parse_percent, lambda _: 100.0),
    Setting("keep", ("keep",), _parse_flag, lambda _: False),
    Setting("ssd", ("ssd",), _parse_ssd, lambda _: ""),
    Setting("ssd_capacity", ("ssd_capacity_bytes",), _parse_pool, lambda _: "90%"),
    Setting(
        "ssd_read_path", ("ssd_read_path",), _choice("auto", "cufile", "uring", "direct"), lambda _: "auto"
    ),
    Setting("ssd_write_policy", ("ssd_write_policy",), _choice("all", "reuse"), lambda _: "all"),
    Setting("ssd_write_delay", ("ssd_write_delay_seconds",), _parse_seconds, lambda _: 30.0),
    Setting("settle", ("settle_seconds",), _parse_seconds, lambda _: 1.0),
    Setting("io_timeout", ("io_timeout_seconds",), _parse_io_timeout, lambda _: 30.0),
    Setting("flush_timeout", ("flush_timeout_seconds",), _parse_seconds, lambda _: 60.0),
    Setting("discard_incompatible", ("discard_incompatible",), _parse_flag, lambda _: False),
    Setting("log_level", ("log_level",), _choice("debug", "info", "warning", "error"), lambda _: "info"),
)
