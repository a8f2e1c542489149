"""How the demo speaks: what it does now, how long that takes, and what came of it."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path


def say(text: str) -> None:
    """One line, shown at once."""
    print(f"   {text}", flush=True)


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Show that something takes its time; on a terminal, with the seconds so far."""
    if not sys.stdout.isatty():
        say(f"{what} …")
        yield
        return
    ended = threading.Event()
    started = time.monotonic()

    def show() -> None:
        while True:
            print(f"\r   {what} … {time.monotonic() - started:.0f} s ", end="", flush=True)
            if ended.wait(0.5):
                print("\r\033[K", end="", flush=True)
                return

    thread = threading.Thread(target=show)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def mebibytes(value: int) -> str:
    return f"{value / (1 << 20):.1f} MiB"


def summarize(answer_file: Path, cold: float, warm: float, tokens: int) -> None:
    """Leave what came of it all beside the answer, in one line: the demo ends with it."""
    answer_file.with_name("summary").write_text(
        f"time to first token: {seconds(cold)} cold, {seconds(warm)} warm, {cold / warm:,.0f} times sooner; "
        f"all {tokens} tokens of the answer are equal\n"
    )
