"""A node that is taken away in twenty seconds: its trial saves at once, and goes on, on another, before that."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import ray
from ray.cluster_utils import Cluster

import dray
from dray.desk.messages import Message, WorkerArrived
from tests.ray.harness import (
    TRIALS,
    Attempt,
    Meanwhile,
    attempts,
    journal,
    latest_checkpoint,
    lines,
    recorded,
    wait_for,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long]

BATCHES, DEADLINE_S = 200, 20


@dataclass(slots=True, kw_only=True)
class Story:
    result: dray.Result
    first: Attempt
    second: Attempt
    drained: float
    saved: float  # when the checkpoint of the first was there
    nodes: list[str]  # of each worker that came up
    times: dict[int, list[float]]  # of each process, when its batches began


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    assert not ray.is_initialized(), "another test left its connection to Ray"
    directory = tmp_path_factory.mktemp("preemption")
    record, path = directory / "record", directory / "experiment"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        # It reports, validates and saves at its end only.
        config = recorded(record, trials=1, batches=BATCHES, pause_s=0.1, min_validation_period=None)
        experiment = dray.Experiment(config, model_dir=TRIALS, path=path, address=cluster.address)
        nodes: list[str] = []
        told: dict[str, float] = {}

        def hear(message: Message) -> None:
            if isinstance(message, WorkerArrived):
                nodes.append(message.node)

        def fault() -> None:
            wait_for(lambda: len(lines(record)) > 5, "batches")
            drain(cluster.address, nodes[0])
            told["drained"] = time.time()
            checkpoint = wait_for(lambda: latest_checkpoint(path / "trial_0"), "a checkpoint", DEADLINE_S)
            told["saved"] = (checkpoint / "manifest.json").stat().st_mtime

        with Meanwhile(fault):
            result = experiment.run(on_message=hear)
        first, second = attempts(record)[0]
        times: dict[int, list[float]] = {}
        for line in lines(record):
            times.setdefault(line["pid"], []).append(line["time"])
        yield Story(result=result, first=first, second=second, nodes=nodes, times=times, **told)
    finally:
        ray.shutdown()
        cluster.shutdown()


def drain(address: str, node: str) -> None:
    """What a cloud's notice makes a node's own agent do."""
    options = {
        "--address": address,
        "--node-id": node,
        "--reason": "DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message": "spot",
        "--deadline-remaining-seconds": str(DEADLINE_S),
    }
    words = [word for option in options.items() for word in option]
    subprocess.run([sys.executable, "-m", "ray.scripts.scripts", "drain-node", *words], check=True, capture_output=True)


def test_trial_leaves_and_has_saved_long_before_the_deadline(story: Story) -> None:
    print(f"stopped {story.times[story.first.pid][-1] - story.drained:.2f} s after the notice, "
          f"saved after {story.saved - story.drained:.2f} s, "
          f"went on after {story.times[story.second.pid][1] - story.drained:.2f} s")  # fmt: skip
    assert story.times[story.first.pid][-1] < story.drained + DEADLINE_S / 2
    assert story.saved < story.drained + DEADLINE_S / 2


def test_trial_goes_on_elsewhere_without_a_batch_lost_or_trained_twice(story: Story) -> None:
    assert story.nodes[0] != story.nodes[-1]
    assert [*story.first.batches, *story.second.batches] == list(range(BATCHES))
    assert story.second.batches


def test_it_does_not_wait_for_the_node_to_be_gone(story: Story) -> None:
    assert story.times[story.second.pid][0] < story.drained + DEADLINE_S


def test_it_is_no_restart(story: Story) -> None:
    assert story.result.trials[["state", "restarts", "batches"]].values.tolist() == [["COMPLETED", 0, BATCHES]]
    assert not [record for record in journal(story.result.path) if record["event"] == "restarted"]
