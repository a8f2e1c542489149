"""kvfs: the KV cache of large language models as a filesystem in hugepage DRAM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvfs.service.client import connect as connect
    from kvfs.service.client import connect_asyncio as connect_asyncio
    from kvfs.service.client import connect_trio as connect_trio

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``kvfs.connect`` and its like are imported when they are first asked for."""
    if name in ("connect", "connect_asyncio", "connect_trio"):
        from kvfs.service import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
