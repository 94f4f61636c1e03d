"""Every experiment is a study of Optuna's, which Optuna itself reads back."""

from __future__ import annotations

import math
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

import dray
from dray.config.load import load_config
from searchers.events import Exited, Reported, Started
from tests.records.test_result import Story, config, told


def study_of(story: Story) -> optuna.Study:
    return dray.Result(story.directory.path).study()


def values(trial: FrozenTrial) -> tuple[TrialState, float | None, dict[int, float], str]:
    return trial.state, trial.value, trial.intermediate_values, trial.user_attrs["state"]


EXPECTED = [
    (TrialState.COMPLETE, 0.25, {10: 0.25, 20: 0.5}, "COMPLETED"),
    (TrialState.FAIL, None, {}, "ERRORED"),
    (TrialState.FAIL, None, {10: 0.0}, "INVALID_HP"),
    (TrialState.RUNNING, None, {10: 0.375}, "RUNNING"),
    (TrialState.WAITING, None, {}, "PENDING"),
]
"""The trials of the study that `told` makes."""


def test_the_study_agrees_with_the_experiment_on_each_trial(tmp_path: Path) -> None:
    story = told(tmp_path, config())
    story.validate(1, 10, 0.125, save=False)  # better than all others, but it failed
    study = study_of(story)
    assert [values(trial) for trial in study.trials] == [
        EXPECTED[0],
        (TrialState.FAIL, None, {10: 0.125}, "ERRORED"),
        *EXPECTED[2:],
    ]
    assert study.direction == optuna.study.StudyDirection.MINIMIZE
    assert study.metric_names == ["error"]
    assert study.best_trial.number == 0
    shown = story.result.trials.set_index("trial_id")
    for trial in study.trials[:4]:
        assert trial.params == {
            "lr": shown.loc[trial.number, "hparams.lr"],
            "net.depth": shown.loc[trial.number, "hparams.net.depth"],
        }
        assert trial.distributions == {"lr": FloatDistribution(0.1, 0.2), "net.depth": IntDistribution(1, 3)}
    assert study.trials[4].params == {}
    # The clock of `told` ticks once a record: the start, then Started(0) at 1002.
    assert study.trials[0].datetime_start == datetime.fromtimestamp(1002.0)
    assert study.trials[0].duration == datetime.fromtimestamp(1007.0) - datetime.fromtimestamp(1002.0)


@pytest.mark.slow
def test_a_study_can_be_kept_in_a_database(tmp_path: Path) -> None:
    story = told(tmp_path, config())
    story.validate(3, 20, 0.125)
    story.happen(Exited(trial=3, reason="stopped"))
    storage = f"sqlite:///{tmp_path}/study.db"
    dray.Result(story.directory.path).study(storage)
    kept = [values(trial) for trial in optuna.load_study(study_name=None, storage=storage).trials]
    assert kept == [*EXPECTED[:3], (TrialState.PRUNED, 0.125, {10: 0.375, 20: 0.125}, "PRUNED"), EXPECTED[4]]


def test_the_greatest_value_is_the_best_if_larger_is_better(tmp_path: Path) -> None:
    story = told(tmp_path, config(smaller_is_better=False))
    study = study_of(story)
    assert study.direction == optuna.study.StudyDirection.MAXIMIZE
    assert study.trials[0].value == 0.5


def test_nan_and_infinite_values_are_kept_and_complete_no_trial(tmp_path: Path) -> None:
    story = Story(tmp_path / "experiment", config())
    for trial, reason in ((0, "completed"), (1, "stopped")):
        story.happen(Started(trial=trial))
        for batches, value in ((10, math.nan), (20, math.inf), (30, -math.inf)):
            story.validate(trial, batches, value, save=False)
        story.happen(Reported(trial=trial, step=20, value=math.inf), Exited(trial=trial, reason=reason))  # type: ignore[arg-type]
    trials = study_of(story).trials
    assert [(trial.state, trial.value) for trial in trials[:2]] == [(TrialState.FAIL, None), (TrialState.PRUNED, None)]
    seen = trials[0].intermediate_values
    assert math.isnan(seen[10])
    assert (seen[20], seen[30]) == (math.inf, -math.inf)


SPACE: dict[str, Any] = {
    "optimizer": {
        "type": "categorical",
        "vals": [
            {"name": "sgd", "momentum": {"type": "double", "minval": 0.0, "maxval": 0.5}},
            {"name": "adam", "eps": {"type": "log", "base": 10, "minval": -8, "maxval": -6}},
            {"name": "lion", "momentum": {"type": "double", "minval": 0.5, "maxval": 1.0}},
        ],
    },
    "act": {"type": "categorical", "vals": ["relu", None, 2, True, [1, 2]]},
    "width": {"type": "int", "minval": 8, "maxval": 64, "step": 8},
    "batch": 32,
}


def test_categories_are_shown_by_value_and_branches_by_name(tmp_path: Path) -> None:
    base = config().to_dict()
    base["searcher"] |= {"max_trials": 40, "max_concurrent_trials": 0}
    story = Story(tmp_path / "experiment", load_config({**base, "hyperparameters": SPACE}))
    story.happen(*(Started(trial=trial) for trial in range(40)))
    trials = study_of(story).trials
    hparams = [story.search.params(trial) for trial in range(40)]
    labels = ("relu", None, 2, True, "[1, 2]")
    assert trials[0].distributions["act"] == CategoricalDistribution(labels)
    assert trials[0].distributions["width"] == IntDistribution(8, 64, step=8)
    acts: list[Any] = SPACE["act"]["vals"]
    seen = set()
    for trial, point in zip(trials, hparams, strict=True):
        optimizer: Any = point["optimizer"]
        seen.add(optimizer["name"])
        inner = {
            "sgd": "optimizer[0].momentum",  # two categories have one, and they differ
            "adam": "optimizer.eps",
            "lion": "optimizer[2].momentum",
        }[optimizer["name"]]
        assert trial.params == {
            "act": labels[acts.index(point["act"])],
            "width": point["width"],
            "optimizer": optimizer["name"],
            inner: optimizer.get("momentum", optimizer.get("eps")),
        }
        assert "batch" not in trial.params
    assert seen == {"sgd", "adam", "lion"}


def test_paused_and_continuing_trials_run_in_the_study(tmp_path: Path) -> None:
    base = config().to_dict()
    searcher = {
        "name": "asha",
        "variant": "promotion",
        "metric": "error",
        "max_length": {"batches": 40},
        "max_trials": 2,
        "num_rungs": 2,
        "divisor": 2,
        "max_concurrent_trials": 1,
    }
    story = Story(tmp_path / "experiment", load_config({**base, "searcher": searcher}))
    story.happen(Started(trial=0))
    story.validate(0, 20, 0.5, decides=True)
    story.happen(Started(trial=1))
    assert story.search.trials[0].state == "PAUSED"
    states = [values(trial)[0::3] for trial in study_of(story).trials]
    assert states == [(TrialState.RUNNING, "PAUSED"), (TrialState.RUNNING, "RUNNING")]
    story.validate(1, 20, 0.25, decides=True)
    story.validate(1, 40, 0.125, decides=True)
    # The driver ends whom the search stops.
    assert story.search.trials[0].stop_requested
    story.happen(Exited(trial=0, reason="stopped"), Exited(trial=1, reason="completed"))
    study = study_of(story)
    assert [values(trial)[:2] for trial in study.trials] == [(TrialState.PRUNED, 0.5), (TrialState.COMPLETE, 0.125)]
    story.search.extend(max_length=80)
    assert story.search.trials[1].state == "PENDING"
    assert values(study_of(story).trials[1])[:2] == (TrialState.RUNNING, None)
    assert dray.Result(story.directory.path).trials["ended"].isna().tolist() == [False, True]
