"""``kvfs gc``: what is left over on the SSD tier, and deleting it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from kvfs import mounts
from kvfs.cli.control import read_control, require_mount
from kvfs.cli.pages import LEFTOVERS, ask_once, in_words, request, shown
from kvfs.errors import KvfsError, NotPermitted
from kvfs.sizes import format_count, format_duration, format_size

DEADLINE_SECONDS = 3600.0
"""All of the SSD is looked through. Where the disk hangs, the daemon says so itself."""
_KINDS = {
    "temporaries": "temporaries that were never finished",
    "quarantine": "damaged pages in quarantine",
    "foreign": "not ours, and never deleted",
}
_DELETED = ("temporaries", "quarantine")

Leftovers = dict[str, Any]


@click.command("gc", short_help="Show what is left over on the SSD, and delete it.")
@click.argument("mountpoint", metavar="MNT")
@click.option("--delete", is_flag=True, help="Delete temporaries and quarantine.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: what .kvfs/leftovers of the mount holds.")
def command(mountpoint: str, delete: bool, as_json: bool) -> None:
    """Show what is left over on the SSD tier of MNT: temporaries that were never finished, damaged pages that
    were set aside, and files that are not kvfs's own. Show also pages that would have expired, were they not
    pinned.

    Only the first two are deleted, by root or the owner of MNT. What is being written is not left over.
    """
    path = mounts.resolve_mountpoint(mountpoint)
    require_mount(path)
    found = before = _read(path)
    if delete and before["ssd"] is not None:
        _delete(path)
        found = _read(path)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    if before["ssd"] is None:
        print(f"{path} has no SSD tier: nothing can be left over")
    else:
        print("\n".join(_text(path, before["ssd"], found["ssd"], delete)))
    if found["expired"]["count"]:
        print("\n".join(_expired(found["expired"])))


def _read(mountpoint: Path) -> Leftovers:
    found = json.loads(read_control(mountpoint, "leftovers", DEADLINE_SECONDS))
    assert isinstance(found, dict)
    return found


def _delete(mountpoint: Path) -> None:
    try:
        ask_once(str(mountpoint), request(LEFTOVERS, b"delete"))
    except PermissionError:
        raise NotPermitted(f"only root and the owner of {mountpoint} may delete what is left over") from None
    except OSError as error:
        raise KvfsError(f"what is left over could not be deleted: {in_words(error)}") from None


def _text(mountpoint: Path, before: Leftovers, after: Leftovers, delete: bool) -> list[str]:
    lines = [f"{mountpoint}: SSD tier in {before['directory']}"]
    for kind, meaning in _KINDS.items():
        found = before[kind]
        lines += _listed(found, meaning)
    count = sum(before[kind]["count"] for kind in _DELETED)
    if delete:
        gone = [before[kind]["count"] - after[kind]["count"] for kind in _DELETED]
        freed = [before[kind]["bytes"] - after[kind]["bytes"] for kind in _DELETED]
        lines.append(f"{format_count(sum(gone), 'file')} deleted, {format_size(sum(freed))} freed")
    elif count:
        lines.append(f"kvfs gc {mountpoint} --delete deletes {format_count(count, 'file')} of these")
    return lines


def _listed(found: Leftovers, meaning: str) -> list[str]:
    lines = [f"{found['count']} {meaning}, {format_size(found['bytes'])}"]
    lines += ["  " + _line(row) for row in found["files"]]
    if more := found["count"] - len(found["files"]):
        lines.append(f"  and {more} more")
    return lines


def _expired(found: Leftovers) -> list[str]:
    """Pages whose time is over: those that are not pinned go by themselves within a second or so."""
    return _listed(found, "expired, and kept because they are pinned: kvfs unpin lets them go")


def _line(row: dict[str, Any]) -> str:
    from kvfs.tiers.ssd_quarantine import REASONS

    words = [shown(row["path"]) or "a path that is lost"]
    if "reason" in row:
        words.append(REASONS.get(row["reason"], "nobody noted why"))
    words += [format_size(row["bytes"]), f"{format_duration(row['age_seconds'])} old"]
    return ", ".join(words)
