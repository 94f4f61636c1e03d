"""The gain of proposals: hypervolumes and probabilities that are known."""

from __future__ import annotations

import numpy as np
import pytest

from searchers.acquisition import Gain
from searchers.unit_cube import Array


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
