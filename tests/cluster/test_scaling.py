"""Searches on a cluster whose autoscaler has no worker node to begin with: what comes, what is used, what is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import scaling
from tests.cluster.namespaces import isolated, run_isolated
from tests.cluster.no_capacity import WHY

pytestmark = [pytest.mark.ray, pytest.mark.slow, *isolated]

AUTOSCALERS = pytest.mark.parametrize("version", [1, 2])


def seen(what: str, directory: Path, *, nodes: int, version: int) -> dict[str, Any]:
    ran = run_isolated(
        scaling.__file__,
        what,
        directory,
        str(nodes),
        str(version),
        home=directory / "home",
        PYTHONPATH=scaling.FALSE_GPUS,
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    found: dict[str, Any] = json.loads((directory / "seen.json").read_text()) | {"printed": ran.stdout + ran.stderr}
    for seconds, name, value in found.get("timeline", []):
        print(f"{seconds:6.1f} s  {name}: {value}")
    return found


def values(found: dict[str, Any], name: str) -> list[int]:
    return [value for _, each, value in found["timeline"] if each == name]


@pytest.mark.parametrize("nodes", [3, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("version", [2, pytest.param(1, marks=pytest.mark.long)])
def test_a_sweep_has_all_nodes_that_are_of_use_and_leaves_none(tmp_path: Path, nodes: int, version: int) -> None:
    found = seen("sweep", tmp_path, nodes=nodes, version=version)
    used = 2 * (nodes // 2)  # by trials of two slots: with one node alone none can do anything
    assert found["trials"] == [["COMPLETED", 0]] * 6
    assert max(values(found, "nodes")) == used
    assert max(values(found, "groups")) == used // 2
    assert values(found, "nodes")[0] == values(found, "nodes")[-1] == 0
    assert found["left"] == 0, "nothing is wanted when the search is done"


@pytest.mark.long
@AUTOSCALERS
def test_no_node_comes_for_a_trial_that_has_room_on_anothers_gpu(tmp_path: Path, version: int) -> None:
    found = seen("shared", tmp_path, nodes=6, version=version)
    assert found["trials"] == [["COMPLETED", 0]] * 6
    assert max(values(found, "groups")) == 6
    # Each node has room for two trials. Version 1 reads the pending groups and the nodes at different times: it
    # sometimes starts a fourth node as the third takes up the last groups, and gives it back.
    assert max(values(found, "nodes")) in ({3} if version == 2 else {3, 4})
    assert values(found, "nodes")[0] == values(found, "nodes")[-1] == 0
    assert found["left"] == 0


@pytest.mark.long
@AUTOSCALERS
def test_what_has_no_trial_is_given_back_while_the_search_goes_on(tmp_path: Path, version: int) -> None:
    found = seen("idle", tmp_path, nodes=3, version=version)
    assert found["trials"] == [["COMPLETED", 0]] * 3
    assert max(values(found, "nodes")) == 3
    last_of_both = [[each for each in values(found, name) if each][-1] for name in ("nodes", "groups")]
    assert last_of_both == [1, 1], "one was kept for the trial that went on"


@pytest.mark.long
@AUTOSCALERS
def test_a_killed_driver_wants_no_nodes(tmp_path: Path, version: int) -> None:
    seen("killed", tmp_path, nodes=3, version=version)


@pytest.mark.long
@AUTOSCALERS
def test_unavailable_nodes_are_waited_for_and_reported(tmp_path: Path, version: int) -> None:
    found = seen("in_vain", tmp_path, nodes=3, version=version)
    told = [line for line in found["log"].splitlines() if "could not start worker" in line]
    assert len(told) == 1, "it is said once"
    assert "worker groups wait for nodes. Each needs 1 x (1 GPU and 1 CPU)." in told[0]
    assert (WHY if version == 1 else "see monitor.log in Ray's logs on the head") in told[0]
    assert found["waiting"] == [3, 0], "each group waits in its place in the queue"
    assert found["in the autoscaler's log"]
    assert found["code"] == 130
    assert "resume with: dray experiment resume" in found["log"]
    print(f"ended {found['ended_s']:.1f} s after Ctrl-C")


@pytest.mark.long
@AUTOSCALERS
def test_what_the_cluster_can_never_have_room_for_is_refused_at_once(tmp_path: Path, version: int) -> None:
    found = seen("refused", tmp_path, nodes=3, version=version)
    assert "4 slots requested" in found["told"]["more"]
    assert "can grow to, 3 gpu slots (with 1 CPUs each) on 3 nodes" in found["told"]["more"]
    assert "2 slots requested on one node" in found["told"]["on one"]
    assert found["groups"] == 0
    assert found["same from a worker node"], "where a driver may run, too"
