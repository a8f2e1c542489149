"""Where a crash matters most, and how a test lets the daemon die there.

``step("demote.written")`` stands where one thing was done to a tier and the next was not. A process that has
``KVFS_KILL_AT=demote.written:3`` in its environment ends itself with SIGKILL when it comes by for the third
time, in whatever thread. In every other process a step does nothing.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Final

VARIABLE: Final = "KVFS_KILL_AT"

STEPS: Final = (
    "seal.begun",
    "seal.digested",
    "seal.owned",
    "seal.stored",
    "demote.begun",
    "demote.written",
    "demote.published",
    "promote.opened",
    "promote.allocated",
    "promote.copied",
    "promote.described",
    "promote.renamed",
    "promote.installed",
    "evict.begun",
    "evict.unlinked",
    "rename.begun",
    "rename.dram",
    "rename.queued",
    "unlink.dram",
    "history.begun",
    "history.done",
)
"""All but those of the SSD tier itself (``ssd_base.STEPS``), which come by as ``ssd.created`` and so on."""
COMMIT_STEPS: Final = ("commit.described", "commit.named")
"""Those of the batch socket."""


class _Killer:
    def __init__(self, text: str) -> None:
        """``text`` is a step, or a step, a colon and a number."""
        self._name, _, count = text.partition(":")
        self._left = int(count or 1)
        self._lock = threading.Lock()

    def __call__(self, name: str) -> None:
        if name != self._name:
            return
        with self._lock:
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)


def _go_on(name: str) -> None:
    """Nobody is to die."""


step: Callable[[str], None] = _Killer(os.environ[VARIABLE]) if VARIABLE in os.environ else _go_on
