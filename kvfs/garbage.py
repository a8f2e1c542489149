"""Python's search for garbage, kept from looking through very many objects that stay."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

MANY: Final = 10_000
"""Pages from which on it matters how long it takes to look through what was made of them."""


@contextmanager
def making_what_stays(count: Callable[[], int]) -> Iterator[None]:
    """Around what makes objects that stay, for ``count()`` pages at the end.

    No garbage is looked for meanwhile, and if they are many, never among them: at 100,000 pages that takes
    half a second, in which nothing else goes on, again and again.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if count() >= MANY:
            gc.freeze()
        if collects:
            gc.enable()
