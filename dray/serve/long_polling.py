"""Long polling for new events of experiments: one look at a journal serves all who follow it from the same place."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from dray.records.directory import ExperimentDirectory
from dray.serve.control import ACTIVE
from dray.serve.logs import Events

POLL_S = 0.1  # how often the size of a journal is checked while somebody waits for it
LOOK_S = 1.0  # the longest time without a look, as a state can change without a record
LONGEST_WAIT_S = 25.0  # the longest wait of a request: proxies cut off requests after a minute


class LongPolling:
    """`look` returns an experiment's events after an offset, see `dray.serve.logs.events_after`."""

    def __init__(self, look: Callable[[Path, int], Awaitable[Events]]) -> None:
        self._look = look
        self._watches: dict[tuple[Path, int], asyncio.Task[Events]] = {}
        self._ending = False

    async def after(self, path: Path, after: int, wait_s: float) -> Events:
        """The events after an offset, as soon as there are any, the experiment is not active, or `wait_s` is over."""
        until = asyncio.get_running_loop().time() + min(wait_s, LONGEST_WAIT_S)
        while (left_s := until - asyncio.get_running_loop().time()) > 0 and not self._ending:
            if (watch := self._watches.get((path, after))) is None:
                watch = self._watches[path, after] = asyncio.create_task(self._watch(path, after))
            await asyncio.wait({watch}, timeout=left_s)
            if watch.done():
                if (news := watch.result())["lines"]:
                    return news
                if news["state"] not in ACTIVE:
                    break  # that was perhaps before this request, which may come after its activation
        return await self._look(path, after)

    async def end(self) -> None:
        """Answer all who wait, because the server is ending."""
        self._ending = True
        await asyncio.gather(*self._watches.values(), return_exceptions=True)

    async def _watch(self, path: Path, after: int) -> Events:
        """News, or what there is after the longest wait: nobody may be waiting any more."""
        journal, clock, place = ExperimentDirectory(path).journal, asyncio.get_running_loop().time, (path, after)
        until, pause_s, looked_at = clock() + LONGEST_WAIT_S, POLL_S, clock()
        try:
            while True:
                size = _size(journal)
                news = await self._look(path, after)
                if not _is_quiet(news) or clock() >= until:
                    return news
                after, looked_at = news["next"], clock()  # over records without a line
                while _size(journal) == size and clock() < looked_at + pause_s:
                    if self._ending:
                        return news
                    await asyncio.sleep(POLL_S)
                pause_s = min(2 * pause_s, LOOK_S)  # a state changes soon after a record, or seldom
        finally:
            del self._watches[place]


def _is_quiet(news: Events) -> bool:
    return not news["lines"] and news["state"] in ACTIVE


def _size(journal: Path) -> int:
    try:
        return os.stat(journal).st_size
    except OSError:  # `look` says what is wrong
        return -1
