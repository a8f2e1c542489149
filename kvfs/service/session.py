"""What the daemon keeps for one connection."""

from __future__ import annotations

from dataclasses import dataclass

from kvfs.service.peers import Peer


@dataclass(slots=True, eq=False)
class Session:
    """``has_ended``: the client has gone."""

    peer: Peer
    has_ended: bool = False
