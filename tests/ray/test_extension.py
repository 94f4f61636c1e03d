"""An extension on a real Ray in which trials fail: they keep what they had, and another one trains on."""

from __future__ import annotations

from pathlib import Path

import pytest

import dray
from tests.ray.harness import TRIALS, journal

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures("ray_is_up")]

CONFIG = {
    "name": "extended",
    "entrypoint": "extended:Extended",
    "hyperparameters": {
        "global_batch_size": 4,
        "length": {"type": "categorical", "vals": ["fixed", "refused", "asked"]},
    },
    "searcher": {"name": "grid", "metric": "loss", "max_length": {"epochs": 2}},
    "resources": {"slot": "cpu", "max_slots": 1},
    "reproducibility": {"experiment_seed": 7},
}


def test_trials_whose_extension_fails_keep_their_results_and_another_trains_to_the_new_length(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "experiment"
    before = dray.Experiment(CONFIG, model_dir=TRIALS, path=path).run().trials.set_index("hparams.length")
    extended = dray.Experiment.resume(path, max_length=4).run()
    after = extended.trials.set_index("hparams.length")
    assert set(after["state"]) == {"COMPLETED"}
    assert after["batches"].to_dict() == {"fixed": 8, "refused": 8, "asked": 16}
    for length in ("fixed", "refused"):
        assert after["best_metric"][length] == before["best_metric"][length]
        assert (path / f"trial_{after['trial_id'][length]}" / "checkpoint_8" / "manifest.json").exists()
    totals = extended.metrics.query("name == 'total'").groupby("trial_id")["value"].agg(list)
    assert totals[after["trial_id"]["asked"]] == [8.0, 16.0], "its constructor has seen the length as extended"

    fixed, refused = (int(after["trial_id"][length]) for length in ("fixed", "refused"))
    failures = [record for record in journal(path) if record["event"] in ("restarted", "gave_up")]
    assert {(record["trial"], record["event"], record.get("kept")) for record in failures} == {
        (fixed, "restarted", None),
        (fixed, "gave_up", "completed"),
        (refused, "gave_up", "completed"),
    }
    errors = [record["error"] for record in failures if record["trial"] == fixed]
    assert all("schedule OneCycleLR has ended: it was made for total_steps=8" in error for error in errors)
    shown = capfd.readouterr().err
    assert all(f"trial {trial} is still completed" in shown for trial in (fixed, refused))
    # The journal replays, and nothing is left to do.
    assert set(dray.Experiment.resume(path).run().trials["state"]) == {"COMPLETED"}
