"""Programs with loops of their own as trials: searched, paused, killed and gone on with, on a Ray that is up."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import dray
from dray.records.directory import ExperimentDirectory
from tests.ray.harness import (
    TRIALS,
    check_promotions,
    decided,
    journal,
    lines,
    printed,
)
from tests.storage.s3 import LocalS3

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]

BATCHES = 5  # of an epoch


def config(what: str, directory: Path, searcher: dict[str, Any], *, slots: int = 1, **fields: Any) -> dict[str, Any]:
    hparams = {
        "lr": {"type": "log", "base": 10, "minval": -3, "maxval": -1},
        "record": str(directory / "record"),
        "pause_s": 0.0,
    }
    return {
        "name": "core",
        "entrypoint": f"python3 -m determined.launch.torch_distributed python3 core_program.py {what}",
        "hyperparameters": {**hparams, **fields.pop("hparams", {})},
        "searcher": {"metric": "error", **searcher},
        "resources": {"slot": "cpu", "slots_per_trial": slots, "max_slots": slots},
        "reproducibility": {"experiment_seed": 7},
        **fields,
    }


def model_in(directory: Path) -> Path:
    (directory / "model").mkdir()
    for name in ("core_program.py", "core_hparams.py"):
        shutil.copy(TRIALS / name, directory / "model")
    return directory / "model"


def program(what: str, directory: Path, searcher: dict[str, Any], **more: Any) -> dray.Experiment:
    path = directory / "experiment"
    return dray.Experiment(config(what, directory, searcher, **more), model_dir=model_in(directory), path=path)


ASHA = {"name": "asha", "max_trials": 6, "num_rungs": 3, "divisor": 2, "max_concurrent_trials": 2}
BY_EPOCHS = {**ASHA, "max_time": 8, "time_metric": "epochs"}


def weight(lr: float, epochs: int) -> float:
    """After so many epochs: 1 - w is multiplied by 1 - 2 lr with each batch."""
    return float(1 - (1 - 2 * lr) ** (BATCHES * epochs))


def epochs(result: dray.Result, trial: int) -> list[int]:
    """Those that a trial has trained, in order, in all its attempts."""
    noted = [each for each in lines(result.path.parent / "record") if each["trial"] == trial]
    return [each["epoch"] for each in noted if "epoch" in each]


# ------------------------------------------------------------------------------- a search that counts by a time_metric
@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> dray.Result:
    """Paused at rungs, and one killed in the middle."""
    directory = tmp_path_factory.mktemp("searched")
    # The first one to be there dies past the first rung, where it was saved, and before the second.
    return program("epochs", directory, {**BY_EPOCHS, "variant": "promotion"}, hparams={"killed_at": 3}).run()


def test_it_promotes_the_best_and_they_go_on_from_where_they_were_paused(searched: dray.Result) -> None:
    assert check_promotions(searched.path, divisor=2, top=8) >= 3
    assert decided(searched.path, "pause")
    for trial in searched.trials["trial_id"]:
        trained = epochs(searched, trial)
        assert sorted(set(trained)) == list(range(1, max(trained) + 1))
        assert [epoch for epoch in trained if trained.count(epoch) > 1] in ([], [3, 3]), "but for what was killed"


def test_a_killed_one_goes_on_from_its_latest_checkpoint(searched: dray.Result) -> None:
    [restart] = [record for record in journal(searched.path) if record["event"] == "restarted"]
    assert "died" in restart["error"]
    noted = [each for each in lines(searched.path.parent / "record") if each["trial"] == restart["trial"]]
    killed = next(place for place, each in enumerate(noted) if each.get("epoch") == 3)
    assert noted[killed + 1].get("began") == 2


def test_its_metrics_are_those_of_a_run_that_was_never_interrupted(searched: dray.Result) -> None:
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
    assert best.checkpoint is not None
    lr = float(searched.trials.set_index("trial_id")["hparams.lr"][best.trial_id])
    state = json.loads((Path(best.checkpoint.path) / "weight.json").read_text())
    assert state == [pytest.approx(weight(lr, 8)), 8]
    events = EventAccumulator(str(searched.path / f"trial_{best.trial_id}" / "tensorboard"))
    events.Reload()
    assert [each.step for each in events.Scalars("Determined/val_error")] == [BATCHES * n for n in range(1, 9)]


# ------------------------------------------------------------------------------------------ operations, in epochs; deaf
def test_operations_are_the_lengths_where_trials_are_compared(tmp_path: Path) -> None:
    result = program("operations", tmp_path, {**ASHA, "max_length": {"epochs": 8}}).run()
    lengths: dict[int, list[int]] = {trial: [] for trial in range(6)}
    for each in lines(tmp_path / "record"):
        if "length" in each:
            lengths[each["trial"]].append(each["length"])
    rows = result.trials.set_index("trial_id")
    assert set(rows["state"]) == {"COMPLETED", "PRUNED"}
    for trial, told in lengths.items():
        assert told == [2, 4, 8][: len(told)]
        assert rows["batches"][trial] == BATCHES * told[-1]
        assert (rows["state"][trial] == "COMPLETED") == (told[-1] == 8)


@pytest.mark.long
@pytest.mark.parametrize("slots", [1, 2])
def test_a_program_that_never_asks_is_ended_and_the_next_one_has_its_place(slots: int, tmp_path: Path) -> None:
    searcher = {**ASHA, "max_trials": 3, "max_length": {"batches": 40}}
    result = program("deaf", tmp_path, searcher, slots=slots).run()
    rows = result.trials.set_index("trial_id")
    assert set(rows["state"]) == {"COMPLETED", "PRUNED"}
    # Three validations after the one that it was told at.
    expected = {"COMPLETED": [40 + 15], "PRUNED": [10 + 15, 20 + 15]}
    assert all(rows["batches"][trial] in expected[rows["state"][trial]] for trial in rows.index)
    assert "was asked to stop, but reported 3 more validations" in "\n".join(printed(result.path, 0))


# ---------------------------------------------------------------------------------------------------------- two ranks
@pytest.mark.long
def test_two_ranks_share_sharded_checkpoints_in_an_object_store_through_a_kill(tmp_path: Path) -> None:
    s3 = LocalS3("shards")
    place = {"type": "s3", "bucket": s3.bucket, "endpoint_url": f"http://127.0.0.1:{s3.port}"}
    keys = {"access_key": "test", "secret_key": "test"}
    searcher = {**ASHA, "max_trials": 3, "max_length": {"epochs": 8}}
    try:
        result = program("shards", tmp_path, searcher, slots=2, checkpoint_storage={**place, **keys}).run()
        latest = ExperimentDirectory(result.path).store(0).listed()[0][0]
        metadata = json.loads(ExperimentDirectory(result.path).store(0).read(latest, "metadata.json"))
    finally:
        s3.stop()
    rows = result.trials.set_index("trial_id")
    assert set(rows["state"]) == {"COMPLETED", "PRUNED"}
    assert rows["restarts"].tolist() == [1, 0, 0]
    noted = [each for each in lines(tmp_path / "record") if each["trial"] == 0]
    began = [(each["rank"], each["began"]) for each in noted if "began" in each]
    assert sorted(began) == [(0, 0), (0, 3), (1, 0), (1, 3)]
    epoch = latest // BATCHES
    assert metadata == {"steps_completed": BATCHES * epoch, "of_0": epoch, "of_1": epoch}


# ------------------------------------------------------------------------------------------------------------ mistakes
