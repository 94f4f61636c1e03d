"""Optuna's samplers with several objectives and constraints: their data, their proposals, and replays."""

from __future__ import annotations

import math
from random import Random

import pytest
from optuna.trial import TrialState

from searchers import Exited, Losses, Metric, Objectives, Reported, Started, parse_space
from searchers.optuna_sampler import OptunaSampler
from tests.searchers.helpers import needs_constraints

pytestmark = needs_constraints

SQUARE = parse_space(
    {"x": {"type": "double", "minval": 0, "maxval": 1}, "y": {"type": "double", "minval": 0, "maxval": 1}}
)
OBJECTIVES = Objectives((Metric(name="loss"), Metric(name="size"), Metric(name="time", at_most=0.8)))


def new_sampler(name: str = "tpe", **options: object) -> OptunaSampler:
    return OptunaSampler(SQUARE, seed=7, rungs=(1, 4), name=name, options=options, objectives=OBJECTIVES)


def tell(sampler: OptunaSampler, trial: int, losses: Losses | None, x: float = 0.5, y: float = 0.5) -> None:
    point = {"x": x, "y": y}
    sampler.tell(Started(trial=trial), point)
    value = math.inf if losses is None or losses.violation else losses.values[0]
    sampler.tell(Reported(trial=trial, step=4, value=value, losses=losses), point)


def test_trials_are_shown_with_each_objective_and_excess() -> None:
    sampler = new_sampler()
    tell(sampler, 0, Losses((0.5, 3.0), (-0.25,)))
    tell(sampler, 1, Losses((0.75, 2.0), (0.5,)))
    shown = sampler.shown()
    assert [trial.state for trial in shown] == [TrialState.COMPLETE] * 2
    assert [trial.values for trial in shown] == [[0.5, 3.0], [0.75, 2.0]]
    assert [list(trial.constraints.values()) for trial in shown] == [[-0.25], [0.5]]


def test_failed_trial_is_the_worst_in_everything() -> None:
    sampler = new_sampler()
    tell(sampler, 0, Losses((0.5, 3.0), (-0.25,)))
    tell(sampler, 1, Losses((0.75, 2.0), (0.5,)))
    tell(sampler, 2, None)
    sampler.tell(Exited(trial=2, reason="errored"), {"x": 0.5, "y": 0.5})
    assert sampler.shown()[2].values == [0.75, 3.0]
    assert list(sampler.shown()[2].constraints.values()) == [0.5]


def test_best_trials_that_are_kept_are_the_first_front() -> None:
    sampler = new_sampler()
    front = [Losses((trial / 10, 1 - trial / 10), (0.0,)) for trial in range(11)]
    for trial, losses in enumerate(front):
        tell(sampler, trial, losses)
    for trial in range(11, 300):
        tell(sampler, trial, Losses((2.0 + trial, 2.0), (0.0,)))
    assert {trial.number for trial in sampler.shown() if trial.values == list(front[trial.number % 11].values)} == set(
        range(11)
    )
    assert len(sampler.shown()) < 160


@pytest.mark.parametrize(("name", "options"), [("tpe", {}), ("nsga2", {"population_size": 10})])
def test_sampler_learns_the_front_and_the_constraint(name: str, options: dict[str, object]) -> None:
    """Both objectives are best at x = 0; y trades one for the other, and must be at most 0.5."""
    sampler, rng = new_sampler(name, **options), Random(3)
    for trial in range(80):
        point = sampler.ask(trial)
        x, y = (float(str(point[each])) for each in ("x", "y"))
        tell(sampler, trial, Losses((x + y, x + 1 - y), (2 * y - 1,)), x, y)
        sampler.tell(Exited(trial=trial, reason="completed"), point)
    asked = [sampler.ask(trial) for trial in range(81, 110) if trial % 4]
    drawn = [rng.random() for _ in range(1000)]
    assert sum(float(str(point["x"])) for point in asked) / len(asked) < 0.75 * sum(drawn) / len(drawn)
    assert sum(float(str(point["y"])) <= 0.5 for point in asked) / len(asked) > 0.7
