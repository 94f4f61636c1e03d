"""Four trials on one slot, a GPU or CPUs: one runs out of memory, and the other three do not notice."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import dray
from tests.ray.harness import TRIALS, attempts, journal, recorded

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.mark.long
@pytest.mark.usefixtures("ray_is_up")
def test_three_trials_go_on_when_a_fourth_runs_out_of_memory(tmp_path: Path) -> None:
    met = check_that_three_go_on(tmp_path, "killed", "died", slot="cpu", cpus_per_slot=2)
    assert [each["has"] for each in met] == [{"CPU": 0.5}] * 4
    assert {each["gpus"] for each in met} == {os.environ.get("CUDA_VISIBLE_DEVICES", "")}


def check_that_three_go_on(directory: Path, fault: str, kind: str, **resources: Any) -> list[dict[str, Any]]:
    """Run four trials at the same time, one of which ends by this fault; what each had of the machine."""
    record, meeting = directory / "record", directory / "meeting"
    meeting.mkdir()
    config = recorded(
        record,
        trials=4,
        batches=10,
        entrypoint="sharing:Sharing",
        resources={"slots_per_trial": 0.25, "max_slots": 1, **resources},
    )
    config["hyperparameters"] |= {"meeting": str(meeting), "fault": fault}
    result = dray.Experiment(config, model_dir=TRIALS, path=directory / "experiment").run()

    assert result.trials["state"].tolist() == ["COMPLETED"] * 4
    assert result.trials["restarts"].tolist() == [0, 1, 0, 0]
    tried = attempts(record)
    assert {trial: [each.batches for each in tried[trial]] for trial in range(4)} == {
        0: [tuple(range(10))],
        1: [tuple(range(5)), tuple(range(10))],
        2: [tuple(range(10))],
        3: [tuple(range(10))],
    }
    [restarted] = [each for each in journal(result.path) if each["event"] == "restarted"]
    assert (restarted["trial"], restarted["kind"]) == (1, kind)

    met = [json.loads((meeting / f"trial_{trial}.json").read_text()) for trial in range(4)]
    assert len({each["pid"] for each in met}) == 4
    timeline = result.timeline
    assert set(timeline["slots"]) == {0.25}
    replaced = 1 if kind == "died" else 0  # a process that is out of memory on the GPU goes on with the next trial
    assert timeline["group"].nunique() <= 4 + replaced
    return met
