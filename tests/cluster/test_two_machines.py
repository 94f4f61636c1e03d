"""Machines with disks and networks of their own, which Ray's launcher makes a cluster of by clusters/local.yaml."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import dray
from tests.cluster import two_machines
from tests.cluster.machines import HOME, with_machines
from tests.cluster.namespaces import run_isolated
from tests.ray.harness import printed

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, *with_machines]


def test_a_search_and_a_trial_across_machines_by_rays_launcher(tmp_path: Path) -> None:
    ran = run_isolated(two_machines.__file__, tmp_path, home=tmp_path / "home")
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    seen = json.loads((tmp_path / "seen.json").read_text())
    print(", ".join(f"{command} {seconds:.0f} s" for command, seconds in seen["took"].items()))
    results = {
        re.sub(r"-\d{8}-\d{6}-\w+$", "", path.name): path for path in (tmp_path / "results").iterdir() if path.is_dir()
    }
    # The example's search: its best trial is printed where the command was given, and all of it is in the results.
    result = dray.Result(results["digits-asha"])
    assert f"best trial: {result.best_trial.trial_id} " in seen["printed"]
    assert len(result.trials) == 64
    assert set(result.trials["state"]) == {"COMPLETED", "PRUNED"}
    assert result.best_trial.metric < 0.2

    # One trial on both machines: with code, and the file beside it, that dray has brought.
    assert dray.Result(results["spread"]).trials[["state", "restarts"]].values.tolist() == [["COMPLETED", 0]]
    said = [re.search("on (.*): (.*) has brought", "\n".join(printed(results["spread"], 0, rank))) for rank in (0, 1)]
    assert {line and line[1] for line in said} == {"one", "two"}
    assert not any(line and Path(line[2]).is_relative_to(HOME) for line in said), "from Ray's copy, not the launcher's"
    assert "raylet" in seen["before"]
    assert seen["after"] == "", "`ray down` ends what is on the head; the other follows it within a minute"
