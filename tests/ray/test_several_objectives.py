"""A search with two objectives and a constraint on Ray: its front, and decisions that survive kill -9 of its driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dray
from tests.ray.harness import TRIALS, recorded

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long]

TRIAL_COUNT, BATCHES = 10, 40
METRICS = [{"name": "loss"}, {"name": "size"}, {"name": "memory", "at_most": 1.6}]


def config(record: Path, *, pause_s: float) -> dict[str, Any]:
    fields = recorded(record, trials=TRIAL_COUNT, batches=BATCHES, pause_s=pause_s)
    fields["hyperparameters"] |= {
        "lr": 0.01,
        "size": {"type": "double", "minval": 0, "maxval": 1},
        "luck": {"type": "double", "minval": 0, "maxval": 0.5},
    }
    searcher = {
        "name": "asha",
        "variant": "promotion",
        "metrics": METRICS,
        "max_length": {"batches": BATCHES},
        "max_trials": TRIAL_COUNT,
        "num_rungs": 3,
        "divisor": 2,
        "max_concurrent_trials": 1,  # so that decisions do not depend on who is faster
    }
    return {**fields, "entrypoint": "several:Several", "searcher": searcher}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, ray_is_up: None) -> dray.Result:
    directory = tmp_path_factory.mktemp("several")
    fields = config(directory / "record", pause_s=0.0)
    return dray.Experiment(fields, model_dir=TRIALS, path=directory / "experiment").run()


def closed_form(result: dray.Result) -> dict[int, tuple[float, float, float]]:
    """Loss, size and memory of each trial at its best validation, which is its last."""
    found = {}
    for row in result.trials.to_dict("records"):
        size, luck, batches = row["hparams.size"], row["hparams.luck"], row["batches"]
        found[row["trial_id"]] = (luck + (1 - size) ** 2 + 1 / batches, size, 2 * size)
    return found


def test_result_has_every_metric_of_every_trial(whole: dray.Result) -> None:
    table = whole.trials.set_index("trial_id")
    for trial, (loss, size, memory) in closed_form(whole).items():
        assert table["best_metric"][trial] == table["metrics.loss"][trial] == pytest.approx(loss)
        assert table["metrics.size"][trial] == pytest.approx(size)
        assert table["violation"][trial] == pytest.approx(max(memory / 1.6 - 1, 0))


def test_best_trials_are_the_front_of_those_that_keep_the_limit(whole: dray.Result) -> None:
    points = {trial: each[:2] for trial, each in closed_form(whole).items() if each[2] <= 1.6}
    assert 2 <= len(points) < TRIAL_COUNT, "the seed gives trials on both sides of the limit"
    front = {
        trial
        for trial, (loss, size) in points.items()
        if not any(a <= loss and b <= size and (a, b) != (loss, size) for a, b in points.values())
    }
    best = whole.best_trials
    assert {each.trial_id for each in best} == front
    assert [each.metric for each in best] == sorted(each.metric for each in best)
    assert all(set(each.metrics) == {"loss", "size", "memory"} for each in best)
    assert whole.best_trial.trial_id == best[0].trial_id
    for each in best:
        with each.checkpoint.as_directory() as checkpoint:
            assert (Path(checkpoint) / "manifest.json").exists()
