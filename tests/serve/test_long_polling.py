"""What waits for an experiment's events, with a look that a test decides."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dray.serve import long_polling
from dray.serve.long_polling import LongPolling


class Journal:
    """A running experiment whose first looks find nothing but what a test says."""

    def __init__(self, found: list[dict[str, Any]]) -> None:
        self.looks: list[int] = []
        self._found: Iterator[dict[str, Any]] = iter(found)

    async def look(self, path: Path, after: int) -> dict[str, Any]:
        self.looks.append(after)
        return {"lines": [], "next": after, "state": "RUNNING", **next(self._found, {})}


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_polling, "POLL_S", 0.001)


def test_one_look_serves_all_followers_at_the_same_place(tmp_path: Path) -> None:
    journal = Journal([{}, {"next": 70}, {}, {"lines": ["trial 0 started"], "next": 90}])

    async def follow() -> list[dict[str, Any]]:
        waits = LongPolling(journal.look)
        return await asyncio.gather(*(waits.after(tmp_path, 40, 20.0) for _ in range(200)))

    found = asyncio.run(follow())
    assert [(each["lines"], each["next"]) for each in found] == [(["trial 0 started"], 90)] * 200
    assert journal.looks == [40, 40, 70, 70]


def test_an_end_without_a_record_is_told_as_it_is_after_the_request(tmp_path: Path) -> None:
    ended = Journal([{}, {}, {"state": "STOPPED"}, {"state": "STOPPED"}])
    assert asyncio.run(LongPolling(ended.look).after(tmp_path, 0, 20.0))["state"] == "STOPPED"
    activated = Journal([{}, {"state": "STOPPED"}, {"state": "QUEUED"}])
    assert asyncio.run(LongPolling(activated.look).after(tmp_path, 0, 20.0))["state"] == "QUEUED"


def test_a_server_that_ends_answers_those_who_wait(tmp_path: Path) -> None:
    quiet = Journal([])

    async def end() -> dict[str, Any]:
        waits = LongPolling(quiet.look)
        waiting = asyncio.create_task(waits.after(tmp_path, 0, 20.0))
        while not quiet.looks:
            await asyncio.sleep(0)
        await waits.end()
        return await waiting

    assert asyncio.run(end())["state"] == "RUNNING"
