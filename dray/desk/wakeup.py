"""How coroutines of the desk wait for one another."""

from __future__ import annotations

import asyncio


class Signal:
    """Each `fire` wakes all coroutines that are waiting."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self) -> None:
        await self._event.wait()
