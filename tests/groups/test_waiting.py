"""What is said of groups that wait for nodes, without a cluster: nodes and times are given here."""

from __future__ import annotations

import pytest
import ray

from dray.cluster import autoscaler
from dray.cluster.autoscaler import Activity
from dray.groups.group import Slots
from dray.groups.waiting import LOOK_S, SAY_AFTER_S, NodeWait
from tests.groups.test_capacity import GPU_NODE, HEAD, node

SLOTS = Slots(per_trial=2, gpu=True, cpus_per_slot=1, runtime_env={})


class World:
    """A cluster of these nodes, and a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.nodes: list[dict[str, float]] = [HEAD]
        self.activity = Activity(starting={}, failed={})


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr("dray.groups.waiting.time.monotonic", lambda: world.now)
    monkeypatch.setattr(autoscaler, "activity", lambda: world.activity)
    monkeypatch.setattr(ray, "nodes", lambda: [node(each) for each in world.nodes])
    total = lambda: {kind: sum(node.get(kind, 0.0) for node in world.nodes) for kind in ("CPU", "GPU")}  # noqa: E731
    monkeypatch.setattr(ray, "cluster_resources", total)
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 1.0})
    return world


def test_waiting_is_reported_once_with_the_request_the_cluster_and_the_autoscaler(world: World) -> None:
    waiting, said = NodeWait(SLOTS, has_autoscaler=True), []
    world.activity = Activity(starting={"spot": 2}, failed={})
    for _ in range(200):
        said.append(waiting.look(2, 3))
        world.now += 1
    assert [said.index(each) for each in said if each] == [SAY_AFTER_S]
    assert said[int(SAY_AFTER_S)] == (
        "2 of 3 worker groups wait for nodes. Each needs 2 x (1 GPU and 1 CPU). "
        "The cluster has 4 CPUs (1 free) on 1 node; the autoscaler is starting 2 spot"
    )
    assert waiting.status == "2 of 3 worker groups wait for nodes (2 spot starting)"
    assert waiting.look(0, 3) == waiting.status == ""


def test_unavailable_nodes_are_reported_once(world: World) -> None:
    waiting = NodeWait(SLOTS, has_autoscaler=True)
    waiting.look(1, 1)
    world.now += SAY_AFTER_S
    assert "the worker group waits" in waiting.look(1, 1)
    world.activity = Activity(starting={}, failed={"spot": "no capacity"})
    assert waiting.look(1, 1) == ""
    world.now += LOOK_S
    assert "it could not start spot: no capacity" in waiting.look(1, 1)
    assert waiting.status == "the worker group waits for nodes (spot not available)"
    world.now += LOOK_S
    assert waiting.look(1, 1) == ""


def test_a_missing_autoscaler_is_reported(world: World) -> None:
    waiting = NodeWait(SLOTS, has_autoscaler=False)
    world.nodes = [HEAD, GPU_NODE]
    waiting.look(1, 2)
    world.now += SAY_AFTER_S
    assert waiting.look(1, 2) == (
        "1 of 2 worker groups wait for nodes. Each needs 2 x (1 GPU and 1 CPU). "
        "The cluster has 2 GPUs (0 free) and 12 CPUs (1 free) on 2 nodes; no autoscaler is running to start more"
    )


def test_a_short_wait_is_not_reported(world: World) -> None:
    waiting = NodeWait(SLOTS, has_autoscaler=True)
    for count in [1, 0] * 50:
        assert waiting.look(count, 1) == waiting.status == ""
        world.now += SAY_AFTER_S - 1
