"""The process over hyperparameters and rungs: its posterior, its gradient, and its fitted correlations."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import approx_fprime

from searchers.rung_process import Array, Fit, Parameters, Results, RungProcess, _Density, fit_parameters

AXES = np.array([0, 1, 2, 2])  # two numbers, and a category with two values


def drawn(seed: int, n: int, num_rungs: int) -> Results:
    rng = np.random.default_rng(seed)
    return Results(
        rows=rng.random((n, len(AXES))),
        rungs=rng.integers(0, num_rungs, n),
        trials=rng.integers(0, n // 2, n),
        values=rng.normal(size=n),
    )


@pytest.mark.parametrize("common_level", [False, True])
@pytest.mark.parametrize("reached", [2, 3])
def test_the_posterior_is_that_of_the_documented_covariance(common_level: bool, reached: int) -> None:
    """Recompute the posterior pair by pair from the formulas at the top of the module, with results at all three rungs
    or at two. Only levels with a common part count for the deviation."""
    parameters, results = Parameters(AXES, 3, common_level=common_level), drawn(0, 12, reached)
    levels = 4.0 + 0.25 * np.eye(3) if common_level else 4.0 * np.eye(3)
    theta = parameters.mean + np.random.default_rng(1).normal(0, 0.3, len(parameters.mean))
    lengths, distances = np.exp(theta[0:3]), np.exp(theta[3:5])
    scales, tau, sigma = np.exp(theta[5:8]), np.exp(theta[8]), np.exp(theta[9:12])
    places = [0.0, distances[0], distances[0] + distances[1]]

    def covariance(x: Array, r: int, t: int, other: Array, s: int, u: int) -> float:
        d = np.sqrt(5 * sum(((x[column] - other[column]) / lengths[axis]) ** 2 for column, axis in enumerate(AXES)))
        kernel = (1 + d + d**2 / 3) * np.exp(-d)
        return float(scales[r] * scales[s] * np.exp(-abs(places[r] - places[s])) * (kernel + tau**2 * (t == u)))

    known = list(zip(results.rows, results.rungs, results.trials, strict=True))
    prior = np.array([[covariance(*one, *other) + levels[one[1], other[1]] for other in known] for one in known])
    prior += np.diag(sigma[results.rungs] ** 2 + 1e-6)
    new = np.random.default_rng(2).random((5, len(AXES)))
    process = RungProcess(parameters, theta, results)
    found, found_deviation = process.at_the_end(new)
    signal = np.array([[covariance(x, 2, -1, *other) for other in known] for x in new])
    level = np.array([levels[2, other[1]] for other in known])
    assert np.allclose(found, (signal + level) @ np.linalg.solve(prior, results.values))
    cross = signal + level if common_level else signal
    variance = scales[2] ** 2 + (levels[2, 2] if common_level else 0.0)
    assert np.allclose(found_deviation**2, variance - np.einsum("ij,ji->i", cross, np.linalg.solve(prior, cross.T)))


def test_the_expectation_for_a_live_trial_changes_only_deviations() -> None:
    """Equivalent to observing f there without noise; the deviation at a third point is that of a bivariate normal."""
    parameters, results = Parameters(AXES, 3), drawn(0, 12, 3)
    rows = np.random.default_rng(2).random((2, len(AXES)))
    process = RungProcess(parameters, parameters.mean, results)
    mean, deviation = process.at_the_end(rows)
    found, left = process.expecting(rows[:1]).at_the_end(rows)
    assert np.allclose(found, mean)
    assert left[0] < 0.01 * deviation[0]
    assert 0 < left[1] < deviation[1]
    twice, least = process.expecting(rows).at_the_end(rows)
    assert np.allclose(twice, mean)
    assert least.max() < 0.01 * deviation.min()


@pytest.mark.parametrize("num_rungs", [1, 4])
def test_the_gradient_is_that_of_the_density(num_rungs: int) -> None:
    parameters = Parameters(AXES, num_rungs, common_level=True)
    density = _Density(parameters, drawn(3, 30, num_rungs))
    theta = parameters.mean + np.random.default_rng(4).normal(0, 0.3, len(parameters.mean))
    gradient = density(theta)[1]
    by_differences = approx_fprime(theta, lambda at: density(at)[0], 1e-6)
    assert np.allclose(gradient, by_differences, rtol=1e-3, atol=1e-3 * np.abs(gradient).max())


@pytest.mark.parametrize(("tells", "low", "high"), [(1.0, 0.75, 1.0), (0.0, 0.0, 0.45)])
def test_how_well_a_rung_ranks_is_learned(tells: float, low: float, high: float) -> None:
    """60 trials at rung 0, of which every third continues; the next rung ranks them equally, or at random."""
    rng = np.random.default_rng(0)
    rows = rng.random((60, len(AXES)))

    def function(weights: Array) -> Array:
        values: Array = np.sin(4 * rows @ weights)
        return values

    first, other = function(np.array([1.0, 0.5, 0.0, 0.0])), function(np.array([-0.7, 1.2, 0.0, 0.0]))
    last = (tells * first + (1 - tells) * other)[::3]
    results = Results(
        rows=np.vstack([rows, rows[::3]]),
        rungs=np.repeat([0, 1], [60, 20]),
        trials=np.concatenate([np.arange(60), np.arange(0, 60, 3)]),
        values=np.concatenate([first, last]) + rng.normal(0, 0.05, 80),
    )
    parameters = Parameters(AXES, 2)
    theta = fit_parameters(parameters, results, steps=50)
    assert low <= parameters.chain(theta)[0, 1] <= high


def test_a_fit_that_continues_with_more_results_ends_at_the_same_parameters_as_a_long_one() -> None:
    parameters, fit = Parameters(AXES, 3), Fit(Parameters(AXES, 3))
    rows = np.random.default_rng(0).random((120, len(AXES)))
    values = np.sin(4 * rows[:, 0]) + rows[:, 1] + np.random.default_rng(1).normal(0, 0.1, 120)
    for count in (20, 40, 80, 120):
        results = Results(
            rows=rows[:count],
            rungs=np.arange(count) % 3,
            trials=np.arange(count),
            values=values[:count] + 0.3 * (np.arange(count) % 3 == 0) * np.sin(9 * rows[:count, 2]),
        )
        fit.begin(results)
        for _ in range(8):
            fit.step()
    density = _Density(parameters, results)
    assert density(fit.theta)[0] < density(fit_parameters(parameters, results, steps=200))[0] + 0.1
