"""What is said of groups that wait for nodes, without a cluster: nodes and times are given here."""

from __future__ import annotations

from typing import Any

from dray.cluster.view import Activity, ClusterView
from dray.groups.pool import SAY_AFTER_S, SAY_EVERY_S, NodeWait
from tests.groups.clusters import GPU_NODE, HEAD_NODE, cluster, gpus


def seen(*nodes: Any, **activity: Any) -> ClusterView:
    """A cluster whose autoscaler does this."""
    now = {"starting": {}, "failed": {}, **activity}
    return cluster(HEAD_NODE, *nodes, free={"CPU": 1.0}, activity=Activity(**now))


def test_waiting_is_reported_once_with_the_request_and_the_cluster() -> None:
    waiting, view = NodeWait(gpus(2)), seen(starting={"spot": 2})
    said = [waiting.look(2, 3, view, float(now)) for now in range(200)]
    assert [now for now, line in enumerate(said) if line] == [SAY_AFTER_S]
    assert said[int(SAY_AFTER_S)] == (
        "2 of 3 worker groups wait for nodes. Each needs 2 x (1 GPU and 1 CPU). "
        "The cluster has 4 CPUs (1 free) on 1 node; the autoscaler is starting 2 spot"
    )
    assert waiting.status == "2 of 3 worker groups wait for nodes (2 spot starting)"
    assert waiting.look(0, 3, view, 200.0) == waiting.status == ""


def test_unavailable_nodes_are_reported_once() -> None:
    waiting = NodeWait(gpus(2))
    assert waiting.look(1, 1, seen(), 0.0) == ""
    assert "the worker group waits" in waiting.look(1, 1, seen(), SAY_AFTER_S)
    refused = seen(failed={"spot": "no capacity"})
    assert waiting.look(1, 1, refused, SAY_AFTER_S) == ""
    assert "it could not start spot: no capacity" in waiting.look(1, 1, refused, SAY_AFTER_S + SAY_EVERY_S)
    assert waiting.status == "the worker group waits for nodes (spot not available)"
    assert waiting.look(1, 1, refused, SAY_AFTER_S + 2 * SAY_EVERY_S) == ""


def test_a_missing_autoscaler_is_reported_with_what_is_free() -> None:
    waiting, view = NodeWait(gpus(2)), cluster(HEAD_NODE, GPU_NODE)
    assert [waiting.look(1, 2, view, now) for now in (0.0, SAY_AFTER_S)] == ["", ""]
    assert waiting.look(1, 2, cluster(HEAD_NODE, GPU_NODE, free={"CPU": 1.0}), SAY_AFTER_S) == (
        "1 of 2 worker groups wait for nodes. Each needs 2 x (1 GPU and 1 CPU). "
        "The cluster has 2 GPUs (0 free) and 12 CPUs (1 free) on 2 nodes; no autoscaler is running to start more"
    )


def test_a_short_wait_is_not_reported() -> None:
    waiting = NodeWait(gpus(2))
    for turn in range(100):
        assert waiting.look((turn + 1) % 2, 1, seen(), turn * (SAY_AFTER_S - 1)) == waiting.status == ""
