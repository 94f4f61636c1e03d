"""A real run is followed: the study for Optuna live, MLflow and Weights & Biases, also past the driver's death."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

import dray
from dray.report.ui import has_study
from tests.loggers import MLflow, WandB, mlflow_server
from tests.pytorch.test_tensorboard import hparams, scalars
from tests.ray.harness import TRIALS, Driver, ends, promotion, recorded, write_config

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TRIAL_COUNT, BATCHES = 8, 40
STATES = {
    "COMPLETED": TrialState.COMPLETE,
    "STOPPED": TrialState.PRUNED,
    "RUNNING": TrialState.RUNNING,
    "PAUSED": TrialState.RUNNING,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    live: list[FrozenTrial]
    """The study while the search went on."""
    result: dray.Result
    mlflow: MLflow
    output: str


def trials(path: Path) -> list[FrozenTrial]:
    """Of the study, where there is one yet."""
    file = path / "optuna.db"
    return optuna.load_study(study_name="recorded", storage=f"sqlite:///{file}").trials if has_study(file) else []


@pytest.fixture(scope="module")
def story(drive: Callable[..., Driver], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    pytest.importorskip("wandb")
    directory = tmp_path_factory.mktemp("observers")
    path = directory / "experiment"
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as server:
        settings = recorded(
            directory / "record",
            trials=TRIAL_COUNT,
            batches=BATCHES,
            pause_s=0.05,
            searcher=promotion(TRIAL_COUNT, BATCHES),
            loggers={"mlflow": {"tracking_uri": server}, "wandb": {"mode": "offline"}},
            entrypoint="recorded:FirstAhead",
        )
        until = directory / "until"
        # Past the last rung but one, until the driver is dead.
        settings["hyperparameters"] |= {"held_at": BATCHES - 5, "until": str(until)}
        driver = drive("create", write_config(directory, settings), TRIALS, "--path", path)
        driver.wait_for(lambda: any(trial.state.is_finished() for trial in trials(path)), "a trial's end in the study")
        live = trials(path)
        driver.kill()
        until.touch()
        assert len(ends(path)) < TRIAL_COUNT, "the driver was to die in the middle"
        assert drive("resume", path).wait() == 0, driver.log.read_text()
        runs, output = MLflow(server, "recorded"), driver.log.read_text()
        yield Story(live=live, result=dray.Result(path), mlflow=runs, output=output)


def curve(result: dray.Result, trial: int, kind: str, name: str) -> dict[int, float]:
    rows = result.metrics
    rows = rows[(rows["trial_id"] == trial) & (rows["kind"] == kind) & (rows["name"] == name)]
    return dict(zip(rows["batches"], rows["value"], strict=True))


def test_the_study_is_live(story: Story) -> None:
    assert any(trial.state == TrialState.RUNNING for trial in story.live)
    for trial in story.live:
        # Trials repeat themselves exactly: what was seen then is a part of what there is now.
        known = curve(story.result, trial.number, "validation", "error")
        assert trial.intermediate_values.items() <= known.items()


def test_the_study_agrees_with_the_results_at_the_end(story: Story) -> None:
    shown = story.result.trials.set_index("trial_id")
    found = trials(story.result.path)
    assert [trial.number for trial in found] == list(range(TRIAL_COUNT))
    for trial in found:
        row: Any = shown.loc[trial.number]
        assert trial.state == STATES[row["state"]]
        assert trial.user_attrs == {"state": row["state"]}
        assert trial.value == row["best_metric"]
        assert trial.params == {"lr": row["hparams.lr"]}
        assert trial.intermediate_values == curve(story.result, trial.number, "validation", "error")


def test_tensorboard_has_every_trial(story: Story) -> None:
    for trial in range(TRIAL_COUNT):
        shown = story.result.path / f"trial_{trial}" / "tensorboard"
        told = hparams(shown)
        assert told, "at least one process has trained it"
        drawn = story.result.trials.set_index("trial_id").loc[trial, "hparams.lr"]
        assert {each["lr"] for each in told} == {drawn}
        curves = dict(scalars(shown)["Determined/val_error"])
        assert curves == pytest.approx(curve(story.result, trial, "validation", "error"))


def test_mlflow_has_every_run_and_every_metric(story: Story) -> None:
    mlflow, result = story.mlflow, story.result
    assert sorted(mlflow.trials) == list(range(TRIAL_COUNT))
    assert set(mlflow.states().values()) == {("FINISHED", "COMPLETED"), ("FINISHED", "STOPPED")}
    assert mlflow.parent.info.status == "FINISHED"
    shown = result.trials.set_index("trial_id")
    for trial, run in mlflow.trials.items():
        assert run.data.params["lr"] == str(shown.loc[trial, "hparams.lr"])
    for trial, kind, name in result.metrics[["trial_id", "kind", "name"]].drop_duplicates().itertuples(index=False):
        assert dict(mlflow.history(trial, f"{kind}/{name}")) == curve(result, trial, kind, name)
    assert mlflow.parent.data.tags["dray.best_trial"] == str(result.best_trial.trial_id)
    assert mlflow.parent.data.metrics == {"best/error": result.best_trial.metric}


def test_wandb_has_every_run_and_every_metric(story: Story) -> None:
    wandb, result = WandB(story.result.path), story.result
    assert sorted(wandb.runs) == [f"trial_{trial}" for trial in range(TRIAL_COUNT)]
    assert wandb.states == {f"trial_{row.trial_id}": row.state for row in result.trials.itertuples()}
    for trial in range(TRIAL_COUNT):
        rows = wandb.history[f"trial_{trial}"]
        found = {row["batches"]: row["validation/error"] for row in rows if "validation/error" in row}
        assert found == curve(result, trial, "validation", "error")


def test_the_terminal_hears_nothing_of_them(story: Story) -> None:
    for told in ("wandb", "mlflow", "MLflow", "optuna", "View run", "alembic"):
        assert told not in story.output
