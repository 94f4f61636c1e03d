"""Idempotency keys: a request that is sent again, because its answer was lost, is carried out once.

A client sends ``Idempotency-Key`` with a request that creates something. The key, a digest of the request, and its
answer are written to a file, so that this also holds after a server was killed: if the request had begun, its id leads
to what it has created.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from dray.errors import Invalid
from dray.private import replaced
from dray.serve.answers import KeyUsed
from dray.serve.control import KEY
from searchers.journal import Journal

KEPT_S = 86_400.0  # how long a key is remembered at least
MOST_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Attempt:
    """One of the attempts to send a request. `id`: the same for each; "" without a key."""

    id: str = ""
    is_repeat: bool = False  # an earlier one had begun, and its server was killed


@dataclass(slots=True)
class _Known:
    sent: str  # a digest of the request
    id: str
    time: float
    answer: Any = None  # JSON; None: it has not ended, or has failed


class Keys:
    """The keys of a server, for the thread of its event loop."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "keys.jsonl"
        self._journal: Journal | None = None  # opened with the first key: `dray ui` has none
        self._known: dict[str, _Known] = {}
        self._running: dict[str, asyncio.Task[Any]] = {}

    async def once(
        self, request: web.Request, owner: str, sent: bytes, perform: Callable[[Attempt], Awaitable[Any]]
    ) -> Any:
        """The JSON that answers a request: of `perform`, or of an earlier attempt.

        Args:
            owner: the token; keys of different ones are different.
            sent: what was sent.

        Raises:
            KeyUsed: the key was sent with another request.
        """
        key = request.headers.get(KEY)
        if key is None:
            return await perform(Attempt())
        if not 0 < len(key) <= MOST_CHARACTERS:
            raise Invalid(f"{KEY} must have 1 to {MOST_CHARACTERS} characters, got {len(key)}")
        name = _digest(owner, key)
        asked = _digest(request.method, request.path, sent.hex())
        self._open()
        known, is_repeat = self._known.get(name), False
        if known is None:
            known = self._known[name] = _Known(asked, f"{time.time_ns():020d}-{name[:8]}", time.time())
        elif known.sent != asked:
            raise KeyUsed(f"this {KEY} was sent with another request; send each request with a key of its own")
        elif known.answer is not None:
            return known.answer
        else:
            is_repeat = True
        if (task := self._running.get(name)) is None:
            task = asyncio.ensure_future(self._perform(name, known, is_repeat, perform))
            self._running[name] = task
        return await asyncio.shield(task)  # a client that has gone leaves the request to the next attempt

    async def _perform(
        self, name: str, known: _Known, is_repeat: bool, perform: Callable[[Attempt], Awaitable[Any]]
    ) -> Any:
        try:
            await self._note({"key": name, "sent": known.sent, "id": known.id, "time": known.time})
            known.answer = await perform(Attempt(known.id, is_repeat))
            await self._note({"key": name, "answer": known.answer})
            return known.answer
        except Exception:
            if known.answer is None:  # nothing was created: the same key may try again
                del self._known[name]
                await self._note({"key": name, "answer": None})
            raise
        finally:
            del self._running[name]

    def close(self) -> None:
        """Close the file: the server is ending."""
        if self._journal is not None:
            self._journal.close()

    async def _note(self, record: dict[str, Any]) -> None:
        assert self._journal is not None
        await asyncio.to_thread(self._journal.append, record)

    def _open(self) -> None:
        if self._journal is not None:
            return
        known: dict[str, _Known] = {}
        for record in Journal.read(self._path) if self._path.exists() else ():
            name, answer = str(record["key"]), record.get("answer")
            if "id" in record:
                sent, number = str(record["sent"]), str(record["id"])
                known[name] = _Known(sent, number, float(str(record["time"])), answer)
            elif answer is None:
                known.pop(name, None)
            elif name in known:
                known[name].answer = answer
        self._known = {name: each for name, each in known.items() if each.time > time.time() - KEPT_S}
        if len(self._known) < len(known):  # write the file anew, without what is forgotten
            lines = [json.dumps({"key": name, **asdict(each)}) + "\n" for name, each in self._known.items()]
            with replaced(self._path) as unnamed:
                unnamed.write_text("".join(lines))
        self._journal = Journal(self._path)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode(errors="replace")).hexdigest()
