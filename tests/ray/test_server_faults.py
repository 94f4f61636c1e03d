"""kill -9 of a server's processes at random moments, ten times each, while three experiments run."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dray.serve.control import Submitted
from tests.ray.harness import lines
from tests.ray.serving import Served, served
from tests.ray.test_server import check_training

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures("ray_is_up"),
]

KILLS, BATCHES = 10, 250
NAMES = ("one", "two", "three")


def kill_server(server: Served, running: list[Submitted]) -> None:
    server.kill()
    server.restart()


def kill_driver(server: Served, running: list[Submitted]) -> None:
    for submitted in random.sample(running, len(running)):
        if (pid := server.driver_of(submitted)) is not None:
            os.kill(pid, signal.SIGKILL)
            return


def kill_worker(server: Served, running: list[Submitted]) -> None:
    def killed() -> bool:
        latest = [noted[-1] for name in NAMES if (noted := lines(server.record(name)))]
        with contextlib.suppress(ProcessLookupError):  # another one is about to train
            os.kill(max(latest, key=lambda line: line["time"])["pid"], signal.SIGKILL)
            return True
        return False

    server.wait_for(killed, "a process that trains")


@pytest.mark.parametrize("kill", [kill_server, kill_driver, kill_worker])
def test_three_experiments_survive_ten_deaths(kill: Callable[[Served, list[Submitted]], None], tmp_path: Path) -> None:
    random.seed(kill.__name__)
    with served(tmp_path / "results") as server:
        options = {"batches": BATCHES, "pause_s": 0.1, "max_restarts": 2 * KILLS}
        submitted = [server.submit(name, **options) for name in NAMES]
        for _ in range(KILLS):
            noted = sum(len(lines(server.record(name))) for name in NAMES)
            server.wait_for(lambda n=noted: sum(len(lines(server.record(name))) for name in NAMES) > n, "another batch")
            time.sleep(random.uniform(0, 3))
            running = [each for each in submitted if server.client.experiment(each.name).state == "RUNNING"]
            kill(server, running)
        for each in submitted:
            server.wait_until(each, "COMPLETED")
        for name in NAMES:
            check_training(server.record(name), trials=1, batches=BATCHES)
