"""``kvfs status``: what one mount says of itself, or one line for every mount of the host."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from kvfs import mounts
from kvfs.cli.control import read_control, read_status, require_mount, unmounted_states
from kvfs.config import chosen_state_dir
from kvfs.errors import DaemonFailed, NotMounted, NotPermitted
from kvfs.sizes import format_duration, format_size

LIST_DEADLINE_SECONDS = 2.0

_HEADINGS = ("MOUNT", "STATE", "POOL", "USED", "PAGES", "HITS", "MISSES", "PASSTHROUGH", "UP", "PID")


@click.command("status", short_help="Show one mount, or all of them.")
@click.argument("mountpoint", metavar="[MNT]", required=False)
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON: what .kvfs/status.json of the mount holds."
)
@click.option("--state-dir", metavar="DIR", help="Also list what is left in this --state-dir. [/run/kvfs]")
def command(mountpoint: str | None, as_json: bool, state_dir: str | None) -> None:
    """Show what the mount at MNT says of itself, or without MNT one line for every mount on this host.

    STATE is "serving"; "silent" if there is no answer; "dead" if the daemon is gone (kvfs mount serves its
    pages again, kvfs umount frees them); "kept" if nothing is mounted but the DRAM waits for the next mount;
    "unreadable" if its permissions keep you out.
    """
    if mountpoint is not None:
        path = mounts.resolve_mountpoint(mountpoint)
        require_mount(path)
        print(read_control(path, "status.json" if as_json else "status").rstrip("\n"))
        return
    rows = _all_mounts(chosen_state_dir(state_dir, os.environ))
    if as_json:
        print(json.dumps(rows, indent=2))
    elif rows:
        print(_table([_HEADINGS, *(_cells(row) for row in rows)]))
    else:
        print("no kvfs is mounted here")


def _all_mounts(base: Path | None) -> list[dict[str, Any]]:
    """A status for every mount, by path, each with "mount" and "state" at least."""
    paths = sorted({entry.mountpoint for entry in mounts.read_mountinfo() if entry.fstype == mounts.FSTYPE})
    with ThreadPoolExecutor(max_workers=16) as readers:
        rows = list(readers.map(_ask, paths))
    return rows + [{"mount": str(path), "state": "kept"} for path, _ in unmounted_states(base)]


def _ask(mountpoint: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"mount": str(mountpoint)}
    try:
        return {**row, "state": "serving", **read_status(mountpoint, LIST_DEADLINE_SECONDS)}
    except NotMounted:
        return {**row, "state": "dead"}
    except NotPermitted:
        return {**row, "state": "unreadable"}
    except DaemonFailed:
        return {**row, "state": "silent"}


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if row["state"] != "serving":
        return (row["mount"], row["state"], *["-"] * (len(_HEADINGS) - 2))
    dram = row["tiers"]["dram"]
    return (
        row["mount"],
        row["state"],
        format_size(dram["capacity_bytes"]),
        format_size(dram["used_bytes"]),
        str(dram["pages"]),
        str(sum(row["hits"].values())),
        str(sum(row["misses"].values())),
        "on" if row["passthrough"]["active"] else "off",
        format_duration(row["uptime_seconds"]),
        str(row["pid"]),
    )


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
