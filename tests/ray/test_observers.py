"""A real run is followed by MLflow and Weights & Biases, also past the driver's death."""

from __future__ import annotations

import pytest

import dray
from tests.loggers import WandB
from tests.pytorch.test_tensorboard import hparams, scalars
from tests.ray.watched import FAILING, INVALID, TRIAL_COUNT, Watched

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long]


def curve(result: dray.Result, trial: int, kind: str, name: str) -> dict[int, float]:
    rows = result.metrics
    rows = rows[(rows["trial_id"] == trial) & (rows["kind"] == kind) & (rows["name"] == name)]
    return dict(zip(rows["batches"], rows["value"], strict=True))


def test_a_killed_driver_leaves_no_process_behind(watched: Watched) -> None:
    assert watched.left == []


def test_tensorboard_has_every_trial(watched: Watched) -> None:
    for trial in sorted(set(range(TRIAL_COUNT)) - {INVALID}):
        shown = watched.path / f"trial_{trial}" / "tensorboard"
        told = hparams(shown)
        assert told, "at least one process has trained it"
        drawn = watched.result.trials.set_index("trial_id").loc[trial, "hparams.lr"]
        assert {each["lr"] for each in told} == {drawn}
        curves = dict(scalars(shown)["Determined/val_error"]) if trial != FAILING else {}
        assert curves == pytest.approx(curve(watched.result, trial, "validation", "error"))


def test_mlflow_has_every_run_and_every_metric(watched: Watched) -> None:
    mlflow, result = watched.mlflow, watched.result
    assert sorted(mlflow.trials) == list(range(TRIAL_COUNT))
    states = mlflow.states()
    assert states.pop(FAILING) == ("FAILED", "ERRORED")
    assert states.pop(INVALID) == ("FAILED", "INVALID_HP")
    assert set(states.values()) == {("FINISHED", "COMPLETED"), ("FINISHED", "PRUNED")}
    assert mlflow.parent.info.status == "FINISHED"
    shown = result.trials.set_index("trial_id")
    for trial, run in mlflow.trials.items():
        assert run.data.params["lr"] == str(shown.loc[trial, "hparams.lr"])
    for trial, kind, name in result.metrics[["trial_id", "kind", "name"]].drop_duplicates().itertuples(index=False):
        assert dict(mlflow.history(trial, f"{kind}/{name}")) == curve(result, trial, kind, name)
    assert mlflow.parent.data.tags["dray.best_trial"] == str(result.best_trial.trial_id)
    assert mlflow.parent.data.metrics == {"best/error": result.best_trial.metric}


def test_wandb_has_every_run_and_every_metric(watched: Watched) -> None:
    wandb, result = WandB(watched.result.path), watched.result
    assert sorted(wandb.runs) == [f"trial_{trial}" for trial in range(TRIAL_COUNT)]
    assert wandb.states == {f"trial_{row.trial_id}": row.state for row in result.trials.itertuples()}
    for trial in range(TRIAL_COUNT):
        rows = wandb.history.get(f"trial_{trial}", [])
        found = {row["batches"]: row["validation/error"] for row in rows if "validation/error" in row}
        assert found == curve(result, trial, "validation", "error")


def test_the_terminal_hears_nothing_of_them(watched: Watched) -> None:
    for told in ("wandb", "mlflow", "MLflow", "optuna", "View run", "alembic"):
        assert told not in watched.output
