"""``dray serve`` from its start to its end, without Ray and workers; one that replaces its process."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dray.errors import ExperimentError
from dray.serve import server
from dray.serve.client import Server
from dray.serve.control import Submitted
from tests.forks.process import Forked
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
            self._news.append(found.events("followed", after, wait_s=20))

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


def test_a_server_starts_again_as_it_was_started_but_not_twice_within_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    replaced: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda *given: replaced.append(given))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-I", "dray", "--port=8600"])
    server.restart({"HOME": "/root"}, said.append)
    [(program, command, environment)] = replaced
    assert (program, command) == (sys.executable, [sys.executable, "-I", "dray", "--port=8600"])
    assert environment.pop("HOME") == "/root"
    died = "a process of Ray on this machine has died"
    assert said == [f"{died}; the server starts again, and continues its queue"]
    with pytest.raises(ExperimentError, match=f"^{died} again within 5 minutes"):
        server.restart(environment, said.append)


SERVER = """
import contextlib, os, signal, sys, threading, time
from types import SimpleNamespace
from dray.serve import server

class Manager:
    def __init__(self, *given, **named):
        self.ray_died = threading.Event()

    def run(self, over):
        self.ray_died.set()
        threading.Thread(target=time.sleep, args=(600,)).start()  # waits for the dead Ray
        if sys.argv[1:]:
            signal.raise_signal(signal.SIGTERM)

    stop = close = lambda self: None

server.connect = lambda address: contextlib.nullcontext(SimpleNamespace(description="a cluster"))
server.listening = lambda *given: contextlib.nullcontext("http://127.0.0.1:8600")
server.Manager = Manager
server.serve("127.0.0.1", 8600, None, 600.0, print)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "code"), [(["SIGTERM"], 0), ([], 1)])
def test_a_server_ends_although_its_threads_wait_for_the_dead_ray(
    tmp_path: Path, arguments: list[str], code: int
) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    environment = {**os.environ, "DRAY_HOME": str(tmp_path), "_DRAY_SERVER_RESTARTED": str(time.time())}
    process = Forked(str(tmp_path / "server.py"), *arguments, environment=environment)
    _, errors = process.communicate(300)
    assert process.returncode == code
    assert ("has died again within 5 minutes" in errors) == bool(code)
