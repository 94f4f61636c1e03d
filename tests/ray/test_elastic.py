"""A trial on as many nodes as there are: one joins, is taken away, another joins, and dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

import dray
from dray.config.load import load_config
from dray.experiment.local import run_local
from tests.ray.harness import TRIALS, descendants, journal, latest_checkpoint, lines, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

BATCHES, BATCH_SIZE, SAVED_EVERY = 2000, 16, 20
RECORDS = 64  # of the trial's data
PER_EPOCH = RECORDS // BATCH_SIZE
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 5000,  # a dead one refuses the connection at once; on a busy machine one may be slow
    "health_check_failure_threshold": 2,
}
"""A node's death is noticed within two seconds."""


def config(directory: Path, pause_s: float) -> dict[str, Any]:
    enough = directory / "enough"
    return {
        "name": "elastic",
        "entrypoint": "elastic:Elastic",
        "hyperparameters": {
            "global_batch_size": BATCH_SIZE,
            "record": str(directory / "record"),
            "pause_s": pause_s,
            "enough": str(enough),
        },
        "searcher": {"name": "single", "metric": "error", "max_length": {"batches": BATCHES}},
        "resources": {"slots_per_trial": {"min": 1, "max": 2}, "slot": "cpu"},
        "min_checkpoint_period": {"batches": SAVED_EVERY},
        "reproducibility": {"experiment_seed": 7},
    }


@dataclass(slots=True, kw_only=True)
class Story:
    result: dray.Result
    lines: list[dict[str, Any]]
    after_s: dict[str, float] = field(default_factory=dict)
    """From what was done to a node to the first batch at the new size."""
    left: list[str] = field(default_factory=list)  # placement groups that there still are


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    assert not ray.is_initialized(), "another test left its connection to Ray"
    directory = tmp_path_factory.mktemp("elastic")
    record = directory / "record"
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": HEALTH},
    )
    after_s: dict[str, float] = {}

    def change(what: str, deed: Callable[[], Any], size: int) -> Any:
        """Do something to a node of a group that has trained for a while; wait for the group of this size."""
        began = len(lines(record))
        wait_for(lambda: len(lines(record)) > began + 50, f"batches before {what}")
        before, made = time.time(), deed()

        def found() -> list[float]:
            return [line["time"] for line in lines(record) if line["size"] == size and line["time"] > before]

        after_s[what] = wait_for(found, f"a batch on {size} after {what}", 180)[0] - before
        return made

    def changes() -> None:
        try:
            wait_for(lambda: lines(record), "a batch")
            node = change("a node joins", lambda: cluster.add_node(num_cpus=1), 2)
            change("a node is taken away", lambda: drain(cluster.address, node.node_id), 1)
            cluster.remove_node(node)
            node = change("another node joins", lambda: cluster.add_node(num_cpus=1), 2)
            change("a node dies", lambda: kill(node), 1)
        finally:
            (directory / "enough").touch()

    try:
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        experiment = dray.Experiment(config(directory, pause_s=0.1), model_dir=TRIALS, path=directory / "experiment")
        # Nodes are added by the main thread alone.
        running = ThreadPoolExecutor(1).submit(experiment.run)
        changes()
        result = running.result(120)
        left = [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"]
        yield Story(result=result, lines=lines(record), after_s=after_s, left=left)
    finally:
        ray.shutdown()
        cluster.shutdown()


def drain(address: str, node: str) -> None:
    """What a cloud's notice makes a node's own agent do: it has 20 seconds left."""
    options = {
        "--address": address,
        "--node-id": node,
        "--reason": "DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message": "spot",
        "--deadline-remaining-seconds": "20",
    }
    words = [word for option in options.items() for word in option]
    subprocess.run([sys.executable, "-m", "ray.scripts.scripts", "drain-node", *words], check=True, capture_output=True)


def kill(node: Any) -> None:
    """With all that runs on it."""
    raylet = node.all_processes["raylet"][0].process.pid
    for pid in (raylet, *descendants(raylet)):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The same trial in one process: its directory, and what it noted."""
    directory = tmp_path_factory.mktemp("alone")
    run = run_local(load_config(config(directory, pause_s=0.0)), TRIALS, path=directory / "run")
    return run, lines(directory / "record")


def steps(noted: list[dict[str, Any]]) -> list[list[int]]:
    """The records of each step that counts, in order: one that was trained again, as it was the last time."""
    found: dict[int, dict[int, list[int]]] = {}
    sizes = {line["batch"]: line["size"] for line in noted}
    for line in noted:
        mine = found.setdefault(line["batch"], {})
        mine.pop(line["pid"], None)
        mine[line["pid"]] = line["records"]
    return [sorted(chain.from_iterable(list(found[batch].values())[-sizes[batch] :])) for batch in sorted(found)]


def test_trial_grows_and_shrinks_with_the_cluster(story: Story) -> None:
    for what, seconds in story.after_s.items():
        print(f"first batch {seconds:.1f} s after {what}")
    sizes = [line["size"] for line in story.lines]
    changes = [size for size, before in zip(sizes, [0, *sizes], strict=False) if size != before]
    assert changes == [1, 2, 1, 2, 1]
    assert story.result.trials[["state", "batches"]].values.tolist() == [["COMPLETED", BATCHES]]


def test_each_step_trains_on_the_records_of_one_process(story: Story, alone: tuple[Path, list[dict[str, Any]]]) -> None:
    found = steps(story.lines)
    assert found == [sorted(line["records"]) for line in alone[1]]
    for epoch in range(BATCHES // PER_EPOCH):
        records = chain.from_iterable(found[epoch * PER_EPOCH : (epoch + 1) * PER_EPOCH])
        assert sorted(records) == list(range(RECORDS))


def test_only_the_node_that_died_costs_batches_and_a_restart(story: Story) -> None:
    twice = len({(line["batch"], line["pid"]) for line in story.lines}) - len(
        {(line["batch"], rank) for line in story.lines for rank in range(line["size"])}
    )
    assert 0 <= twice <= 2 * SAVED_EVERY
    assert [record["event"] for record in journal(story.result.path) if "error" in record] == ["restarted"]
    assert story.result.trials["restarts"].tolist() == [1]


def test_weights_are_those_of_one_process(story: Story, alone: tuple[Path, list[dict[str, Any]]]) -> None:
    mine, expected = (weights(path) for path in (story.result.path / "trial_0", alone[0]))
    assert mine.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-5)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    checkpoint = latest_checkpoint(directory)
    assert checkpoint is not None
    assert checkpoint.name == f"checkpoint_{BATCHES}"
    return dict(torch.load(checkpoint / "state-dict.pth", weights_only=True)["models_state_dict"][0])


def test_nothing_is_held_afterwards(story: Story) -> None:
    assert story.left == []
