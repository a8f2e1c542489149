"""What a mount runs with: one frozen value from flags, environment, a TOML file and defaults."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvfs import mounts
from kvfs.errors import ConfigError, KvfsError, UsageError
from kvfs.settings import SETTINGS, Setting
from kvfs.sizes import format_size, parse_size

DEFAULT_FILE = Path("/etc/kvfs.toml")
DEFAULT_DIRECTORY = Path("/etc/kvfs")
"""May hold a file for one mount, named as systemd would: mnt-kv.toml is for /mnt/kv."""
DEFAULT_POOL_SHARE = 0.25
WARNING_POOL_SHARE = 0.7

MINIMUM_POOL_BYTES = 8 << 20
MINIMUM_SSD_BYTES = 64 << 20
"""Less would hold no more than a few pages of a large model."""


@dataclass(frozen=True, slots=True)
class Config:
    """Everything a daemon needs to know. ``origins`` says for each field where its value came from."""

    mountpoint: Path
    pool_bytes: int
    hugepages: Literal["prefer", "require", "off"]
    numa: str
    """"" (wherever the writer runs), "interleave", or the number of a node."""
    owner_uid: int
    owner_gid: int
    mode: int
    """Permission bits of the root directory of the mount."""
    state_dir: Path
    """The directory that holds the state directories of all mounts, each named after its mountpoint."""
    foreground: bool
    mount_options: tuple[str, ...]
    passthrough: Literal["auto", "off"]
    reserve_percent: float
    pin_percent: float
    """How much of the pool pinned pages may take."""
    protected_percent: float
    """How much of the pool pages may take that were used again, before they leave first."""
    ssd: str
    """The directory of the SSD tier, absolute; "" without one."""
    ssd_capacity_bytes: int
    ssd_read_path: Literal["auto", "cufile", "uring", "direct"]
    """How bytes move between the SSD and DRAM; the next one is used where it does not work."""
    ssd_write_policy: Literal["all", "reuse"]
    """Whether pages go to the SSD only once they were touched twice."""
    ssd_write_delay_seconds: float
    """How long after it was sealed a page has its copy on the SSD at the latest, if the disk keeps up."""
    settle_seconds: float
    """How long a sealed page waits before it is copied to the SSD: temporaries have their names by then."""
    io_timeout_seconds: float
    flush_timeout_seconds: float
    """How long a clean unmount may copy pages to the SSD that it has not yet."""
    discard_incompatible: bool
    keep: bool
    """Whether a clean unmount leaves the DRAM for the next mount."""
    log_level: Literal["debug", "info", "warning", "error"]
    origins: dict[str, str]


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the machine in bytes: ``available`` can be had without swapping."""

    total: int
    available: int


def read_memory() -> Memory:
    """The machine's memory, from /proc/meminfo."""
    text = Path("/proc/meminfo").read_text()
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE))
    return Memory(total=int(fields["MemTotal"]) << 10, available=int(fields["MemAvailable"]) << 10)


def load_config(
    mountpoint: Path,
    flags: Mapping[str, object],
    environment: Mapping[str, str],
    file: Path | None = None,
    memory: Memory | None = None,
) -> Config:
    """What a mount at ``mountpoint`` (absolute, resolved) runs with.

    ``flags`` has what was given at the command line, by setting; None counts as not given. ``file`` must
    exist; without one, KVFS_CONFIG names it, or else the mount's file in /etc/kvfs is read if it exists, or
    else /etc/kvfs.toml if that does. Raises UsageError for a flag and ConfigError for a variable or a file
    that cannot be used.
    """
    try:
        str(mountpoint).encode()
    except UnicodeEncodeError:
        raise UsageError(f"{os.fsencode(mountpoint)!r}: the path of a mountpoint must be UTF-8") from None
    path, from_file = _read_file(file, environment, _default_file(mountpoint))
    values: dict[str, Any] = {"mountpoint": mountpoint}
    origins = {"mountpoint": "argument"}
    for setting in SETTINGS:
        value, origin = _settle(setting, flags, environment, path, from_file)
        parts = value if len(setting.fields) > 1 else (value,)
        values.update(zip(setting.fields, parts, strict=True))
        origins.update(dict.fromkeys(setting.fields, origin))
    held = _held_bytes(values["state_dir"] / mounts.escape_path(mountpoint) / "dram")
    pool = values["pool_bytes"]
    values["pool_bytes"] = _pool_bytes(pool, origins["pool_bytes"], memory or read_memory(), held)
    values["ssd_capacity_bytes"] = _ssd_capacity(values, origins["ssd_capacity_bytes"])
    return Config(**values, origins=origins)


def chosen_state_dir(flag: str | None, environment: Mapping[str, str]) -> Path | None:
    """Where states of mounts are by flag, environment or file; None where the default holds.

    Raises UsageError and ConfigError like ``load_config``.
    """
    setting = next(setting for setting in SETTINGS if setting.name == "state_dir")
    path, from_file = _read_file(None, environment)
    value, origin = _settle(setting, {"state_dir": flag}, environment, path, from_file)
    return None if origin == "default" else Path(value)


def _settle(
    setting: Setting,
    flags: Mapping[str, object],
    environment: Mapping[str, str],
    path: Path | None,
    from_file: Mapping[str, object],
) -> tuple[Any, str]:
    """The value of a setting and where it came from. What does not count is checked all the same."""
    name, variable = setting.name, setting.variable
    settled = setting.default(environment), "default"
    if name in from_file:
        settled = _parsed(setting, from_file[name], f"{path}: {name}"), f"file {path}"
    text = environment.get(variable)
    if text or (text is not None and name == "ssd"):  # who meant an SSD is not to be left without one
        settled = _parsed(setting, text, variable), f"environment {variable}"
    if (flag := flags.get(name)) is not None:
        settled = _parsed(setting, flag, f"--{name.replace('_', '-')}", UsageError), "flag"
    return settled


def _parsed(setting: Setting, value: object, place: str, kind: type[KvfsError] = ConfigError) -> Any:
    """The value that was written at ``place``; an error of ``kind`` that names the place."""
    try:
        return setting.parse(value)
    except UsageError as error:
        raise kind(f"{place}: {error}") from None


def _default_file(mountpoint: Path) -> Path:
    own = DEFAULT_DIRECTORY / f"{mounts.escape_path(mountpoint)}.toml"
    return own if os.path.exists(own) else DEFAULT_FILE


def _read_file(
    file: Path | None, environment: Mapping[str, str], default: Path = DEFAULT_FILE
) -> tuple[Path | None, dict[str, object]]:
    if file is None and (named := environment.get("KVFS_CONFIG")):
        file = Path(named)
    path = file or default
    try:
        values: dict[str, object] = tomllib.loads(path.read_text())
    except FileNotFoundError:
        if file is None:
            return None, {}
        raise ConfigError(f"{path}: there is no such configuration file") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read: {reason}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    known = [setting.name for setting in SETTINGS]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key.replace("-", "_"), known, n=1)
            advice = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"{path}: unknown key {key!r}: {advice}")
    return path, values


def _held_bytes(directory: Path) -> int:
    """Memory that an earlier daemon of this mountpoint left for us: it is not in use by anyone else."""
    if not mounts.find(directory):
        return 0
    try:
        room = os.statvfs(directory)
    except PermissionError:
        return 0
    return (room.f_blocks - room.f_bfree) * room.f_frsize


def _pool_bytes(pool: str | int | None, origin: str, memory: Memory, held: int) -> int:
    error, place = (UsageError, "--pool") if origin == "flag" else (ConfigError, origin)
    if pool is None:
        return int((memory.available + held) * DEFAULT_POOL_SHARE)
    try:
        size = parse_size(pool, memory.total) if isinstance(pool, str) else pool
    except UsageError as wrong:
        raise error(f"{place}: {wrong}") from None
    if size > memory.total:
        raise error(
            f"{place}: {format_size(size)} is more than the {format_size(memory.total)} of memory here; "
            f"choose less, such as 50%"
        )
    if size < MINIMUM_POOL_BYTES:
        raise error(f"{place}: {format_size(size)} is too little: at least {format_size(MINIMUM_POOL_BYTES)}")
    return size


def _ssd_capacity(values: Mapping[str, Any], origin: str) -> int:
    """Bytes; a share is one of the filesystem on which the directory is or will be."""
    capacity = values["ssd_capacity_bytes"]
    if not values["ssd"]:
        if origin == "flag":
            raise UsageError("--ssd-capacity is for an SSD tier: give its directory with --ssd")
        return 0
    written = origin not in ("flag", "default")
    error, place = (ConfigError, origin) if written else (UsageError, "--ssd-capacity")
    if isinstance(capacity, str):
        size = _size_of_filesystem(Path(values["ssd"]))
        try:
            capacity = parse_size(capacity, size)
        except UsageError as wrong:
            raise error(f"{place}: {wrong}") from None
    if capacity < MINIMUM_SSD_BYTES:
        least = format_size(MINIMUM_SSD_BYTES)
        raise error(f"{place}: {format_size(capacity)} is too little: at least {least}")
    return int(capacity)


def _size_of_filesystem(directory: Path) -> int:
    """Bytes of the filesystem on which a directory is or will be."""
    place = directory if os.path.exists(directory) else directory.parent
    try:
        room = os.statvfs(place)
    except OSError as error:
        raise UsageError(f"--ssd {directory}: {place}: {error.strerror}: is the disk mounted?") from None
    if not room.f_blocks:
        raise UsageError(f"--ssd {directory}: its filesystem has no room to give; name a directory on a disk")
    return room.f_blocks * room.f_frsize


def pool_warning(config: Config, memory: Memory) -> str | None:
    """One line when the pool takes so much of the memory that programs may not find what they need."""
    share = config.pool_bytes / memory.total
    if share <= WARNING_POOL_SHARE:
        return None
    return (
        f"the pool of {format_size(config.pool_bytes)} is {share:.0%} of memory; when it fills, little is "
        f"left for programs: consider at most {WARNING_POOL_SHARE:.0%}"
    )


def ssd_warnings(config: Config) -> list[str]:
    """A line for each thing about the SSD that its user may not have meant."""
    if not config.ssd:
        return []
    warnings = []
    if config.ssd_capacity_bytes < config.pool_bytes:
        warnings.append(
            f"the SSD of {format_size(config.ssd_capacity_bytes)} is smaller than the pool of "
            f"{format_size(config.pool_bytes)}: pages that find no room there are gone once they leave DRAM"
        )
    place = config.ssd if os.path.exists(config.ssd) else os.path.dirname(config.ssd)
    with suppress(OSError):  # the daemon says what is wrong with it
        entry = mounts.filesystem_with(os.stat(place).st_dev)
        if entry is not None and entry.fstype in mounts.IN_MEMORY:
            warnings.append(f"{config.ssd} is in memory ({entry.fstype}): its pages do not outlive the host")
    return warnings


def to_json(config: Config) -> bytes:
    """The whole configuration as JSON, for the daemon's process and for config.json."""
    return msgspec.json.encode(config, enc_hook=str)


def from_json(data: bytes) -> Config:
    """The configuration that ``to_json`` wrote; ConfigError when it is not one."""
    try:
        return msgspec.json.decode(data, type=Config, dec_hook=lambda kind, value: kind(value))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"not a configuration that kvfs wrote: {error}") from None
