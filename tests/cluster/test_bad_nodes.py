"""Nodes on which no trial can run: one clear error that names them, before anything trains or as soon as they come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import bad_nodes
from tests.cluster.namespaces import isolated, run_isolated

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, *isolated]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bad_nodes")


@pytest.fixture(scope="module")
def seen(place: Path) -> dict[str, Any]:
    ran = run_isolated(bad_nodes.__file__, place, home=place / "home", RAY_AUTH_MODE="disabled")
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    found: dict[str, Any] = json.loads((place / "seen.json").read_text())
    return found


def test_a_directory_that_not_all_nodes_have_is_refused_at_once(seen: dict[str, Any], place: Path) -> None:
    told = seen["not_shared"]
    assert (told["kind"], told["trained"], told["groups"]) == ("ConfigError", 0, 0)
    first, second = told["error"].splitlines()[1:]
    assert first.startswith("  checkpoint_storage: node 127.0.0.6 (")
    assert f"does not see {place / 'not_shared' / 'experiment'}" in first
    # The two ways to mend it.
    assert "on a file system that all nodes mount (--path" in first
    assert "in an object store (checkpoint_storage: {type: s3" in first
    assert second.startswith("  checkpoint_storage: node 127.0.0.7 (")
    assert "Read-only file system" in second
    assert "127.0.0.5" not in told["error"]


def test_a_node_that_joins_later_is_reported_by_its_first_worker(seen: dict[str, Any]) -> None:
    told = seen["later"]
    assert told["kind"] == "FoundInTraining"
    assert "checkpoint_storage: node 127.0.0.9 (" in told["error"]
    assert told["trained"] > 0


def test_a_check_names_each_node_with_what_is_wrong_there(seen: dict[str, Any], place: Path) -> None:
    found = seen["checked"]
    told = {case: findings(found[case], wrong=True) for case in ("directory", "store", "unasked")}
    for case, wrong in told.items():
        assert found[case]["code"] == 1
        assert "has torch 1.13.1, but the driver has torch" in wrong["127.0.0.2"]
        assert "torch can't be imported: ImportError: this torch is not for this machine" in wrong["127.0.0.2"]
        assert "Ray counts 2 GPUs, torch sees 0; it is built " in wrong["127.0.0.3"]
        assert "Ray requires no token" in wrong[""]
    assert f"does not see {place / 'checked' / 'results'}, the driver's" in told["directory"]["127.0.0.4"]
    assert "in an object store (checkpoint_storage: {type: s3" in told["directory"]["127.0.0.4"]
    assert "can't read s3://bucket/results?" in told["store"]["127.0.0.4"]
    assert [node for node, what in told["store"].items() if "s3://" in what] == ["127.0.0.4"]
    assert "127.0.0.4" not in told["unasked"], "a note"
    notes = findings(found["unasked"], wrong=False)
    assert any("does not see" in note and "give --storage" in note for note in notes.values())
    assert found["left"] == []


def findings(said: dict[str, Any], *, wrong: bool) -> dict[str, str]:
    """All errors, or notes, by the node's address."""
    found: dict[str, str] = {}
    for finding in json.loads(said["out"])["findings"]:
        if finding["is_wrong"] == wrong:
            address = finding["node"].partition(" ")[0]
            found[address] = f"{found.get(address, '')} {finding['what']}"
    return found
