"""Nodes on which no trial can run: one clear error that names them, before anything trains or as soon as they come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import bad_nodes
from tests.cluster.namespaces import isolated, run_isolated

pytestmark = [pytest.mark.ray, pytest.mark.slow, *isolated]


def seen(directory: Path, *cases: str) -> dict[str, Any]:
    ran = run_isolated(bad_nodes.__file__, directory, *cases, home=directory / "home")
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    found: dict[str, Any] = json.loads((directory / "seen.json").read_text())
    for case, told in found.items():
        waited = told["broken_after_s"]
        after = "" if waited is None else f", told {waited:.2f} s after the worker came"
        print(f"{case}: {told['seconds']:.1f} s{after}; {told['error']}")
        assert "Traceback" not in told["error"]
    return found


@pytest.mark.long
def test_a_directory_that_not_all_nodes_have_is_refused_before_anything_trains(tmp_path: Path) -> None:
    told = seen(tmp_path, "not_shared")["not_shared"]
    assert (told["kind"], told["trained"], told["groups"]) == ("ConfigError", 0, 0)
    first, second = told["error"].splitlines()[1:]
    assert first.startswith("  checkpoint_storage: node 127.0.0.3 (")
    assert f"does not see {tmp_path / 'not_shared' / 'experiment'}" in first
    # The two ways to mend it.
    assert "on a file system that all nodes mount (--path" in first
    assert "in an object store (checkpoint_storage: {type: s3" in first
    assert second.startswith("  checkpoint_storage: node 127.0.0.4 (")
    assert "Read-only file system" in second
    assert "127.0.0.2" not in told["error"]


@pytest.fixture(scope="module")
def by_workers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Each told by the worker that came up there, for no node is left out before."""
    return seen(tmp_path_factory.mktemp("workers"), "full", "torch", "no_access", "dray")


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "kind", "node", "told"),
    [
        ("torch", "ExperimentError", "127.0.0.10", "has torch 1.13.1, but the driver has torch "),
        ("full", "ExperimentError", "127.0.0.9", "has a full disk: "),
        ("no_access", "ConfigError", "127.0.0.13", "can't use the experiment's storage: "),
    ],
)
def test_a_node_where_no_trial_can_run_is_named(
    case: str, kind: str, node: str, told: str, by_workers: dict[str, Any]
) -> None:
    found = by_workers[case]
    assert (found["kind"], found["trained"]) == (kind, 0)
    assert f"node {node} (" in found["error"]
    assert f") {told}" in found["error"]
    assert found["groups"] == 1, "nothing was tried again"


@pytest.mark.long
def test_nodes_that_have_another_dray_train(by_workers: dict[str, Any]) -> None:
    assert (by_workers["dray"]["kind"], by_workers["dray"]["error"]) == ("none", "")
    assert by_workers["dray"]["trained"] >= 20


@pytest.mark.long
def test_a_node_that_joins_later_is_reported_by_its_first_worker(tmp_path: Path) -> None:
    told = seen(tmp_path, "later")["later"]
    assert told["kind"] == "FoundInTraining"
    assert "checkpoint_storage: node 127.0.0.8 (" in told["error"]
    assert told["trained"] > 0
