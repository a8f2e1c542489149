"""Whether what DRAM has goes with what the SSD has: another mount may have had the SSD's directory meanwhile.

Each time that the directory is taken it says so with a new turn. DRAM that is kept, or outlives a daemon that
was killed, notes the turn in which it was filled.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvfs.errors import AttributeMissing
from kvfs.page import shown

if TYPE_CHECKING:
    from kvfs.tiers.base import Tier
    from kvfs.tiers.ssd import SsdTier

log = logging.getLogger("kvfs.storage.turns")


def begin_turn(dram: Tier, ssd: SsdTier) -> None:
    """Empties DRAM where the SSD was another mount's since: what it wrote, renamed and removed there is
    newer. An SSD that DRAM has never been with leaves it as it is, and so does one that nobody else had."""
    name = f"ssd-{ssd.identity}"
    try:
        noted = dram.get_attribute(b"", name).decode(errors="replace")
    except AttributeMissing:
        noted = ""
    if noted and noted != ssd.last_turn:
        dram.empty()
        log.warning(
            "%s was the SSD of %s since: what was left in DRAM is older, and is dropped",
            ssd.directory,
            shown(ssd.last_mount.encode()),
        )
    dram.set_attribute(b"", name, ssd.turn.encode())
