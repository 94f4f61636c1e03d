"""An experiment on Ray that starts from what an earlier one learned, named as on the command line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import dray
from tests.ray.harness import TRIALS, journal, recorded

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]


def config(record: Path, **searcher: Any) -> dict[str, Any]:
    made = recorded(record, trials=12, batches=10, resources={"slot": "cpu", "max_slots": 1})
    return {**made, "searcher": {**made["searcher"], **searcher}}


def test_the_first_trial_is_what_the_earlier_experiment_expects_to_be_best(tmp_path: Path) -> None:
    """The error of these trials falls with the learning rate, drawn from .001 to .1."""
    earlier = dray.Experiment(config(tmp_path / "first"), model_dir=TRIALS, path=tmp_path / "earlier").run()
    best = earlier.best_trial.hparams["lr"]
    warm = config(tmp_path / "second", sampler="multi_fidelity", warm_start=[str(earlier.path)], max_trials=2)
    result = dray.Experiment(warm, model_dir=TRIALS, path=tmp_path / "warm").run()
    started = [record["hparams"]["lr"] for record in journal(result.path) if record["event"] == "started"]
    assert len(started) == 2
    assert abs(math.log10(started[0] / best)) < 0.4
