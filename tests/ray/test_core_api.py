"""A program with a loop of its own as a trial: searched by a time_metric, paused at rungs, and one killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import dray
from tests.ray.harness import TRIALS, check_promotions, decided, journal, lines

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]

BATCHES = 5  # of an epoch
KILLED_AT = 3  # past the first rung, where it was saved, and before the second


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> dray.Result:
    directory = tmp_path_factory.mktemp("searched")
    config = {
        "name": "core",
        "entrypoint": "python3 -m determined.launch.torch_distributed python3 core_program.py",
        "hyperparameters": {
            "lr": {"type": "log", "base": 10, "minval": -3, "maxval": -1},
            "record": str(directory / "record"),
            "killed_at": KILLED_AT,
        },
        "searcher": {
            "name": "asha",
            "variant": "promotion",
            "metric": "error",
            "max_time": 8,
            "time_metric": "epochs",
            "max_trials": 6,
            "num_rungs": 3,
            "divisor": 2,
            "max_concurrent_trials": 2,
        },
        "resources": {"slot": "cpu", "max_slots": 1},
        "reproducibility": {"experiment_seed": 7},
    }
    return dray.Experiment(config, model_dir=TRIALS, path=directory / "experiment").run()


def weight(lr: float, epochs: int) -> float:
    """After so many epochs: 1 - w is multiplied by 1 - 2 lr with each batch."""
    return float(1 - (1 - 2 * lr) ** (BATCHES * epochs))


def test_promoted_programs_go_on_from_where_they_were_paused(searched: dray.Result) -> None:
    assert check_promotions(searched.path, divisor=2, top=8) >= 3
    assert decided(searched.path, "pause")
    [restart] = [record for record in journal(searched.path) if record["event"] == "restarted"]
    assert "died" in restart["error"]
    for trial in searched.trials["trial_id"]:
        noted = [line for line in lines(searched.path.parent / "record") if line["trial"] == trial]
        trained = [line["epoch"] for line in noted if "epoch" in line]
        again = [KILLED_AT] if trial == restart["trial"] else []
        assert sorted(trained) == sorted([*range(1, max(trained) + 1), *again])


def test_metrics_are_those_of_a_run_that_was_never_interrupted(searched: dray.Result) -> None:
    rows = searched.trials.set_index("trial_id")
    found = searched.metrics.query("name == 'error'")
    for trial, mine in found.groupby("trial_id"):
        lr = rows["hparams.lr"][trial]
        expected = [abs(1 - weight(lr, epoch)) for epoch in range(1, len(mine) + 1)]
        assert mine["value"].tolist() == pytest.approx(expected, rel=1e-9)
        assert mine["batches"].tolist() == [BATCHES * epoch for epoch in range(1, len(mine) + 1)]
        assert mine["epochs"].tolist() == list(range(1, len(mine) + 1))
    assert set(searched.metrics.query("kind == 'training'")["name"]) == {"loss"}


def test_the_best_trial_has_its_checkpoint_and_event_files(searched: dray.Result) -> None:
    best = searched.best_trial
    lr = float(searched.trials.set_index("trial_id")["hparams.lr"][best.trial_id])
    state = json.loads((Path(best.checkpoint.path) / "weight.json").read_text())
    assert state == [pytest.approx(weight(lr, 8)), 8]
    events = EventAccumulator(str(searched.path / f"trial_{best.trial_id}" / "tensorboard"))
    events.Reload()
    assert [each.step for each in events.Scalars("Determined/val_error")] == [BATCHES * n for n in range(1, 9)]
