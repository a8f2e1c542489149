"""The three faces of the client behind one: each test is a coroutine that is given a client to await."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import trio

import kvfs

Scenario = Callable[[Any], Coroutine[Any, Any, None]]


class Awaited:
    """Something whose calls wait by blocking, with calls to await in their place; ``of`` is the thing."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.of, name)
        if not inspect.ismethod(found) or name in ("tensor", "read_into", "write", "size", "map"):
            return found

        async def call(*arguments: Any, **options: Any) -> Any:
            result = found(*arguments, **options)
            return Awaited(result) if hasattr(result, "commit") else result

        return call

    def __getitem__(self, key: str) -> Any:
        return self.of[key]

    async def __aenter__(self) -> Awaited:
        self.of.__enter__()
        return self

    async def __aexit__(self, *of: Any) -> None:
        self.of.__exit__(*of)


def run_threads(path: Path, scenario: Scenario) -> None:
    async def main() -> None:
        async with Awaited(kvfs.connect(path)) as client:
            await scenario(client)

    trio.run(main)


def run_trio(path: Path, scenario: Scenario) -> None:
    async def main() -> None:
        async with kvfs.connect_trio(path) as client:
            await scenario(client)

    trio.run(main)


def run_asyncio(path: Path, scenario: Scenario) -> None:
    async def main() -> None:
        async with kvfs.connect_asyncio(path) as client:
            await scenario(client)

    asyncio.run(main())


FACES = {"threads": run_threads, "trio": run_trio, "asyncio": run_asyncio}
