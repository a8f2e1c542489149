"""``kvfs verify``: compares every page with its digest, wherever it is, and takes away what is damaged."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from typing import Any

import click

from kvfs import mounts
from kvfs.cli.control import read_status, require_mount
from kvfs.cli.pages import (
    VERIFY,
    Failures,
    ask_each,
    ask_once,
    files_below,
    has_left,
    in_words,
    progress,
    request,
    shown,
)
from kvfs.errors import DamagedPages, KvfsError, NotPermitted
from kvfs.sizes import format_count, format_size

_OK = "ok"
_DRAFT = "draft"
_LABELS = {"dram": "DRAM", "ssd": "SSD"}
_PLACES = {"dram": "in DRAM", "ssd": "on the SSD"}


@dataclass(frozen=True, slots=True)
class _Checked:
    """What was found of a page: "ok" or a reason for each tier that has it, nothing for a draft. ``outcome``
    tells what repairing it came to: "repaired", "removed", or why neither; "" where it was not tried."""

    found: dict[str, str]
    outcome: str = ""

    @property
    def is_damaged(self) -> bool:
        return any(reason != _OK for reason in self.found.values())


@dataclass
class _Report:
    """What was found of all."""

    repair: bool
    pages: int = 0
    drafts: int = 0
    verified: dict[str, int] = field(default_factory=dict)
    """Pages by tier."""
    damaged: list[tuple[str, _Checked]] = field(default_factory=list)

    def note(self, path: str, checked: _Checked) -> None:
        if not checked.found:
            self.drafts += 1
            return
        self.pages += 1
        for tier in checked.found:
            self.verified[tier] = self.verified.get(tier, 0) + 1
        if checked.is_damaged:
            self.damaged.append((path, checked))

    def summary(self) -> str:
        counts = [(self.verified.get(tier, 0), place) for tier, place in _PLACES.items()]
        where = " and ".join(f"{count} {place}" for count, place in counts if count)
        drafts = f"; {format_count(self.drafts, 'file')} without a digest yet" if self.drafts else ""
        return f"{format_count(self.pages, 'page')} verified{where and ', ' + where}: all are whole{drafts}"

    def error(self, mountpoint: str) -> DamagedPages:
        count = f"{len(self.damaged)} of {format_count(self.pages, 'page')}"
        if not self.repair:
            return DamagedPages(f"{count} damaged: kvfs verify {mountpoint} --repair takes the damage away")
        outcomes = [checked.outcome for _, checked in self.damaged]
        repaired, removed = outcomes.count("repaired"), outcomes.count("removed")
        left = len(outcomes) - repaired - removed
        return DamagedPages(f"{count} were damaged: {repaired} repaired, {removed} removed, {left} left")


@click.command("verify", short_help="Compare every page with its digest.")
@click.argument("mountpoint", metavar="MNT")
@click.option(
    "--repair",
    is_flag=True,
    help="Take away what is damaged: a copy that is whole takes its place, or the page is a miss from then "
    "on. Also count what is on the SSD anew.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(mountpoint: str, repair: bool, as_json: bool) -> None:
    """Read every page at MNT, in DRAM and on the SSD, and compare it with its digest.

    Damaged pages are named, and the exit code is then 12, with --repair too: 0 says that all was whole. The
    mount serves meanwhile; reading a page in this way is no use of it. Ctrl-C ends it at any time.

    Pages that you may not read are not verified, and only their owner and root may repair them: use sudo.
    """
    path = mounts.resolve_mountpoint(mountpoint)
    require_mount(path)
    tiers, begun = read_status(path)["tiers"], time.monotonic()
    report, failures = _Report(repair), Failures("verified")
    check = _check_and_repair if repair else _check
    with progress("verifying", sum(tier["pages"] for tier in tiers.values())) as advance:
        for file, answer in ask_each(files_below(str(path)), check):
            advance()
            if isinstance(answer, OSError):
                failures.note(file, answer)
                continue
            report.note(file, answer)
            if answer.is_damaged and not as_json:
                print(_line(file, answer))
    problem = _recount(str(path)) if repair and "ssd" in tiers else None
    if as_json:
        print(json.dumps(_as_json(report, failures, str(path), time.monotonic() - begun), indent=2))
    elif not report.damaged:
        print(f"{path}: {report.summary()}")
    if not as_json and repair and "ssd" in tiers and problem is None:
        used = read_status(path)["tiers"]["ssd"]["used_bytes"]
        print(f"{path}: the SSD tier was counted anew: {format_size(used)} used")
    if report.damaged:
        raise report.error(str(path))
    failures.raise_if_any()
    if problem is not None:
        raise problem


def _check(path: str) -> _Checked:
    """In a thread."""
    answer = os.getxattr(path, VERIFY, follow_symlinks=False).decode()
    words = [] if answer == _DRAFT else [word.partition("=") for word in answer.split()]
    return _Checked({tier: reason for tier, _, reason in words})


def _check_and_repair(path: str) -> _Checked:
    """In a thread."""
    checked = _check(path)
    if not checked.is_damaged:
        return checked
    try:
        request(VERIFY, b"repair")(path)
        outcome = "not repaired" if _check(path).is_damaged else "repaired"
    except OSError as error:
        outcome = "removed" if has_left(error) else f"not repaired: {in_words(error)}"
    return _Checked(checked.found, outcome)


def _recount(mountpoint: str) -> KvfsError | None:
    """Counts the SSD tier anew; says why that failed."""
    try:
        ask_once(mountpoint, request(VERIFY, b"recount"))
    except PermissionError:
        return NotPermitted(f"only root and the owner of {mountpoint} may count its SSD tier anew")
    except OSError as error:
        return KvfsError(f"the SSD tier could not be counted anew: {in_words(error)}")
    return None


def _line(path: str, checked: _Checked) -> str:
    from kvfs.verification import REASONS

    words = [f"{_LABELS[tier]}: {REASONS.get(reason, reason)}" for tier, reason in checked.found.items()]
    return "; ".join(
        [f"{shown(path)}: {words[0]}", *words[1:], *([checked.outcome] if checked.outcome else [])]
    )


def _as_json(report: _Report, failures: Failures, mountpoint: str, seconds: float) -> dict[str, Any]:
    return {
        "mount": mountpoint,
        "pages": report.pages,
        "drafts": report.drafts,
        "verified": report.verified,
        "damaged": [
            {"path": path, **checked.found, "outcome": checked.outcome} for path, checked in report.damaged
        ],
        "unverified": [
            {"path": path, "reason": reason}
            for path, reason in [*((path, "permission denied") for path in failures.denied), *failures.others]
        ],
        "seconds": round(seconds, 3),
    }
