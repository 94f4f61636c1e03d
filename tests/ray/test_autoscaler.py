"""An elastic trial on a cluster with an autoscaler: it asks for a node, gets it, uses it, and leaves it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.namespaces import isolated, run_isolated
from tests.ray import autoscaled
from tests.ray.harness import lines

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, *isolated]


def test_an_elastic_trial_is_what_an_autoscaler_starts_a_node_for(tmp_path: Path) -> None:
    ran = run_isolated(autoscaled.__file__, tmp_path, home=tmp_path / "home")
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    seen = json.loads((tmp_path / "seen.json").read_text())
    print(f"another node {seen['node_after_s']:.1f} s after the experiment's start")
    assert seen["trials"] == [["COMPLETED", 0]]
    assert [line["size"] for line in lines(tmp_path / "record")][-1] == 2
    assert seen["nodes"] == 1, "and nothing holds the other any more"
