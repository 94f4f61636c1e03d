"""bench/recorded_problems.py: the recorded tables are complete, and a problem replays them; regrets."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from searchers import parse_space

BENCH = Path(__file__).parents[1] / "bench"
TASKS = [
    "digits_mlp",
    "diabetes_mlp",
    "code_origin",
    "docs_gru",
    "digits_vit",
    "digits_cnn",
    "cancer_mlp",
    "code_tags",
    "code_transformer",
    "pixels",
]

SPACE = {
    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": 0},
    "optimizer": {
        "type": "categorical",
        "vals": [{"name": "sgd", "momentum": {"type": "double", "minval": 0, "maxval": 1}}, {"name": "adam"}],
    },
}
ADAM = {"name": "adam"}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes the modules of bench/ importable; no other test finds them."""
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(BENCH) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


@pytest.fixture
def recorded(bench: None) -> ModuleType:
    return importlib.import_module("recorded_problems")


def sgd(momentum: float) -> dict[str, Any]:
    return {"name": "sgd", "momentum": momentum}


@pytest.fixture
def tiny(recorded: ModuleType) -> Any:
    """Two configurations of each optimizer, which is all that matters; the losses of the first of two trainings are
    larger by a quarter, those of the second smaller."""
    configs = [{"lr": lr, "optimizer": optimizer} for lr in (1e-3, 1e-1) for optimizer in (ADAM, sgd(0.5))]
    adam, others = np.outer([1.25, 0.8], [8, 4, 1]), np.outer([1.25, 0.8], [9, 8, math.e])
    return recorded.Recording(parse_space(SPACE), configs, np.array([adam, others, adam, others]))


@pytest.mark.parametrize("task", TASKS)
def test_a_table_has_300_configurations_with_two_trainings_or_more_of_27_epochs(task: str) -> None:
    table = pq.read_table(BENCH / "curves" / f"{task}.parquet")
    space = parse_space(json.loads(table.schema.metadata[b"space"]))
    seeds = table["seed"].to_pylist()
    trainings = max(seeds) + 1
    assert trainings >= 2
    assert seeds == list(range(trainings)) * 300
    configs = table["hparams"].to_pylist()
    assert configs == [config for config in configs[::trainings] for _ in range(trainings)]
    assert len(set(configs)) == 300
    assert all(space.allows(json.loads(config)) for config in configs[::trainings])
    losses = np.array(table["losses"].to_pylist())
    assert losses.shape == (300 * trainings, 27)
    assert len(np.unique(losses[np.isfinite(losses[:, -1]), -1])) > 200  # trainings differ
    assert np.isfinite(losses).mean() > 0.9
    assert losses[np.isfinite(losses)].min() > 0


def test_the_tables_are_those_of_the_tasks_and_have_less_than_2_mb_together(recorded: ModuleType) -> None:
    assert sorted((*recorded.TUNE_ON, *recorded.KEPT)) == sorted(TASKS)
    assert {path.stem for path in (BENCH / "curves").glob("*.parquet")} == set(TASKS)
    assert sum(path.stat().st_size for path in (BENCH / "curves").glob("*.parquet")) < 2_000_000


def test_a_point_gets_the_forests_curve_with_each_trainings_difference_in_turn(recorded: ModuleType, tiny: Any) -> None:
    problem = recorded.RecordedProblem(tiny, seed=1, rungs=(1, 3))
    for times in (0.8, 1.25, 0.8):
        curve = problem.curve({"lr": 2e-3, "optimizer": ADAM})
        assert [curve(t) for t in (2, 3)] == pytest.approx([4 * times, times])
    assert problem.curve({"lr": 2e-1, "optimizer": ADAM})(3) == pytest.approx(0.8)  # the nearest one's own turns
    assert problem.curve(tiny.configs[1])(3) == pytest.approx(0.8 * math.e)


def test_curves_of_recorded_configurations_are_about_theirs(recorded: ModuleType) -> None:
    recording = recorded.recording("digits_mlp")
    found = np.array([np.log(recording.curve(config, 0)) for config in recording.configs])
    own = np.minimum(np.log(np.nan_to_num(recording.losses[:, 0], nan=np.inf)), found.max())
    apart = own - found
    assert 1 - apart.var(axis=0)[-1] / own.var(axis=0)[-1] > 0.85
    assert [recording.nearest(recording.configs[number]) for number in range(0, 300, 30)] == list(range(0, 300, 30))


def test_a_diverged_training_is_as_bad_as_other_bad_ones(recorded: ModuleType, tiny: Any) -> None:
    tiny.losses[1] = [[9, math.inf, math.nan], [9, math.inf, math.nan]]
    diverged = recorded.Recording(tiny.space, tiny.configs, tiny.losses)
    curve = recorded.RecordedProblem(diverged, rungs=(1, 3)).curve(diverged.configs[1])
    assert math.e < curve(3) <= 9


@pytest.mark.parametrize(
    ("config", "number"),
    [
        ({"lr": 9e-3, "optimizer": ADAM}, 0),  # in the logarithm
        ({"lr": 1.1e-2, "optimizer": ADAM}, 2),
        ({"lr": 1e-3, "optimizer": sgd(0.1)}, 1),
        ({"lr": 1.0, "optimizer": sgd(1.0)}, 3),
    ],
)
def test_the_nearest_configuration(tiny: Any, config: dict[str, Any], number: int) -> None:
    assert tiny.nearest(config) == number


def test_regret_is_that_of_the_smallest_loss_0_for_the_best_point_and_1_for_the_median_one(
    recorded: ModuleType, tiny: Any
) -> None:
    problem = recorded.RecordedProblem(recorded.recording("digits_mlp"), rungs=(3, 9, 27))
    regrets = [problem.regret(problem.space.sample(Random(number))) for number in range(300)]
    assert 0 <= min(regrets) < 0.25
    assert np.median(regrets) == pytest.approx(1, abs=0.15)
    assert tiny.best == pytest.approx(0)
    tiny.losses[0] = tiny.losses[2] = [[8, 1 / math.e, 1.25], [8, 1 / math.e, 0.8]]
    assert recorded.Recording(tiny.space, tiny.configs, tiny.losses).best == pytest.approx(-1)


@pytest.mark.slow
@pytest.mark.long
def test_every_way_searches_a_recorded_problem(bench: None) -> None:
    search_quality = importlib.import_module("search_quality")
    for way in search_quality.WAYS:
        found = search_quality.Case("four", "digits_mlp", 0).search(way)
        assert len(found.regrets) == len(search_quality.SHARES)
        assert found.trials >= 32  # full trainings
        assert 0 <= found.regrets[-1] <= 1.5, way
    again = search_quality.Case("four", "digits_mlp", 0).search(way)
    assert (again.regrets, again.trials) == (found.regrets, found.trials)
