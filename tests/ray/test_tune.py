"""`searchers.tune` on a real Ray: trainables of each kind, stopped and paused by Tune."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from ray import tune

from searchers import ASHA, Method, PromotionASHA
from searchers.search import Search
from searchers.tune import Scheduler, Searcher

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]


def loss_of(config: dict[str, Any], epoch: int) -> float:
    return float(abs(math.log10(config["lr"]) + 2) + 1 / epoch)


def note(config: dict[str, Any]) -> None:
    """That a trial trains an epoch. Tune's own logs lose rows: a resumed trial's begin with what has been synced."""
    if "notes" in config:
        with Path(config["notes"], str(config["lr"])).open("a") as notes:
            notes.write(".")


def function(config: dict[str, Any]) -> None:
    """Saves and continues as Tune's documentation shows. It fails once after two epochs; with a large lr always."""
    epoch = 0
    if (checkpoint := tune.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            epoch = json.loads(Path(directory, "epoch.json").read_text())
    while True:
        failed = Path(config["failed"]) if "failed" in config else None
        if failed is not None and (config["lr"] > 0.1 or (epoch == 2 and not failed.exists())):
            failed.touch()
            raise ValueError("on purpose")
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


def fit(
    trainable: Any,
    method: Method,
    path: Path,
    *,
    time_attr: str = "training_iteration",
    constants: Mapping[str, Any] = MappingProxyType({}),
    max_failures: int = 0,
    **about: Any,
) -> tuple[Search, tune.ResultGrid]:
    searcher = Searcher(method, seed=3, time_attr=time_attr)
    tuner = tune.Tuner(
        trainable,
        param_space={"lr": tune.loguniform(1e-4, 1), **constants},
        tune_config=tune.TuneConfig(
            metric="loss", mode="min", num_samples=-1, search_alg=searcher, scheduler=Scheduler(searcher), **about
        ),
        run_config=tune.RunConfig(
            name="run",
            storage_path=str(path),
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=max_failures),
        ),
    )
    results = tuner.fit()
    assert searcher.search is not None
    assert searcher.search.done is not None
    return searcher.search, results


def epochs(notes: Path) -> list[int]:
    """Trained by each trial."""
    return sorted(len(file.read_text()) for file in notes.iterdir())


def test_failures_are_retried_as_tune_is_told_to_and_then_ranked_last(tmp_path: Path) -> None:
    """The hyperparameters are those of the seed: trial 0 is the best, the lr of trial 2 is above 0.1."""
    method = ASHA(max_trials=4, max_length=4, num_rungs=2, divisor=4, max_concurrent_trials=1)
    constants = {"failed": str(tmp_path / "failed"), "notes": str(tmp_path / "notes")}
    (tmp_path / "notes").mkdir()
    search, results = fit(function, method, tmp_path, max_failures=1, constants=constants, reuse_actors=True)
    states = [view.state for view in search.trials.values()]
    assert states == ["COMPLETED", "PRUNED", "ERRORED", "PRUNED"]
    assert len(results.errors) == 1
    assert (tmp_path / "failed").exists()
    assert epochs(tmp_path / "notes") == [1, 1, 4], "the failure lost nothing"
    assert results.get_best_result().config == {**search.params(0), **constants}


@pytest.mark.parametrize("trainable", [function, Class])
def test_trials_are_paused_and_resumed(trainable: Any, tmp_path: Path) -> None:
    method = PromotionASHA(max_trials=6, max_length=4, num_rungs=3, divisor=2, max_concurrent_trials=2)
    notes = tmp_path / "notes"
    notes.mkdir()
    search, _ = fit(trainable, method, tmp_path, constants={"notes": str(notes)}, reuse_actors=True)
    assert sorted(view.last_step or 0 for view in search.trials.values()) == [1, 1, 1, 2, 2, 4]
    assert epochs(notes) == [1, 1, 1, 2, 2, 4], "no epoch is trained twice"
