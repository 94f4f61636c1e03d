"""A trial on two of several nodes, one of which is lost in the middle: it goes on with another, and learns the same."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

import dray
from dray.desk.messages import Message, WorkerArrived
from tests.forks.process import forked_workers
from tests.ray.harness import TRIALS, Meanwhile, descendants, journal, lines, recorded, wait_for, weights
from tests.ray.test_elastic import HEALTH
from tests.ray.test_preemption import drain

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

BATCHES, SAVED_EVERY, MIDDLE = 120, 20, 50
WHOLE, SHARDED = "recorded:Recorded", "sharded:Sharded"
"""Trials that have all of a model on each rank, and that share it."""


@dataclass(slots=True, kw_only=True)
class Ran:
    """What a run of the trial was.

    Attributes:
        nodes: of each start of its group, of two workers.
        lost: the node that was taken away, and when.
    """

    path: Path
    noted: list[dict[str, Any]]
    result: dray.Result
    nodes: list[set[str]] = field(default_factory=list)
    lost: tuple[str, float] = ("", 0.0)

    @property
    def batches(self) -> list[list[int]]:
        """What each process trained, in the order of their starts."""
        found: dict[int, list[int]] = {line["pid"]: [] for line in self.noted}
        for line in self.noted:
            if "batch" in line:
                found[line["pid"]].append(line["batch"])
        return list(found.values())

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """At its end."""
        return weights(self.path / "trial_0" / f"checkpoint_{BATCHES}")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    assert not ray.is_initialized(), "another test left its connection to Ray"
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": HEALTH, **forked_workers()}
    there = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(3):
            there.add_node(num_cpus=1, **forked_workers())
        yield there
    finally:
        ray.shutdown()
        there.shutdown()


def run(
    cluster: Cluster,
    directory: Path,
    lose: Callable[[Any, list[dict[str, Any]]], object] | None,
    *,
    entrypoint: str = WHOLE,
) -> Ran:
    """Train the trial; in the middle, lose the second node that it has: `lose` is given it, and what was noted."""
    record = directory / "record"
    config = recorded(
        record,
        trials=1,
        batches=BATCHES,
        pause_s=0.1 if lose else 0.0,
        resources={"slots_per_trial": 2, "slot": "cpu"},
        min_validation_period=None,
        min_checkpoint_period={"batches": SAVED_EVERY},
        entrypoint=entrypoint,
    )
    config["hyperparameters"] |= {"held_at": -1, "until": ""}
    nodes: list[set[str]] = []
    arrived: list[str] = []
    lost: list[tuple[str, float]] = []

    def hear(message: Message) -> None:
        if isinstance(message, WorkerArrived):
            arrived.append(message.node)
            nodes[:] = [set(arrived[at : at + 2]) for at in range(0, len(arrived), 2)]

    def fault() -> None:
        if lose is not None:
            wait_for(lambda: any(line.get("batch", 0) > MIDDLE for line in lines(record)), "the middle", 180)
            node = max(nodes[-1])
            lost.append((node, time.time()))
            lose(next(each for each in cluster.worker_nodes if each.node_id == node), lines(record))

    experiment = dray.Experiment(config, model_dir=TRIALS, path=directory / "experiment", address=cluster.address)
    with Meanwhile(fault):
        result = experiment.run(on_message=hear)
    ran = Ran(path=experiment.path, noted=lines(record), result=result, nodes=nodes)
    if lost:
        ran.lost = lost[0]
        first = next(line["time"] for line in ran.noted if line["pid"] not in _first_two(ran) and "batch" in line)
        print(f"first batch elsewhere {first - ran.lost[1]:.1f} s after the loss")
    return ran


def _first_two(ran: Ran) -> list[int]:
    return list(dict.fromkeys(line["pid"] for line in ran.noted))[:2]


def kill(node: Any, noted: list[dict[str, Any]]) -> None:
    """With all that runs on it: also the trial's process, which was forked by us and not by the node."""
    raylet = node.all_processes["raylet"][0].process.pid
    forked = {line["pid"] for line in noted if line.get("raylet") == str(raylet)}
    assert forked, "a process of the trial runs on it"
    for pid in (raylet, *descendants(raylet), *forked):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ran]:
    """The run of a trial to which nothing happens."""

    @functools.cache
    def of(entrypoint: str) -> Ran:
        ran = run(cluster, tmp_path_factory.mktemp("undisturbed"), None, entrypoint=entrypoint)
        assert ran.batches == [list(range(BATCHES))] * 2
        assert len(ran.nodes[0]) == 2, "a worker on each of two nodes"
        return ran

    return of


def check(ran: Ran, undisturbed: Ran) -> None:
    """It went on with other nodes, and ended where the other one did, to the bit."""
    assert len(ran.nodes[-1]) == 2
    assert ran.lost[0] in ran.nodes[0]
    assert ran.lost[0] not in ran.nodes[-1]
    assert ran.result.trials[["state", "batches"]].values.tolist() == [["COMPLETED", BATCHES]]
    assert ran.weights.keys() == undisturbed.weights.keys()
    for name, value in undisturbed.weights.items():
        assert torch.equal(ran.weights[name], value), name
    values = ("kind", "name", "batches", "value")
    mine, expected = (each.result.metrics.query("kind == 'validation'")[list(values)] for each in (ran, undisturbed))
    assert mine.reset_index(drop=True).equals(expected.reset_index(drop=True))


@pytest.mark.parametrize("entrypoint", [WHOLE, SHARDED])
def test_a_node_that_dies_costs_what_came_after_the_checkpoint(
    cluster: Cluster, undisturbed: Callable[[str], Ran], tmp_path: Path, entrypoint: str
) -> None:
    if entrypoint != WHOLE:
        cluster.add_node(num_cpus=1)  # for one that died
    expected = undisturbed(entrypoint)
    ran = run(cluster, tmp_path, kill, entrypoint=entrypoint)
    check(ran, expected)
    assert [record["event"] for record in journal(ran.path) if "error" in record] == ["restarted"]
    before, after = ran.batches[:2], ran.batches[2:]
    assert len(after) == 2, "both workers are new"
    [began] = {batches[0] for batches in after}
    assert began % SAVED_EVERY == 0
    for batches in before:
        assert batches == list(range(len(batches)))
        assert 0 <= len(batches) - began <= 2 * SAVED_EVERY
    assert after == [list(range(began, BATCHES))] * 2


@pytest.mark.parametrize("entrypoint", [WHOLE, SHARDED])
def test_a_node_that_is_taken_away_costs_nothing(
    cluster: Cluster, undisturbed: Callable[[str], Ran], tmp_path: Path, entrypoint: str
) -> None:
    cluster.add_node(num_cpus=1)  # for one that died
    expected = undisturbed(entrypoint)
    ran = run(cluster, tmp_path, lambda node, _: drain(cluster.address, node.node_id), entrypoint=entrypoint)
    check(ran, expected)
    assert [record for record in journal(ran.path) if record["event"] == "restarted"] == []
    first, second, *rest = ran.batches
    assert first == second
    assert len(rest) == 2
    for batches in rest:
        assert [*first, *batches] == list(range(BATCHES))
