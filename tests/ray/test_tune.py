"""`searchers.tune` on a real Ray: trainables of each kind, stopped and paused by Tune."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from ray import tune

from searchers import PromotionASHA
from searchers.tune import Scheduler, Searcher

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]


def loss_of(config: dict[str, Any], epoch: int) -> float:
    return float(abs(math.log10(config["lr"]) + 2) + 1 / epoch)


def note(config: dict[str, Any]) -> None:
    """That a trial trains an epoch. Tune's own logs lose rows: a resumed trial's begin with what has been synced."""
    with Path(config["notes"], str(config["lr"])).open("a") as notes:
        notes.write(".")


def function(config: dict[str, Any]) -> None:
    """Saves and continues as Tune's documentation shows."""
    epoch = 0
    if (checkpoint := tune.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            epoch = json.loads(Path(directory, "epoch.json").read_text())
    while True:
        epoch += 1
        note(config)
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "epoch.json").write_text(json.dumps(epoch))
            metrics = {"loss": loss_of(config, epoch), "epoch": epoch}
            tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(directory))


class Class(tune.Trainable):  # type: ignore[misc]
    def setup(self, config: dict[str, Any]) -> None:
        self.epoch = 0

    def step(self) -> dict[str, Any]:
        self.epoch += 1
        note(self.config)
        return {"loss": loss_of(self.config, self.epoch), "epoch": self.epoch}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "epoch.json").write_text(json.dumps(self.epoch))

    def load_checkpoint(self, checkpoint_dir: Any) -> None:
        self.epoch = json.loads(Path(checkpoint_dir, "epoch.json").read_text())

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.config, self.epoch = new_config, 0
        return True


@pytest.mark.parametrize("trainable", [function, pytest.param(Class, marks=pytest.mark.long)])
def test_trials_are_paused_and_resumed(trainable: Any, tmp_path: Path) -> None:
    method = PromotionASHA(max_trials=6, max_length=4, num_rungs=3, divisor=2, max_concurrent_trials=2)
    notes = tmp_path / "notes"
    notes.mkdir()
    searcher = Searcher(method, seed=3, time_attr="training_iteration")
    about = {"search_alg": searcher, "scheduler": Scheduler(searcher), "reuse_actors": True}
    tuner = tune.Tuner(
        trainable,
        param_space={"lr": tune.loguniform(1e-4, 1), "notes": str(notes)},
        tune_config=tune.TuneConfig(metric="loss", mode="min", num_samples=-1, **about),
        run_config=tune.RunConfig(name="run", storage_path=str(tmp_path), verbose=0),
    )
    tuner.fit()
    assert searcher.search is not None
    assert searcher.search.done is not None
    assert sorted(view.last_step or 0 for view in searcher.search.trials.values()) == [1, 1, 1, 2, 2, 4]
    epochs = sorted(len(file.read_text()) for file in notes.iterdir())
    assert epochs == [1, 1, 1, 2, 2, 4], "no epoch is trained twice"
