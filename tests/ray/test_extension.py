"""An extension on a real Ray in which one trial fails: it keeps what it had, and the other one trains on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

import dray
from tests.ray.harness import TRIALS, journal

pytestmark = [pytest.mark.ray, pytest.mark.slow]

CONFIG = {
    "name": "extended",
    "entrypoint": "extended:Extended",
    "hyperparameters": {"global_batch_size": 4, "fixed": {"type": "categorical", "vals": [True, False]}},
    "searcher": {"name": "grid", "metric": "loss", "max_length": {"epochs": 2}},
    "resources": {"slot": "cpu"},
    "reproducibility": {"experiment_seed": 7},
}


@pytest.fixture
def ray_is_up() -> Iterator[None]:
    assert not ray.is_initialized(), "another test left its connection to Ray"
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_a_trial_whose_extension_fails_keeps_its_result_and_another_trains_to_the_new_length(
    ray_is_up: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "experiment"
    before = dray.Experiment(CONFIG, model_dir=TRIALS, path=path).run().trials.set_index("hparams.fixed")
    extended = dray.Experiment.resume(path, max_length=4).run()
    after = extended.trials.set_index("hparams.fixed")
    assert after["state"].tolist() == ["COMPLETED", "COMPLETED"]
    assert (after["batches"][True], after["batches"][False]) == (8, 16)
    assert after["best_metric"][True] == before["best_metric"][True]
    totals = extended.metrics.query("name == 'total'").groupby("trial_id")["value"].agg(list)
    assert totals[after["trial_id"][False]] == [8.0, 16.0], "the length as extended, seen by the constructor"

    trial = after["trial_id"][True]
    assert (path / f"trial_{trial}" / "checkpoint_8" / "manifest.json").exists()
    again, end = [record for record in journal(path) if record["event"] in ("restarted", "gave_up")]
    assert (again["event"], end["event"], end["kept"], end["trial"]) == ("restarted", "gave_up", "completed", trial)
    assert "the learning rate schedule OneCycleLR has ended: it was made for total_steps=8" in end["error"]
    assert f"trial {trial} is still completed" in capfd.readouterr().err
    # The journal replays, and nothing is left to do.
    assert dray.Experiment.resume(path).run().trials["state"].tolist() == ["COMPLETED", "COMPLETED"]
