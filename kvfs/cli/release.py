"""Giving back the memory of a mount that nobody serves."""

from __future__ import annotations

from kvfs.config import MINIMUM_POOL_BYTES
from kvfs.state import StateDirectory
from kvfs.tiers.dram import DramTier


def release_state(state: StateDirectory) -> bool:
    """Deletes the DRAM of a state directory, and the directory; says whether there was one.

    Raises StateInUse while a daemon serves it.
    """
    if not state.exists():
        return False
    state.acquire()
    try:
        if state.dram.exists():
            # Taking the tier over is what a new daemon would do; its size does not matter any more.
            DramTier.attach(state.dram, MINIMUM_POOL_BYTES, "off", "").close(keep=False)
        state.remove()
    finally:
        state.release()
    return True
