"""A worker that loses its connection for a moment, as when a firewall forgets it, trains on under its lease."""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path

import pytest

import dray
from dray.desk.messages import GroupEnded, Message
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


def test_a_trial_trains_on_when_its_connection_is_cut(tmp_path: Path) -> None:
    record, path = tmp_path / "record", tmp_path / "experiment"
    messages: list[Message] = []
    one = {"slot": "cpu", "max_slots": 1}
    config = recorded(record, trials=2, batches=40, pause_s=0.05, resources=one)
    experiment = dray.Experiment(config, model_dir=TRIALS, path=path)
    cuts: list[int] = []

    def lose() -> None:
        [trained] = wait_for(lambda: in_the_middle(path, record), "a trial past its first checkpoint")
        port = experiment.last_run._loop.endpoint.port  # noqa: SLF001
        cuts.append(cut(trained.pid, port))

    with Meanwhile(lose):
        result = experiment.run(on_message=messages.append)
    assert cuts == [1]
    assert result.trials["state"].tolist() == ["COMPLETED"] * 2
    assert result.trials["restarts"].tolist() == [0, 0]
    assert ends(path) == {0: 1, 1: 1}
    assert all(len(mine) == 1 and mine[0].batches == tuple(range(40)) for mine in attempts(record).values())
    assert not [message for message in messages if isinstance(message, GroupEnded) and message.is_lost]
