"""A server that replaces its process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dray.errors import ExperimentError
from dray.serve import server


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
        threading.Thread(target=time.sleep, args=(60,)).start()  # waits for the dead Ray
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
    again = {"_DRAY_SERVER_RESTARTED": str(time.time())}
    process = subprocess.run(
        [sys.executable, "-c", SERVER, *arguments],
        env={**os.environ, "DRAY_HOME": str(tmp_path), **again},
        stderr=subprocess.PIPE,
        text=True,
        timeout=50,
    )
    assert process.returncode == code
    assert ("has died again within 5 minutes" in process.stderr) == bool(code)
