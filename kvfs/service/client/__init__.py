"""The Python client of a mount: pages by key, many at once, without a copy where none is needed."""

from kvfs.service.client.asynchronous import AsyncClient, AsyncDrafts
from kvfs.service.client.client import Client, Drafts
from kvfs.service.client.connecting import connect, connect_asyncio, connect_trio
from kvfs.service.client.pages import Pages
from kvfs.service.client.plain_files import PageStat

__all__ = [
    "AsyncClient",
    "AsyncDrafts",
    "Client",
    "Drafts",
    "PageStat",
    "Pages",
    "connect",
    "connect_asyncio",
    "connect_trio",
]
