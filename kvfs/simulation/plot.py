"""Hit rates by pool size, as a picture in a file and as bars on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

from kvfs.errors import KvfsError, Unavailable, UsageError
from kvfs.simulation.replay import Outcome

SUFFIXES: Final = (".png", ".svg", ".pdf")
_WIDTH = 50
"""Of the longest bar, in characters."""
_EIGHTHS = " ▏▎▍▌▋▊▉"


def require_plot(text: str) -> Path:
    """The file that a picture can be written to; before long work is done for it. Raises UsageError for one
    that cannot be, and Unavailable where matplotlib is not installed."""
    path = Path(text)
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot writes {', '.join(SUFFIXES)} files, by their name: not {text!r}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot cannot write {path}: there is no directory {path.parent}")
    try:
        import matplotlib as _  # noqa: F401
    except ImportError:
        raise Unavailable("--plot needs matplotlib: pip install 'kvfs[plot]'") from None
    return path


def write_plot(outcomes: Sequence[Outcome], title: str, path: Path) -> None:
    """One line for each policy. Raises KvfsError where the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for policy in dict.fromkeys(outcome.policy for outcome in outcomes):
        points = sorted((one.pool_blocks, one.hit_rate) for one in outcomes if one.policy == policy)
        axes.plot(*zip(*points, strict=True), marker="o", label=policy)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("pool size in blocks")
    axes.set_ylabel("hit rate")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise KvfsError(f"--plot cannot write {path}: {error.strerror}") from None


def bars(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Lines of text: for each pool size a bar for each policy, all on one scale."""
    most = max(outcome.hit_rate for outcome in outcomes) or 1.0
    width = max(len(outcome.policy) for outcome in outcomes)
    for pool_blocks, group in groupby(outcomes, lambda outcome: outcome.pool_blocks):
        yield f"{pool_blocks:,} blocks"
        for outcome in group:
            eighths = round(outcome.hit_rate / most * _WIDTH * 8)
            bar = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
            yield f"  {outcome.policy:{width}}  {bar} {outcome.hit_rate:.4f}"
