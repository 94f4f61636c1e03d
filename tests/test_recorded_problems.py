"""bench/recorded_problems.py: the recorded tables are complete, and a problem replays them; regret in closed form."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
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
    """Three configurations with two trainings of three epochs; their final losses are e, 1 and e squared on average."""
    configs = [{"lr": 1e-3, "optimizer": ADAM}, {"lr": 1e-1, "optimizer": ADAM}, {"lr": 1e-2, "optimizer": sgd(0.5)}]
    losses = np.array(
        [
            [[9, 5, math.e - 0.5], [8, 4, math.e + 0.5]],
            [[7, 3, 0.75], [6, 2, 1.25]],
            [[9, 9, math.e**2], [9, 9, math.e**2]],
        ]
    )
    return recorded.Recording(parse_space(SPACE), configs, losses)


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


def test_a_recorded_configuration_gets_its_own_losses_of_each_training_in_turn(recorded: ModuleType, tiny: Any) -> None:
    problem = recorded.RecordedProblem(tiny, seed=1, rungs=(1, 3))
    for training in (1, 0, 1):
        curve = problem.curve(tiny.configs[1])
        assert [curve(t) for t in (1, 2, 3)] == pytest.approx(tiny.losses[1, training])
    assert problem.curve(tiny.configs[0])(1) == pytest.approx(8)  # the turns are each configuration's own


def test_a_real_table_is_replayed(recorded: ModuleType) -> None:
    recording = recorded.recording("digits_mlp")
    problem = recorded.RecordedProblem(recording, seed=0)
    for number in range(0, 300, 30):
        assert recording.nearest(recording.configs[number]) == number
        curve = problem.curve(recording.configs[number])
        np.testing.assert_allclose([curve(t) for t in range(1, 28)], recording.losses[number, 0], rtol=1e-9)


def test_diverged_losses_stay_as_recorded(recorded: ModuleType, tiny: Any) -> None:
    tiny.losses[2, 0] = [9, math.inf, math.nan]
    diverged = recorded.Recording(tiny.space, tiny.configs, tiny.losses)
    problem = recorded.RecordedProblem(diverged, seed=0, rungs=(1, 3))
    curve = problem.curve(diverged.configs[2])
    assert curve(1) == pytest.approx(9)
    assert curve(2) == math.inf
    assert math.isnan(curve(3))
    assert problem.regret(diverged.configs[2]) >= 0.9  # with the worst of those that do not diverge


@pytest.mark.parametrize(
    ("config", "number"),
    [
        ({"lr": 9e-3, "optimizer": ADAM}, 0),  # in the logarithm; the third has another optimizer
        ({"lr": 1.1e-2, "optimizer": ADAM}, 1),
        ({"lr": 1e-3, "optimizer": sgd(0.5)}, 2),
        ({"lr": 1.0, "optimizer": sgd(1.0)}, 2),
    ],
)
def test_the_nearest_configuration(tiny: Any, config: dict[str, Any], number: int) -> None:
    assert tiny.nearest(config) == number


def test_regret_is_0_for_the_best_and_1_for_the_median_configuration(recorded: ModuleType, tiny: Any) -> None:
    problem = recorded.RecordedProblem(tiny, rungs=(1, 3))
    assert [problem.regret(config) for config in tiny.configs] == pytest.approx([1, 0, 2])


def test_between_configurations_the_losses_are_between_theirs(recorded: ModuleType, tiny: Any) -> None:
    problem = recorded.RecordedProblem(tiny, rungs=(1, 3))
    points = [{"lr": 10**exponent, "optimizer": ADAM} for exponent in np.linspace(-4, 0, 33)]
    regrets = [problem.regret(point) for point in points]
    assert min(regrets) == pytest.approx(0)
    assert len(set(np.round(regrets, 6))) > 10  # a slope, not two steps
    assert all(0.75 <= problem.curve(point)(3) <= 1.25 * math.e**2 for point in points)


@pytest.mark.slow
def test_every_way_searches_a_recorded_problem(bench: None) -> None:
    search_quality = importlib.import_module("search_quality")
    for way in search_quality.WAYS:
        found = search_quality.Case("four", "digits_mlp", 0).search(way)
        assert len(found.regrets) == len(search_quality.SHARES)
        assert found.trials >= 32  # full trainings
        assert 0 <= found.regrets[-1] <= 1, way
    again = search_quality.Case("four", "digits_mlp", 0).search(way)
    assert (again.regrets, again.trials) == (found.regrets, found.trials)
