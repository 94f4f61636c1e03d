"""The multi-fidelity sampler: its proposals, its data, the gain of a proposal, and equal proposals after a
replay."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import numpy as np
import pytest

from searchers import Exited, Losses, Metric, Objectives, RandomSampler, Reported, Space, Started, parse_space
from searchers.acquisition import Gain
from searchers.auto import Auto
from searchers.multi_fidelity import MultiFidelitySampler
from searchers.rung_results import normalised, normalised_together, relative, standardised
from searchers.simulate import Curve, simulate
from searchers.unit_cube import Array
from tests.searchers.helpers import LINE, new_search, tell

RUNGS = (1, 4, 16)


def knowing(curve: Callable[[float, int], float], *, reach: Callable[[int], int], trials: int) -> MultiFidelitySampler:
    """Create a sampler after random trials, each of which reached the first `reach(trial)` rungs."""
    sampler = MultiFidelitySampler(LINE, seed=7, rungs=RUNGS)
    for trial in range(trials):
        x = Random(trial).random()
        reports = [(step, curve(x, step)) for step in RUNGS[: reach(trial)]]
        tell(sampler, trial, x, *reports, reason="stopped" if len(reports) < 3 else "completed")
    return sampler


def proposed(sampler: MultiFidelitySampler, first: int = 101) -> list[float]:
    """Return the hyperparameters of the next four trials that are not random."""
    return [float(sampler.ask(first + more)["x"]) for more in (0, 2, 6, 8)]  # type: ignore[arg-type]


def test_first_draws_then_every_second_then_every_fifth_are_those_of_random_search() -> None:
    sampler, random = MultiFidelitySampler(LINE, seed=7, rungs=RUNGS), RandomSampler(LINE, seed=7)
    assert [sampler.ask(trial) for trial in range(12)] == [random.ask(trial) for trial in range(12)]
    sampler = knowing(lambda x, step: x, reach=lambda trial: 1, trials=20)
    assert [trial for trial in range(20, 32) if sampler.ask(trial) == random.ask(trial)] == [20, 22, 24, 26, 28, 30]
    sampler = knowing(lambda x, step: x, reach=lambda trial: 1, trials=41)
    assert [trial for trial in range(41, 52) if sampler.ask(trial) == random.ask(trial)] == [45, 50]


def test_results_of_the_first_rung_are_enough() -> None:
    sampler = knowing(lambda x, step: (x - 0.3) ** 2, reach=lambda trial: 1, trials=20)
    assert all(abs(x - 0.3) < 0.1 for x in proposed(sampler))


def test_where_the_first_rung_misleads_the_end_is_believed() -> None:
    """At step 1 the optimum is at .9, at the end at .2, as with learning rates; 12 of 40 trials reached the end."""
    sampler = knowing(
        lambda x, step: (x - (0.9 if step == 1 else 0.2)) ** 2,
        reach=lambda trial: 3 if trial % 10 < 3 else 1,
        trials=40,
    )
    assert all(abs(x - 0.2) < 0.15 for x in proposed(sampler))


def test_without_noise_the_search_goes_on_to_converge() -> None:
    """Values of the few trials at higher rungs, stretched to the spread of all, would look like noise."""
    for seed in range(3):
        auto = Auto(max_trials=100, max_length=9)
        search = new_search(auto, seed=seed, sampler=MultiFidelitySampler(LINE, seed=seed, rungs=auto.rungs))
        simulate(search, 1, lambda hparams: Curve(lambda step: (float(hparams["x"]) - 0.3) ** 2))  # type: ignore[arg-type]
        assert min(abs(float(search.params(trial)["x"]) - 0.3) for trial in search.trials) < 1e-4  # type: ignore[arg-type]


def test_noisy_rungs_are_normalised_as_if_each_were_alone() -> None:
    rng = np.random.default_rng(0)
    first = dict(enumerate(rng.normal(size=100)))
    second = {trial: value + rng.normal(0, 0.1) for trial, value in first.items() if value < -1}
    each = [normalised(np.array(list(rung.values()))) for rung in (first, second)]
    assert all(map(np.array_equal, normalised_together([first, second]), each))


def test_without_rungs_the_last_value_of_a_completed_trial_counts() -> None:
    sampler = MultiFidelitySampler(LINE, seed=7, rungs=())
    for trial in range(20):
        x = Random(trial).random()
        tell(sampler, trial, x, (5, 1 - x), (10, (x - 0.3) ** 2), reason="completed")
    assert all(abs(x - 0.3) < 0.1 for x in proposed(sampler))


@pytest.mark.parametrize("reason", ["errored", "diverged", "invalid_hp"])
def test_where_trials_fail_none_is_proposed(reason: str) -> None:
    """Values decrease towards x = 1, but above .7 every trial fails before its first report."""
    sampler = MultiFidelitySampler(LINE, seed=7, rungs=RUNGS)
    for trial in range(30):
        x = Random(trial).random()
        if x > 0.7:
            tell(sampler, trial, x, reason=reason)
        else:
            tell(sampler, trial, x, (1, 1 - x), reason="stopped")
    assert all(0.5 < x < 0.8 for x in proposed(sampler))


def test_trials_asked_at_the_same_time_differ() -> None:
    sampler = knowing(lambda x, step: 1.0, reach=lambda trial: 1, trials=12)
    drawn = []
    for trial in range(101, 105):
        drawn.append(float(sampler.ask(trial)["x"]))  # type: ignore[arg-type]
        sampler.tell(Started(trial=trial), {"x": drawn[-1]})
    assert min(abs(one - other) for one in drawn for other in drawn if one is not other) > 0.01


def test_no_trial_is_proposed_again_where_the_best_are_at_the_edge() -> None:
    sampler = MultiFidelitySampler(LINE, seed=7, rungs=(1,))
    drawn = []
    for trial in range(40):
        drawn.append(float(sampler.ask(trial)["x"]))  # type: ignore[arg-type]
        tell(sampler, trial, drawn[-1], (1, drawn[-1]), reason="completed")
    assert min(drawn) < 0.01
    assert len(set(drawn)) == 40


@pytest.mark.parametrize("value", [1.0, math.inf, 1e308, -1e308, 5e-324])
def test_equal_infinite_and_huge_values_are_survived(value: float) -> None:
    for curve in (lambda x, step: value, lambda x, step: value if x < 0.5 else -value / 2):
        assert all(0 <= x <= 1 for x in proposed(knowing(curve, reach=lambda trial: 1, trials=12)))


@pytest.mark.parametrize("worst", [1e300, -1e300])
def test_a_huge_value_among_tiny_ones_does_not_overflow(worst: float) -> None:
    values = np.array([0.0] * 4 + [1e-12] * 8 + [worst])
    for scaled in (normalised(values), standardised(values), relative(values)):
        assert np.isfinite(scaled).all()
        assert np.argmax(np.abs(scaled)) == 12


SQUARE = parse_space({name: {"type": "double", "minval": 0, "maxval": 1} for name in ("x", "y")})


def knowing_several(
    losses: Callable[[float, float, int], Losses], *metrics: Metric, space: Space = SQUARE, trials: int = 40
) -> MultiFidelitySampler:
    """Create a sampler after random trials, of which every third one reached the end."""
    sampler = MultiFidelitySampler(space, seed=7, rungs=RUNGS, objectives=Objectives(metrics))
    for trial in range(trials):
        point = space.sample(Random(trial))
        sampler.tell(Started(trial=trial), point)
        for step in RUNGS if trial % 3 == 0 else RUNGS[:1]:
            found = losses(float(str(point["x"])), float(str(point["y"])), step)
            sampler.tell(Reported(trial=trial, step=step, value=found.values[0], losses=found), point)
        sampler.tell(Exited(trial=trial, reason="completed" if trial % 3 == 0 else "stopped"), point)
    return sampler


def proposed_points(sampler: MultiFidelitySampler, count: int = 20) -> list[tuple[float, float]]:
    """Return (x, y) of the next trials that are not random, each started before the next is asked for."""
    found = []
    for trial in (trial for trial in itertools.count(101) if trial % 10 not in (0, 5)):
        if len(found) == count:
            return found
        point = sampler.ask(trial)
        sampler.tell(Started(trial=trial), point)
        found.append((float(str(point["x"])), float(str(point["y"]))))
    raise AssertionError


LOSS, SIZE = Metric(name="loss"), Metric(name="size")


def test_with_two_objectives_proposals_are_spread_over_the_front() -> None:
    """The loss is 1 - size at best, at y = .3, and falls as the trial trains; the size is x."""
    points = proposed_points(
        knowing_several(lambda x, y, step: Losses((1 - x + 3 * abs(y - 0.3) + 0.1 / step, x)), LOSS, SIZE)
    )
    assert sum(abs(y - 0.3) for _, y in points) / len(points) < 0.1
    sizes = sorted(x for x, _ in points)
    assert sizes[0] < 0.2
    assert sizes[-1] > 0.8
    assert max(after - before for before, after in itertools.pairwise(sizes)) < 0.4


@pytest.mark.parametrize("reaches_the_end", [True, False])
def test_a_constraint_is_learned_also_before_a_trial_reaches_the_end(reaches_the_end: bool) -> None:
    """The loss is smallest at x = 1, but x must be at most .4."""
    sampler = knowing_several(
        lambda x, y, step: Losses((-x + abs(y - 0.3),), ((x - 0.4) / 0.4,)), LOSS, Metric(name="size", at_most=0.4)
    )
    if not reaches_the_end:
        sampler.extended((*RUNGS, 64))
    points = proposed_points(sampler, 8)
    assert sum(0.3 < x < 0.45 for x, _ in points) >= 6


def test_while_no_trial_keeps_the_constraints_they_alone_count() -> None:
    points = proposed_points(
        knowing_several(lambda x, y, step: Losses((x,), (1.01 - x,)), LOSS, Metric(name="size", at_least=1.01)), 4
    )
    assert all(x > 0.9 for x, _ in points)


def test_where_a_metric_is_not_finite_nothing_is_proposed() -> None:
    sampler = knowing_several(lambda x, y, step: Losses((y, x)), LOSS, SIZE, trials=0)
    for trial in range(40):
        point = SQUARE.sample(Random(trial))
        x, y = float(str(point["x"])), float(str(point["y"]))
        sampler.tell(Started(trial=trial), point)
        losses = Losses((abs(y - 0.5), -x)) if x < 0.7 else None
        sampler.tell(Reported(trial=trial, step=1, value=math.inf, losses=losses), point)
        sampler.tell(Exited(trial=trial, reason="stopped"), point)
    assert sum(x < 0.75 for x, _ in proposed_points(sampler, 8)) >= 7


@pytest.mark.parametrize("values", [(1e308, -1e308), (-1e308, 1e308), (5e-324, 0.0)])
def test_huge_and_tiny_values_of_several_metrics_are_survived(values: tuple[float, float]) -> None:
    sampler = knowing_several(
        lambda x, y, step: Losses((values[int(x < 0.5)], values[int(y < 0.5)]), (values[int(x < 0.3)],)),
        LOSS,
        SIZE,
        Metric(name="time", at_most=1.0),
        trials=16,
    )
    assert all(0 <= x <= 1 for x, _ in proposed_points(sampler, 2))


WIDE = parse_space(
    {
        **{f"x{i}": {"type": "double", "minval": 0, "maxval": 1} for i in range(16)},
        "lr": {"type": "log", "base": 10, "minval": -5, "maxval": 0},
        "layers": {"type": "int", "minval": 1, "maxval": 12},
        "activation": {"type": "categorical", "vals": ["relu", "gelu", "tanh"]},
        "optimizer": {
            "type": "categorical",
            "vals": [{"name": "sgd", "momentum": {"type": "double", "minval": 0, "maxval": 1}}, {"name": "adam"}],
        },
    }
)


def wide_loss(point: Mapping[str, Any]) -> float:
    """Most of the 16 numbers don't matter; sgd with the best momentum is better than adam."""
    optimizer = point["optimizer"]
    return float(
        sum(weight * (point[f"x{i}"] - 0.3) ** 2 for i, weight in enumerate((2, 1, 0.5)))
        + (math.log10(point["lr"]) + 3) ** 2 / 10
        + abs(point["layers"] - 4) / 20
        + 0.2 * (point["activation"] != "gelu")
        + (abs(optimizer["momentum"] - 0.9) if optimizer["name"] == "sgd" else 0.6)
    )


def test_in_twenty_dimensions_of_all_kinds_it_beats_random_search() -> None:
    sampler, random = MultiFidelitySampler(WIDE, seed=7, rungs=RUNGS), RandomSampler(WIDE, seed=7)
    losses = []
    for trial in range(80):
        point = sampler.ask(trial)
        sampler.tell(Started(trial=trial), point)
        losses.append(wide_loss(point))
        sampler.tell(Reported(trial=trial, step=16, value=losses[-1]), point)
        sampler.tell(Exited(trial=trial, reason="completed"), point)
    others = sorted(wide_loss(random.ask(trial)) for trial in range(1000))
    assert min(losses) < others[0] / 2, "the best of 80 is better than the best of 1000 random draws"


def test_proposals_for_a_hundred_free_slots_differ_and_cover_the_uncertain_region() -> None:
    """The results say nothing, so that the whole line is equally promising."""
    sampler = knowing(lambda x, step: Random(x).random(), reach=lambda trial: 1, trials=60)
    drawn = []
    for trial in range(101, 201):
        drawn.append(float(sampler.ask(trial)["x"]))  # type: ignore[arg-type]
        sampler.tell(Started(trial=trial), {"x": drawn[-1]})
    assert len(set(drawn)) == 100
    assert max(sum(low / 10 <= x <= (low + 1) / 10 for x in drawn) for low in range(10)) <= 40


def test_a_space_of_constants_has_one_point() -> None:
    sampler = MultiFidelitySampler(parse_space({"batch": 64}), seed=3, rungs=RUNGS)
    for trial in range(14):
        assert sampler.ask(trial) == {"batch": 64}
        sampler.tell(Started(trial=trial), {"batch": 64})
        sampler.tell(Reported(trial=trial, step=1, value=0.5), {"batch": 64})


def test_the_number_of_kept_results_is_bounded() -> None:
    rng, sizes = Random(0), []
    sampler = MultiFidelitySampler(LINE, seed=7, rungs=RUNGS)
    for trial in range(3000):
        x, value = rng.random(), rng.random()
        if value < 0.5:
            tell(sampler, trial, x, (1, value), (4, value), reason="stopped")
        else:
            tell(sampler, trial, x, (1, value), reason="stopped")
        if trial % 1000 == 999:
            sizes.append(len(pickle.dumps(sampler)))
    assert max(sizes[1:]) < 1.6 * sizes[0], "between one and two times as many as are kept are held at a time"


def gain(mean: Array, num_objectives: int, directions: int = 5_000) -> Gain:
    drawn = np.abs(np.random.default_rng(0).normal(size=(directions, num_objectives)))
    drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
    return Gain(mean, num_objectives=num_objectives, noise=np.full(mean.shape[1], 0.1), directions=drawn)


@pytest.mark.parametrize("num_objectives", [2, 3])
def test_gains_are_proportional_to_the_hypervolume_that_is_added(num_objectives: int) -> None:
    """The front has a point in each corner; the reference point is at 1.1 in each objective."""
    known = gain(np.eye(num_objectives), num_objectives)
    new = np.array([np.full(num_objectives, value) for value in (0.8, 0.4, -0.2)])
    found = np.exp(known.log(new, np.full(new.shape, 1e-5)))
    # The added hypervolume is counted on a grid: the cells that the new point dominates, and no corner.
    grid = np.stack(np.meshgrid(*[np.linspace(-0.4, 1.1, 151)[:-1] + 0.005] * num_objectives), axis=-1)
    free = ~np.any([(grid >= corner).all(axis=-1) for corner in np.eye(num_objectives)], axis=0)
    added = np.array([(free & (grid >= value).all(axis=-1)).sum() for value in new[:, 0]])
    assert np.allclose(found / found[1], added / added[1], rtol=0.05)


def test_the_probability_that_constraints_are_kept_is_a_factor() -> None:
    """The noise counts too: a limit is kept by what is measured."""
    known = gain(np.array([[0.0, -1.0], [-5.0, 1.0]]), 1, directions=1)
    assert known.best.tolist() == [0], "the better trial violates the limit"
    deviation = np.array([[1.0, np.sqrt(0.99)]])
    safe, even, rare = (float(known.log(np.array([[0.0, limit]]), deviation)[0]) for limit in (-9.0, 0.0, 1.0))
    assert np.exp(even - safe) == pytest.approx(0.5)
    assert np.exp(rare - safe) == pytest.approx(0.1587, abs=1e-4)


def test_without_a_trial_that_keeps_the_constraints_only_their_probability_counts() -> None:
    known = gain(np.array([[0.0, 3.0], [-5.0, 1.0]]), 1, directions=1)
    assert known.best.tolist() == [1, 0]
    gains = known.log(np.array([[9.0, 0.5], [-9.0, 1.5]]), np.ones((2, 2)))
    assert gains[0] > gains[1]


def test_a_front_that_differs_by_rounding_errors_is_a_point() -> None:
    known = gain(np.array([[0.0, 1e-310], [1e-310, 0.0]]), 2)
    assert np.isfinite(known.log(np.array([[-1.0, -1.0]]), np.ones((1, 2)))).all()
