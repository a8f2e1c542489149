"""Which part of a prompt can be restored from the pages that are present: rules, without I/O.

A model has one or more KV groups: layers that keep the same kind of state. A page of a group is what it
keeps of ``page_tokens`` tokens in a row; pages are numbered from the start of the prompt. A boundary is a
number of tokens after which an engine can go on as if it had computed all before. It is legal for a group
if the pages are there that the group needs to go on: every page for full attention (and MLA), those that
reach back as far as the window for a sliding window, and the one that ends at the boundary for a recurrent
or convolution state, which is a checkpoint and worth nothing at any other place. It is legal for a model if
it is legal for every group, and for an engine of several ranks if it is legal on each of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Group:
    """The layers of a model that keep one kind of state. Made by the three functions below."""

    page_tokens: int
    tokens_needed: int | None
    """How far a boundary reaches back, in tokens; None: to the start of the prompt."""

    def __post_init__(self) -> None:
        if self.page_tokens < 1:
            raise ValueError(f"a page of {self.page_tokens} tokens")
        if self.tokens_needed is not None and self.tokens_needed < 0:
            raise ValueError(f"a window of {self.tokens_needed} tokens")

    def pages_needed(self, start: int, boundary: int) -> range:
        """The pages to restore for ``boundary``, by an engine that has the tokens before ``start`` itself.

        A page with ``start`` in its middle is needed whole. ``boundary``: a multiple of ``page_tokens``.
        """
        if boundary % self.page_tokens:
            raise ValueError(f"{boundary} tokens are no whole number of pages of {self.page_tokens}")
        end = boundary // self.page_tokens
        reach = end if self.tokens_needed is None else math.ceil(self.tokens_needed / self.page_tokens)
        return range(min(max(start // self.page_tokens, end - reach), end), end)

    def boundaries(self, present: Sequence[bool], start: int = 0) -> set[int]:
        """Every legal boundary from ``start`` on, in tokens; page ``n`` is there if ``present[n]`` is true.

        Takes time in proportion to the pages.
        """
        first = start // self.page_tokens
        found = {start}
        run = 0
        """How many pages in a row are there, up to the one looked at."""
        for page in range(first, len(present)):
            run = run + 1 if present[page] else 0
            boundary = (page + 1) * self.page_tokens
            if boundary > start and run >= len(self.pages_needed(start, boundary)):
                found.add(boundary)
        return found


def full_attention(page_tokens: int) -> Group:
    """Every token sees all before it. MLA too."""
    return Group(page_tokens, None)


def sliding_window(page_tokens: int, tokens_needed: int) -> Group:
    """Every token sees the last ones only.

    ``tokens_needed``: how many tokens before the boundary the next one sees. Engines count differently: where
    the window of W tokens includes the token that is computed, it is W - 1.
    """
    return Group(page_tokens, tokens_needed)


def checkpoint(page_tokens: int) -> Group:
    """A recurrent or convolution state: the page that ends at a boundary holds all of it."""
    return Group(page_tokens, 1)


@dataclass(frozen=True, slots=True)
class Restoration:
    """What to bring back: ``pages`` has the pages of each group, in the order of the groups."""

    boundary: int
    pages: tuple[range, ...]


def legal_boundaries(groups: Sequence[Group], present: Sequence[Sequence[bool]], start: int = 0) -> set[int]:
    """The boundaries, in tokens, that are legal for all ``groups``; ``start`` always is: it restores nothing.

    ``present`` says for each group which of its pages are there.
    """
    each = [group.boundaries(pages, start) for group, pages in zip(groups, present, strict=True)]
    return set.intersection(*each) if each else {start}


def common_boundaries(ranks: Iterable[set[int]]) -> set[int]:
    """The boundaries that are legal on every rank of an engine. At least one rank."""
    return set.intersection(*ranks)


def restoration(
    groups: Sequence[Group], boundaries: Iterable[int], start: int, most_tokens: int
) -> Restoration:
    """The longest of ``boundaries`` that is at most ``most_tokens``, and the pages that it takes.

    Engines compute at least the last token of a prompt: for them ``most_tokens`` is its length less one.
    ``start``, with nothing to restore, where no boundary lies between.
    """
    boundary = max((one for one in boundaries if start <= one <= most_tokens), default=start)
    if boundary == start:
        return Restoration(start, tuple(range(0) for _ in groups))
    return Restoration(boundary, tuple(group.pages_needed(start, boundary) for group in groups))
