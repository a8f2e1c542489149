"""``kvfs simulate``: which policy, and which pool size, on a trace of one's own."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvfs.errors import UsageError
from kvfs.sizes import format_count

if TYPE_CHECKING:
    from kvfs.simulation.replay import Outcome
    from kvfs.simulation.trace import Advance, Trace

NAMES = ("default", "lru", "fifo", "s3fifo", "arc", "optimum")
ALL = "all"
SHARES = (1, 2, 5, 10, 20, 50)
"""Pool sizes where none are given: percentages of the trace's distinct blocks."""
_SIZE = re.compile("[1-9][0-9]{0,17}")


def _parse_sizes(context: click.Context, parameter: click.Parameter, text: str | None) -> list[int] | None:
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(_SIZE.fullmatch(word) for word in words):
        raise UsageError(
            f"--pool-blocks takes whole numbers from 1 on, separated by commas: not {text!r:.80}"
        )
    return sorted({int(word) for word in words})


@click.command("simulate", short_help="Replay a trace: hit rates by policy and pool size.")
@click.argument("name", metavar="TRACE")
@click.option(
    "--pool-blocks",
    "sizes",
    metavar="N[,N…]",
    callback=_parse_sizes,
    help=f"Pool sizes in blocks. Default: {', '.join(map(str, SHARES))} % of the blocks in the trace.",
)
@click.option(
    "--policy",
    "policies",
    type=click.Choice([*NAMES, ALL]),
    multiple=True,
    default=[ALL],
    show_default=True,
    help="What to replay: `default` is what a mount runs, `optimum` knows the future. May be given again.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--plot", metavar="FILE.png", help="Write a picture. Needs matplotlib.")
def command(
    name: str, sizes: list[int] | None, policies: Sequence[str], as_json: bool, plot: str | None
) -> None:
    """Replay the requests of TRACE and print the share of blocks found, by policy and pool size.

    TRACE, a file or "-" for standard input, has a line of JSON for each request: {"hash_ids": [0, 1, 2]}
    names the blocks of its prompt from the head on; other fields do not matter. Equal numbers are equal
    prefixes. A block is found if it and all before it are in the pool; then the request uses all its blocks,
    and those that were not there come in.
    "2nd half" counts the later half of the requests only, for which the pool is warm.

    It needs no mount, and `default` is the very code that a mount runs.
    """
    from kvfs.simulation.plot import bars, require_plot, write_plot

    trace = Path("/dev/stdin" if name == "-" else name)
    picture = None if plot is None else require_plot(plot)
    requests = _read(trace)
    names = NAMES if ALL in policies else [name for name in NAMES if name in policies]
    outcomes = _replay_all(requests, names, sizes or _sweep(requests))
    if picture is not None:
        write_plot(outcomes, trace.name, picture)
    if as_json:
        print(json.dumps(_as_json(trace, requests, outcomes), indent=2))
        return
    print(
        f"{trace}: {format_count(len(requests.requests), 'request')}, "
        f"{format_count(requests.references, 'block')}, {requests.distinct} of them distinct"
    )
    _print_table(outcomes)
    if len({outcome.pool_blocks for outcome in outcomes}) > 1 and picture is None:
        print("", *bars(outcomes), sep="\n")


def _read(path: Path) -> Trace:
    from kvfs.simulation.trace import read_trace

    try:
        size = path.stat().st_size
    except OSError:
        size = 0  # reading it will say what is wrong
    with _progress("reading", size) as advance:
        return read_trace(path, advance)


def _sweep(trace: Trace) -> list[int]:
    return sorted({max(1, trace.distinct * share // 100) for share in SHARES})


def _replay_all(trace: Trace, names: Sequence[str], sizes: Sequence[int]) -> list[Outcome]:
    """By pool size, and for each by policy."""
    from kvfs.simulation.baselines import POLICIES
    from kvfs.simulation.replay import replay

    with _progress("replaying", len(sizes) * len(names) * len(trace.requests)) as advance:
        return [replay(trace, name, POLICIES[name], size, advance) for size in sizes for name in names]


@contextmanager
def _progress(doing: str, total: int) -> Iterator[Advance]:
    """A bar on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda amount: bar.advance(task, amount)


def _print_table(outcomes: Sequence[Outcome]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for title in ("pool blocks", "policy", "hit rate", "2nd half"):
        table.add_column(title, justify="left" if title == "policy" else "right")
    before = 0
    for outcome in outcomes:
        size = "" if outcome.pool_blocks == before else f"{outcome.pool_blocks}"
        table.add_row(size, outcome.policy, f"{outcome.hit_rate:.4f}", f"{outcome.late_hit_rate:.4f}")
        before = outcome.pool_blocks
    Console(width=None if sys.stdout.isatty() else 100, highlight=False).print(table)


def _as_json(path: Path, trace: Trace, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """``policies`` has an object for each policy if there is one pool size, and else a list of such objects,
    by pool size."""
    policies: dict[str, Any] = {}
    for outcome in outcomes:
        policies.setdefault(outcome.policy, []).append(
            {
                "pool_blocks": outcome.pool_blocks,
                "hit_rate": round(outcome.hit_rate, 6),
                "second_half_hit_rate": round(outcome.late_hit_rate, 6),
                "hits": outcome.hits,
                "references": outcome.references,
            }
        )
    if len({outcome.pool_blocks for outcome in outcomes}) == 1:
        policies = {name: only for name, (only,) in policies.items()}
    return {
        "trace": str(path),
        "requests": len(trace.requests),
        "references": trace.references,
        "distinct_blocks": trace.distinct,
        "policies": policies,
    }
