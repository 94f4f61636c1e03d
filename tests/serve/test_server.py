"""``dray serve`` from its start to its end, without Ray and workers."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dray.serve import server
from dray.serve.client import Server
from dray.serve.control import Submitted
from tests.report.simulated import simulated
from tests.serve.conftest import PORT
from tests.serve.fake import FakeControl


class Ending(FakeControl):
    """Somebody follows an experiment when the server is told to end."""

    def __init__(self, results: Path) -> None:
        super().__init__(results)
        self.is_closed, self.asked, self.asked_too_late = False, threading.Event(), False
        self.ray_died = threading.Event()

    def experiment(self, name: str) -> Submitted:
        self.asked.set()
        self.asked_too_late |= self.is_closed
        return super().experiment(name)

    def run(self, over: Callable[[], bool]) -> None:
        found = Server.find()
        assert found is not None
        after = (self.results / "followed" / "journal.jsonl").stat().st_size
        self._news: list[dict[str, Any]] = []

        def follow() -> None:
            self._news.append(found.events("followed", after, wait_s=2))

        self._follower = threading.Thread(target=follow)
        self._follower.start()
        self.asked.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        while not over():
            pass

    def stop(self) -> None:
        assert self._follower.is_alive()

    def close(self) -> None:
        self.is_closed = True
        self._follower.join()
        assert self._news[0]["lines"] == [], "it was answered, and asks again once the next server is up"


def test_a_follower_is_answered_before_the_verbs_end(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated(results / "followed", 4)
    control = Ending(results)
    control.put("followed", "QUEUED")
    cluster = SimpleNamespace(description="a cluster")
    monkeypatch.setattr(server, "connect", lambda address: contextlib.nullcontext(cluster))
    monkeypatch.setattr(server, "Manager", lambda *given, **named: control)
    server.serve("127.0.0.1", PORT, None, 0.0, lambda line: None)
    assert control.is_closed
    assert not control.asked_too_late
