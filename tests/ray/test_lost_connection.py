"""A worker that is up, but can't reach the desk any more, as when a firewall forgets its connection."""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path
from typing import Any

import pytest

import dray
from dray.desk.connection import DeskConnection
from dray.desk.messages import GroupEnded, Message
from dray.experiment import run
from tests.ray.harness import TRIALS, Meanwhile, attempts, ends, in_the_middle, recorded, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]

PIDFD_GETFD = 438


def cut(pid: int, port: int) -> int:
    """End a process's connections to this port; how many."""
    libc, process = ctypes.CDLL(None, use_errno=True), os.pidfd_open(pid)
    number = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        copied = libc.syscall(PIDFD_GETFD, process, int(name), 0)
        try:
            with socket.socket(fileno=copied) as its:
                if its.family == socket.AF_INET and its.getpeername()[1] == port:
                    its.shutdown(socket.SHUT_RDWR)
                    number += 1
        except OSError:  # no socket, or not connected
            continue
    os.close(process)
    return number


def test_its_trial_goes_on_in_another_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[DeskConnection] = []

    def connect(desk: Any) -> DeskConnection:
        made.append(connected(desk))
        return made[-1]

    connected = run.connect
    monkeypatch.setattr(run, "connect", connect)
    record, path = tmp_path / "record", tmp_path / "experiment"
    messages: list[Message] = []
    one = {"slot": "cpu", "max_slots": 1}
    config = recorded(record, trials=2, batches=40, pause_s=0.05, resources=one)

    def lose() -> None:
        trained = wait_for(lambda: in_the_middle(path, record), "a trial past its first checkpoint")
        assert cut(trained[0].pid, made[0]._endpoint.port) == 1  # noqa: SLF001

    with Meanwhile(lose):
        result = dray.Experiment(config, model_dir=TRIALS, path=path).run(on_message=messages.append)
    assert result.trials["state"].tolist() == ["COMPLETED"] * 2
    assert ends(path) == {0: 1, 1: 1}
    assert sorted(result.trials["restarts"]) == [0, 1], "it counts as one of its failures"
    first, again = next(mine for mine in attempts(record).values() if len(mine) == 2)
    assert again.pid != first.pid
    assert 0 < again.batches[0] <= first.batches[-1] + 1, "from its latest checkpoint"
    [lost] = [message for message in messages if isinstance(message, GroupEnded) and message.is_lost]
    assert lost.error.startswith("DeskUnreachable: lost the connection to the experiment's desk at ")
