"""Beliefs: their density, how far they are trusted, and the proposals that follow."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from searchers import Exited, FieldError, RandomSampler, Reported, Started, parse_space
from searchers.beliefs import Belief
from searchers.multi_fidelity import MultiFidelitySampler
from searchers.unit_cube import UnitCube
from tests.searchers.helpers import LINE

SPACE = parse_space(
    {
        "lr": {"type": "log", "base": 10, "minval": -4, "maxval": 0},
        "model": {"layers": {"type": "int", "minval": 1, "maxval": 12}},
        "dropout": {"type": "double", "minval": 0.0, "maxval": 0.5},
        "batch": 64,
        "optimizer": {
            "type": "categorical",
            "vals": [
                {"name": "sgd", "momentum": {"type": "double", "minval": 0, "maxval": 0.9}},
                {"name": "adam"},
                "lion",
            ],
        },
    }
)
PRIOR: dict[str, dict[str, object]] = {
    "lr": {"around": 1e-3, "within": 3},
    "model.layers": {"around": 12, "within": 2},
    "optimizer": {"around": {"name": "sgd"}},
    "optimizer[0].momentum": {"around": 0.9, "within": 0.01},
}
CUBE, BELIEF = UnitCube(SPACE), Belief(SPACE, PRIOR)


def test_the_density_has_the_integral_one_and_excludes_nothing() -> None:
    rows = CUBE.random(np.random.default_rng(0), 200_000)
    density = np.exp(BELIEF.log_density(rows))
    assert density.mean() == pytest.approx(1, abs=0.05)
    assert density.min() >= 0.1


def test_a_belief_about_a_single_category_is_uniform() -> None:
    space = parse_space({"optimizer": {"type": "categorical", "vals": ["adam"]}})
    belief = Belief(space, {"optimizer": {"around": "adam"}})
    rows = belief.random(np.random.default_rng(0), 20)
    assert rows.tolist() == [[1.0]] * 20
    assert belief.log_density(rows) == pytest.approx(0)


def test_nine_of_ten_draws_follow_the_beliefs_and_the_others_are_uniform() -> None:
    points = [CUBE.point(row) for row in BELIEF.random(np.random.default_rng(0), 4000)]
    lr = np.log10([float(str(point["lr"])) for point in points])
    # A normal distribution has 68% within a standard deviation, the uniform one 24%.
    assert np.mean(np.abs(lr + 3) < np.log10(3)) == pytest.approx(0.9 * 0.68 + 0.1 * 0.24, abs=0.03)
    optimizers = [point["optimizer"] for point in points]
    sgd = [each for each in optimizers if isinstance(each, dict) and each["name"] == "sgd"]
    assert len(sgd) / 4000 == pytest.approx(0.9 * 0.75 + 0.1 / 3, abs=0.03)
    assert optimizers.count("lion") / 4000 == pytest.approx(0.9 * 0.125 + 0.1 / 3, abs=0.03)
    assert np.mean([each["momentum"] > 0.87 for each in sgd]) > 0.9
    assert np.mean([point["dropout"] > 0.25 for point in points]) == pytest.approx(0.5, abs=0.03)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "belief", "fault"),
    [
        (
            "lrr",
            {"around": 1e-3, "within": 3},
            "searcher.prior.lrr: is not a hyperparameter that is searched; did you mean lr",
        ),
        (
            "batch",
            {"around": 64},
            "searcher.prior.batch: is not a hyperparameter that is searched; there are: dropout, lr",
        ),
        ("lr", {"around": 2, "within": 3}, "searcher.prior.lr.around: must be a number from 0.0001 to 1, got 2"),
        (
            "lr",
            {"around": "1e-3", "within": 3},
            "searcher.prior.lr.around: must be a number from 0.0001 to 1, got '1e-3'",
        ),
        ("lr", {"around": 1e-3, "within": 1}, "searcher.prior.lr.within: must be a factor > 1, got 1"),
        ("dropout", {"around": 0.1, "within": 0}, "searcher.prior.dropout.within: must be a distance > 0, got 0"),
        ("dropout", {"around": 0.1, "within": True}, "searcher.prior.dropout.within: must be a distance > 0, got True"),
        ("dropout", {"around": 0.1}, "searcher.prior.dropout.within: is required"),
        ("dropout", {"around": 0.1, "within": 0.1, "of": 1}, "searcher.prior.dropout.of: unknown field"),
        (
            "model.layers",
            {"around": 2.5, "within": 2},
            "searcher.prior.model.layers.around: must be an integer from 1 to 12",
        ),
        (
            "optimizer",
            {"around": "adm"},
            "searcher.prior.optimizer.around: must be one of 'lion', or one of 2 mappings",
        ),
        ("optimizer", {"around": {"name": "rmsprop"}}, "searcher.prior.optimizer"),
        (
            "optimizer",
            {"around": {"name": "sgd", "momentum": 0.5}},
            "searcher.prior.optimizer.around: must name 1 category, but {'name': 'sgd', 'momentum': 0.5} names 0; "
            "name a mapping by its constants",
        ),
        ("optimizer", {"around": {}}, "searcher.prior.optimizer.around: must name 1 category, but {} names 2"),
        (
            "optimizer",
            {"around": "lion", "within": 2},
            "searcher.prior.optimizer.within: unknown field; a belief about a cat",
        ),
    ],
)
def test_faults_have_their_paths(name: str, belief: dict[str, object], fault: str) -> None:
    with pytest.raises(FieldError) as caught:
        Belief(SPACE, {**PRIOR, name: belief})
    assert len(caught.value.faults) == 1
    assert str(caught.value).startswith(fault)


def after(trials: int, loss: Callable[[float], float], *, around: float) -> MultiFidelitySampler:
    """Create a sampler with a belief after random trials with this loss."""
    sampler = MultiFidelitySampler(LINE, seed=7, rungs=(1, 4), prior={"x": {"around": around, "within": 0.05}})
    for trial in range(trials):
        point = {"x": Random(trial).random()}
        sampler.tell(Started(trial=trial), point)
        sampler.tell(Reported(trial=trial, step=1, value=loss(point["x"])), point)
        sampler.tell(Exited(trial=trial, reason="stopped"), point)
    return sampler


def share_near(sampler: MultiFidelitySampler, around: float) -> float:
    """Return the share of the random trials, which are multiples of 10, near this value."""
    values = [float(str(sampler.ask(trial)["x"])) for trial in range(10, 2010, 10)]
    return sum(abs(x - around) < 0.1 for x in values) / len(values)


def test_the_first_trial_has_the_believed_values() -> None:
    point = MultiFidelitySampler(SPACE, seed=7, rungs=(1, 4), prior=PRIOR).ask(0)
    assert point["lr"] == pytest.approx(1e-3)
    assert point["model"] == {"layers": 12}
    assert point["optimizer"] == {"name": "sgd", "momentum": pytest.approx(0.9)}


def test_random_trials_follow_a_belief_less_and_less_and_not_at_all_if_its_trials_are_worse() -> None:
    """86% of the trials from the belief are near the believed value, and 20% of the others."""
    assert share_near(after(0, abs, around=0.3), 0.3) == pytest.approx(0.2 + 0.3 * 0.66, abs=0.1)
    shares = [share_near(after(trials, lambda x: abs(x - 0.3), around=0.3), 0.3) for trials in (8, 100)]
    assert shares[0] > 0.28 > shares[1]
    assert share_near(after(40, lambda x: abs(x - 0.3), around=0.9), 0.9) < 0.28


def test_proposals_lean_towards_a_belief_that_the_results_do_not_contradict() -> None:
    def loss(x: float) -> float:
        return -abs(x - 0.5)  # the best values are at both ends

    assert np.mean([float(str(after(16, loss, around=0.05).ask(trial)["x"])) for trial in range(101, 141, 2)]) < 0.3
    assert np.mean([float(str(after(16, loss, around=0.95).ask(trial)["x"])) for trial in range(101, 141, 2)]) > 0.7


def test_without_beliefs_random_trials_are_those_of_random_search() -> None:
    sampler, random = MultiFidelitySampler(LINE, seed=7, rungs=(1, 4), prior={}), RandomSampler(LINE, seed=7)
    assert [sampler.ask(trial) for trial in range(8)] == [random.ask(trial) for trial in range(8)]
