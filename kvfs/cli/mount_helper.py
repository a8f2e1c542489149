"""``mount.kvfs``: what mount(8) calls for a filesystem of this type, for fstab too.

Its exit codes are those that mount(8) documents: 1 for a request that makes no sense or is not permitted, 4
for a bug, 8 for an interrupt, 32 for a mount that failed.
"""

from __future__ import annotations

import difflib
import re
import sys
from typing import Any, NoReturn

import click

from kvfs import cli
from kvfs.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_OK, ConfigError, KvfsError, NotPermitted, UsageError
from kvfs.settings import SETTINGS, parse_mount_options

_MOUNT_FAILED = 32
_EXIT_CODES = {
    EXIT_OK: 0,
    UsageError.exit_code: 1,
    ConfigError.exit_code: 1,
    NotPermitted.exit_code: 1,
    EXIT_BUG: 4,
    EXIT_INTERRUPTED: 8,
}

#: "foreground" would keep mount(8) waiting; mount options stand beside settings here.
_SETTINGS = {setting.name: setting for setting in SETTINGS if setting.name not in ("foreground", "options")}
_OPTION = re.compile(r'(?:[^,"]|"[^"]*")+')


def parse_options(text: str, sloppy: bool = False) -> dict[str, Any]:
    """The settings in what stands after -o or in fstab, as ``kvfs.cli.mount.prepare`` takes them.

    ``pool=64G`` is what ``--pool 64G`` is; "config" names a file. A value may stand in double quotes, with
    commas in it. Mount options proper are in "options". Raises UsageError for what is unknown, or, when
    ``sloppy``, leaves it out.
    """
    settings: dict[str, Any] = {}
    others: list[str] = []
    for option in _OPTION.findall(text):
        name, has_value, value = option.partition("=")
        name = name.replace("-", "_")
        if has_value and (name in _SETTINGS or name == "config"):
            settings[name] = value.replace('"', "")
        elif name in _SETTINGS and _is_switch(name):
            settings[name] = True
        elif name == "remount":
            raise KvfsError(
                "a kvfs cannot be remounted: kvfs umount --keep leaves its pages for the next mount"
            )
        elif _is_mount_option(option):
            others.append(option)
        elif not sloppy:
            raise UsageError(_unknown(option, name))
    if others:
        settings["options"] = others
    return settings


def _is_switch(name: str) -> bool:
    """Whether the name alone says yes."""
    return isinstance(_SETTINGS[name].default({}), bool)


def _is_mount_option(option: str) -> bool:
    try:
        parse_mount_options(option)
    except UsageError:
        return False
    return True


def _unknown(option: str, name: str) -> str:
    if name in _SETTINGS or name == "config":
        return f"option {option!r} needs a value: {name}=…"
    near = difflib.get_close_matches(name, _SETTINGS, n=1)
    advice = (
        f"did you mean {near[0]}=…?" if near else "known are those of kvfs mount --help, such as pool=64G"
    )
    return f"option {option!r} is unknown: {advice}"


@click.command("mount.kvfs")
@click.argument("source")
@click.argument("mountpoint", metavar="MNT")
@click.option(
    "-o", "texts", metavar="OPT,…", multiple=True, help="The options of kvfs mount: pool=64G,ssd=DIR."
)
@click.option("-f", "is_fake", is_flag=True, help="Check everything, and mount nothing.")
@click.option("-s", "sloppy", is_flag=True, help="Pass over unknown options.")
@click.option("-v", "verbose", is_flag=True, help="Say what was mounted.")
@click.option("-n", "_no_mtab", is_flag=True, help="Nothing: no mtab is written.")
@click.option("-t", "_fstype", metavar="TYPE", help="Nothing: this mounts kvfs.")
def _command(
    source: str, mountpoint: str, texts: tuple[str, ...], is_fake: bool, sloppy: bool, verbose: bool, **_: Any
) -> None:
    """Mount a kvfs at MNT, for mount(8) and fstab. SOURCE is what findmnt shows: any name."""
    from kvfs.cli import mount as mounting

    settings = parse_options(",".join(texts), sloppy)
    if "," in source:
        raise UsageError(f"source {source!r}: a comma cannot be part of the name that findmnt is to show")
    file = settings.pop("config", None)
    # What stands in the options comes later, and wins.
    settings["options"] = [f"fsname={source}", *settings.get("options", ())]
    config, state = mounting.prepare(mountpoint, {**settings, "foreground": False}, file)
    if is_fake:
        return
    mounting.start(config, state)
    if verbose:
        mounting.announce(config)


def main() -> NoReturn:
    """The program mount.kvfs."""
    sys.exit(exit_code(cli.run(_command, "mount.kvfs")))


def exit_code(code: int) -> int:
    """What mount(8) gives for an exit code of kvfs."""
    return _EXIT_CODES.get(code, _MOUNT_FAILED)
