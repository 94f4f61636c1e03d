"""Searches on a cluster whose autoscaler has no worker node to begin with: what comes, what is used, what is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import scaling
from tests.cluster.namespaces import ROOT, isolated, run_isolated

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, *isolated]


def seen(what: str, directory: Path, *, nodes: int, **environment: str) -> dict[str, Any]:
    ran = run_isolated(
        scaling.__file__,
        what,
        directory,
        str(nodes),
        home=directory / "home",
        PYTHONPATH=scaling.FALSE_GPUS,
        **environment,
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    found: dict[str, Any] = json.loads((directory / "seen.json").read_text()) | {"printed": ran.stdout + ran.stderr}
    for seconds, name, value in found.get("timeline", []):
        print(f"{seconds:6.1f} s  {name}: {value}")
    return found


def values(found: dict[str, Any], name: str) -> list[int]:
    return [value for _, each, value in found["timeline"] if each == name]


def test_a_sweep_has_all_nodes_that_are_of_use_and_leaves_none(tmp_path: Path) -> None:
    found = seen("sweep", tmp_path, nodes=3)
    used = 2  # by trials of two slots: with one node alone none can do anything
    assert found["trials"] == [["COMPLETED", 0]] * 6
    assert max(values(found, "nodes")) == used
    assert max(values(found, "groups")) == used // 2
    assert values(found, "nodes")[0] == values(found, "nodes")[-1] == 0
    assert found["left"] == 0, "nothing is wanted when the search is done"


def test_unavailable_nodes_are_waited_for_and_reported(tmp_path: Path) -> None:
    found = seen("in_vain", tmp_path, nodes=3)
    told = [line for line in found["log"].splitlines() if "could not start worker" in line]
    assert len(told) == 1, "it is said once"
    assert "worker groups wait for nodes. Each needs 1 x (1 GPU and 1 CPU)." in told[0]
    assert "see monitor.log in Ray's logs on the head" in told[0]
    assert found["waiting"] == [3, 0], "each group waits in its place in the queue"
    assert found["in the autoscaler's log"]
    assert found["code"] == 130
    assert "resume with: dray experiment resume" in found["log"]
    print(f"ended {found['ended_s']:.1f} s after Ctrl-C")


def test_on_demand_machines_start_while_there_are_no_spot_ones(tmp_path: Path) -> None:
    # As in clusters/gcp.yaml, but for the time: a machine that does not appear counts as refused.
    values = {"REQUEST_STATUS_TIMEOUT_S": "8", "MAX_NUM_RETRY_REQUEST_TO_ALLOCATE": "0"}
    variables = {f"RAY_AUTOSCALER_RECONCILE_{name}": value for name, value in values.items()}
    assert all(f"{name}=" in (ROOT / "clusters" / "gcp.yaml").read_text() for name in variables)
    found = seen("spot_first", tmp_path, nodes=4, **variables)
    assert found["trials"] == {name: [["COMPLETED", 0]] * 2 for name in ("sold out", "to be had")}
    at = [name for _, name, _ in found["timeline"]].index("to be had")
    most = [
        {name: max((value for _, each, value in part if each == name), default=0) for name in ("spot", "on_demand")}
        for part in (found["timeline"][:at], found["timeline"][at:])
    ]
    assert most == [{"spot": 0, "on_demand": 2}, {"spot": 2, "on_demand": 0}]


def test_a_search_runs_on_the_gpu_types_that_it_asks_for(tmp_path: Path) -> None:
    found = seen("gpu_types", tmp_path, nodes=4)
    assert found["types"] == ["A100", "L4", "L4"], "the only A100, and what comes next"
    assert found["spent"].keys() - {""} == {"A100", "L4"}
    assert all(seconds > 0 for seconds in found["spent"].values())
