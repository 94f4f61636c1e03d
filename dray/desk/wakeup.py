"""How coroutines of the desk wait for a change."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable


class Wakeups:
    """`wake` wakes all coroutines that wait for a change of the same thing."""

    def __init__(self) -> None:
        self._events: dict[Hashable, asyncio.Event] = {}

    def wake(self, thing: Hashable) -> None:
        if (event := self._events.pop(thing, None)) is not None:
            event.set()

    async def wait(self, thing: Hashable) -> None:
        await self._events.setdefault(thing, asyncio.Event()).wait()
