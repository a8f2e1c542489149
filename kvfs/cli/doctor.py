"""``kvfs doctor``: what this machine can do for kvfs, and what to change where it cannot."""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from kvfs.errors import Unavailable

if TYPE_CHECKING:
    from kvfs.doctor import Check

_VERDICTS = {True: "ok", None: "note", False: "bad"}
_COLOURS = {True: "green", None: "yellow", False: "red"}
_PLAIN_WIDTH = 100


@click.command("doctor", short_help="Say what this machine can do, and what to change.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list with one object a check.")
def command(as_json: bool) -> None:
    """Check kernel, FUSE, memory and limits by trying what a mount would do; nothing is changed or left.

    Run it as the user who will mount. "ok" is as it should be; "note" is worth knowing; "bad" costs speed or
    safety, and the line below says what to do. The exit code is 0, or 6 when kvfs cannot mount here at all.
    """
    from kvfs.doctor import examine

    checks = examine()
    if as_json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))
    elif sys.stdout.isatty():
        _print_table(checks)
    else:
        print(plain(checks))
    if any(check.prevents_mounting for check in checks):
        sys.exit(Unavailable.exit_code)


def plain(checks: Sequence[Check]) -> str:
    """One line a check, and below it what it means and what to do; no colours, no frames."""
    width = max(len(check.name) for check in checks)
    margin = " " * (width + 8)
    lines = []
    for check in checks:
        lines += textwrap.wrap(
            f"{_VERDICTS[check.ok]:4}  {check.name:{width}}  {check.found}",
            _PLAIN_WIDTH,
            subsequent_indent=margin,
            break_long_words=False,
            drop_whitespace=True,
        )
        for label, text in _advice(check):
            lines += textwrap.wrap(
                f"{label}: {text}",
                _PLAIN_WIDTH,
                initial_indent=margin,
                subsequent_indent=margin,
                break_long_words=False,
            )
    return "\n".join(lines)


def _advice(check: Check) -> list[tuple[str, str]]:
    advice = [("so", check.consequence), ("do", check.remedy)]
    return [(label, text) for label, text in advice if text]


def _print_table(checks: Sequence[Check]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        text = Text(check.found)
        for label, advice in _advice(check):
            text.append(f"\n{label}: {advice}", style="dim" if label == "so" else "bold")
        table.add_row(Text(_VERDICTS[check.ok], style=_COLOURS[check.ok]), check.name, text)
    Console().print(table)
