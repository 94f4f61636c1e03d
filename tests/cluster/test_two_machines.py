"""Machines with disks and networks of their own, which Ray's launcher makes a cluster of by clusters/local.yaml."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import dray
from dray.config.load import load_config
from dray.experiment.local import run_local
from tests.cluster import two_machines
from tests.cluster.machines import HOME, with_machines
from tests.cluster.namespaces import run_isolated
from tests.ray.harness import printed

pytestmark = [pytest.mark.ray, pytest.mark.slow, *with_machines]


def play(scenario: str, directory: Path) -> dict[str, Any]:
    ran = run_isolated(two_machines.__file__, scenario, directory, home=directory / "home")
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    seen: dict[str, Any] = json.loads((directory / "seen.json").read_text())
    return seen


def experiment(directory: Path, name: str) -> Path:
    [path] = (directory / "results").glob(f"{name}-*")
    return path


def said(lines: list[str], what: str) -> list[str]:
    return [line.removeprefix(f"{what} ") for line in lines if line.startswith(f"{what} ")]


@pytest.mark.long
def test_a_search_and_a_trial_across_machines_between_ray_up_and_ray_down(tmp_path: Path) -> None:
    seen = play("sweep", tmp_path)
    print(", ".join(f"{command} {seconds:.0f} s" for command, seconds in seen["took"].items()))
    # The example's search: its best trial is told where the command was given, and all of it is in the results.
    result = dray.Result(experiment(tmp_path, "digits-asha"))
    assert f"best trial: {result.best_trial.trial_id} " in seen["printed"]
    assert len(result.trials) == 64
    assert set(result.trials["state"]) == {"COMPLETED", "PRUNED"}
    assert result.best_trial.metric < 0.2

    # One trial on both machines: with code, and the file beside it, that dray has brought.
    path = experiment(tmp_path, "spread")
    assert dray.Result(path).trials[["state", "restarts"]].values.tolist() == [["COMPLETED", 0]]
    ranks = [printed(path, 0, rank) for rank in (0, 1)]
    assert {machine for lines in ranks for machine in said(lines, "machine")} == {"one", "two"}
    for lines in ranks:
        assert said(lines, "data") == ["brought"]
        [code] = said(lines, "code")
        assert not Path(code).is_relative_to(HOME), "from Ray's copy, not from the launcher's"
    assert "raylet" in seen["before"]
    assert seen["after"] == "", "`ray down` ends what is on the head; the other follows it within a minute"


@pytest.mark.long
def test_other_machines_go_on_when_the_head_is_lost(tmp_path: Path) -> None:
    play("head_lost", tmp_path)
    lost = experiment(tmp_path, "lost")
    assert dray.Result(lost).trials["state"].tolist() == ["COMPLETED"]
    ranks = [printed(lost, 0, rank) for rank in (0, 1)]
    assert {said(lines, "machine")[0] for lines in ranks} == {"one", "two"}
    assert {said(lines, "machine")[-1] for lines in ranks} == {"two", "three"}
    for lines in ranks:
        start = max(index for index, line in enumerate(lines) if line.startswith("machine "))
        batches = [int(batch) for batch in said(lines[start:], "batch")]
        assert batches[0] >= 5, "from a checkpoint"
        assert batches == list(range(batches[0], 20))

    config = yaml.safe_load((lost / "experiment.yaml").read_text())
    config["hyperparameters"]["pause_s"] = 0.0
    alone = weights(run_local(load_config(config), lost / "code", path=tmp_path / "alone"))
    there = weights(lost / "trial_0")
    assert there.keys() == alone.keys()
    for name, expected in alone.items():
        # Gradients are summed in another order; Adam divides by their size, which brings it to the front.
        torch.testing.assert_close(there[name], expected, rtol=1e-4, atol=1e-5)


def weights(trial: Path) -> dict[str, torch.Tensor]:
    state = torch.load(trial / "checkpoint_20" / "state-dict.pth", weights_only=True)
    return dict(state["models_state_dict"][0])
