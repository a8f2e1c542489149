"""What the daemon keeps for one connection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from kvfs.service.finding import Finder
from kvfs.service.peers import Peer

if TYPE_CHECKING:
    from kvfs.service.drafts import Draft


@dataclass(slots=True, eq=False)
class Session:
    """``drafts`` by their numbers, which are never used twice."""

    peer: Peer
    finder: Finder
    drafts: dict[int, Draft] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
