"""First points from earlier searches whose best hyperparameters are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from searchers import Exited, Reported, parse_space
from searchers.events import Losses
from searchers.like import MOST_POINTS, Earlier, first_points

LR = {"type": "log", "base": 10, "minval": -5, "maxval": 0}
SPACE = {"lr": LR, "dropout": {"type": "double", "minval": 0, "maxval": 1}, "epochs": 3}
RUNGS = (1, 3, 9)
Loss = Callable[[Mapping[str, Any]], float | Losses]


def earlier(loss: Loss, space: Mapping[str, Any] = SPACE, *, trials: int = 48, seed: int = 0) -> Earlier:
    """A search whose trials are all trained to the end."""
    rng, drawn = Random(seed), parse_space(space)
    hparams = {trial: drawn.sample(rng) for trial in range(trials)}
    events: list[Reported | Exited] = []
    for trial, each in hparams.items():
        found = loss(each)
        losses = found if isinstance(found, Losses) else None
        value = found.values[0] if isinstance(found, Losses) else found
        events += [Reported(trial=trial, step=rung, value=value, losses=losses) for rung in RUNGS]
        events.append(Exited(trial=trial, reason="completed" if math.isfinite(value) else "errored"))
    return Earlier(rungs=RUNGS, hparams=hparams, events=events)


def near(best: float) -> Loss:
    """A bowl around this exponent of the learning rate."""
    return lambda hparams: (math.log10(hparams["lr"]) - best) ** 2 + 0.1 * hparams.get("dropout", 0.0)


def exponents(points: list[dict[str, Any]]) -> list[float]:
    return [math.log10(point["lr"]) for point in points]


def test_each_earlier_search_finds_its_best_among_the_points() -> None:
    points = first_points(parse_space(SPACE), [earlier(near(best), seed=int(-best)) for best in (-1, -2.5, -4)], seed=0)
    assert 3 <= len(points) <= MOST_POINTS
    for best in (-1, -2.5, -4):
        assert min(abs(exponent - best) for exponent in exponents(points)) < 0.4
    assert all(point["epochs"] == 3 for point in points)


def test_one_point_is_enough_for_searches_that_agree() -> None:
    assert len(first_points(parse_space(SPACE), [earlier(near(-2), seed=seed) for seed in range(4)], seed=0)) == 1


def test_scale_and_offset_of_a_metric_do_not_matter() -> None:
    space = parse_space(SPACE)
    plain = first_points(space, [earlier(near(-2))], seed=0)
    assert first_points(space, [earlier(lambda each: 4096 * near(-2)(each) - 1024)], seed=0) == plain  # type: ignore[operator]


def test_the_seed_decides_what_is_drawn() -> None:
    space, known = parse_space(SPACE), [earlier(near(-2), {"lr": LR})]
    first, again, other = (first_points(space, known, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first[0]["dropout"] != other[0]["dropout"]


def test_nothing_is_learned_if_the_constraint_allows_nothing_or_if_all_trials_diverged() -> None:
    space = parse_space(SPACE)
    assert first_points(replace(space, constraint=lambda each: False), [earlier(near(-2))], seed=0) == []
    assert first_points(space, [earlier(lambda each: math.inf)], seed=0) == []


def test_the_best_is_not_avoided_because_it_diverged_in_the_end() -> None:
    first = {0.002: 1.49, 0.00012: 1.94, 0.017: 2.31, 0.0022: math.inf, 0.00042: 1.15, 0.00013: 2.37, 0.00009: 1.87}
    first |= {0.0031: 1.31, 0.004: 1.11, 0.0084: 2.18, 0.059: 2.7, 0.00068: 1.17}
    second = {0.002: 0.34, 0.00042: 1.17, 0.0031: 1.24, 0.004: 1.12, 0.00068: math.inf}
    lrs = list(first)
    known = Earlier(
        rungs=RUNGS,
        hparams={trial: {"lr": lr} for trial, lr in enumerate(lrs)},
        events=[
            Reported(trial=lrs.index(lr), step=rung, value=value)
            for rung, found in zip(RUNGS, (first, second, {0.002: math.inf}), strict=True)
            for lr, value in found.items()
        ],
    )
    assert exponents(first_points(parse_space({"lr": LR}), [known], seed=0))[0] == pytest.approx(-2.7, abs=0.5)


def test_an_optimum_beyond_the_new_range_is_at_its_end() -> None:
    space = parse_space({**SPACE, "lr": {**LR, "maxval": -3}})
    assert exponents(first_points(space, [earlier(near(-1))], seed=0))[0] == pytest.approx(-3, abs=0.3)


def test_categories_are_known_by_their_values() -> None:
    old = {"optimizer": {"type": "categorical", "vals": ["lion", "adam", "sgd"]}}
    new = {"optimizer": {"type": "categorical", "vals": ["sgd", "rmsprop", "adam"]}, "lr": LR}
    costs = {"lion": 0.0, "adam": 1.0, "sgd": 5.0}
    points = first_points(parse_space(new), [earlier(lambda each: costs[each["optimizer"]], old)], seed=0)
    assert "sgd" not in {point["optimizer"] for point in points}


def test_branches_are_known_by_their_constants() -> None:
    def branches(most: float, **more: object) -> dict[str, Any]:
        momentum = {"type": "double", "minval": 0, "maxval": most}
        return {"optimizer": {"type": "categorical", "vals": ["adam", {"name": "sgd", "momentum": momentum, **more}]}}

    def loss(each: Mapping[str, Any]) -> float:
        return 5.0 if each["optimizer"] == "adam" else abs(each["optimizer"]["momentum"] - 0.5)

    new = parse_space(branches(0.8, nesterov={"type": "categorical", "vals": [False, True]}))
    [first, *_] = first_points(new, [earlier(loss, branches(2.0))], seed=0)
    assert first["optimizer"]["name"] == "sgd"  # type: ignore[index]
    assert first["optimizer"]["momentum"] == pytest.approx(0.5, abs=0.15)  # type: ignore[index]


def test_failed_trials_are_the_worst() -> None:
    def loss(each: Mapping[str, Any]) -> float:
        return math.inf if each["lr"] > 1e-3 else -math.log10(each["lr"])

    [first, *_] = exponents(first_points(parse_space(SPACE), [earlier(loss)], seed=0))
    assert -4 < first < -2.8


def test_several_objectives_are_ranked_by_fronts() -> None:
    def losses(each: Mapping[str, Any]) -> Losses:
        away = abs(math.log10(each["lr"]) + 2)  # the front is at 1e-2, for any dropout
        return Losses((each["dropout"] + away, 1 - each["dropout"] + away), (0.0,))

    [first, *_] = exponents(first_points(parse_space(SPACE), [earlier(losses)], seed=0))
    assert first == pytest.approx(-2, abs=0.4)


def test_a_violated_constraint_is_worse_than_any_front() -> None:
    def losses(each: Mapping[str, Any]) -> Losses:
        exponent = math.log10(each["lr"])
        return Losses((exponent,), (-exponent - 3,))  # the smallest that keeps it is 1e-3

    [first, *_] = exponents(first_points(parse_space(SPACE), [earlier(losses)], seed=0))
    assert -3.2 < first < -2


def test_points_keep_the_constraint() -> None:
    space = parse_space(SPACE, constraint=lambda point: float(point["lr"]) < 1e-3)  # type: ignore[arg-type]
    assert max(exponents(first_points(space, [earlier(near(-1)), earlier(near(-4), seed=1)], seed=0))) < -3


def test_points_of_ones_own_are_only_complemented() -> None:
    space, known = parse_space(SPACE), [earlier(near(-1)), earlier(near(-4), seed=1)]
    points = first_points(space, known, seed=0)
    assert first_points(space, known, seed=0, points=points) == []
    own = [point for point in points if math.log10(float(point["lr"])) < -2.5]  # type: ignore[arg-type]
    assert min(exponents(first_points(space, known, seed=0, points=own))) > -2.5


@pytest.mark.parametrize(
    "known",
    [
        [],
        [earlier(near(-2), trials=2)],
        [earlier(lambda each: each["width"], {"width": LR})],
    ],
    ids=["none", "few results", "nothing in common"],
)
def test_nothing_is_learned_from_nothing(known: list[Earlier]) -> None:
    assert first_points(parse_space(SPACE), known, seed=0) == []
