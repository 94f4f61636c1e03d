"""A rung decides like Determined's sorted list, in O(log n); one with a low correlation is skipped; the process over
hyperparameters and rungs."""

from __future__ import annotations

import math
import pickle
from bisect import bisect_left
from collections.abc import Callable, Mapping
from fractions import Fraction
from random import Random
from statistics import fmean
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import approx_fprime

from searchers import ASHA, AdaptiveASHA, PromotionASHA
from searchers.rung import Rung
from searchers.rung_correlation import RungCorrelation, less_strict, rank_correlation
from searchers.rung_process import Array, Fit, Parameters, Results, RungProcess, _Density, fit_parameters
from searchers.simulate import Curve, simulate


class SortedListOracle:
    """Determined's rule: insert before equal values, continue iff index < max(floor(n / divisor), 1)."""

    def __init__(self, divisor: float) -> None:
        self.divisor = Fraction(str(divisor))
        self.values: list[float] = []

    def offer(self, value: float) -> bool:
        index = bisect_left(self.values, value)
        self.values.insert(index, value)
        return index < max(math.floor(len(self.values) / self.divisor), 1)

    def withdraw(self, value: float) -> None:
        self.values.remove(value)


VALUES = st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0, math.inf]) | st.floats(allow_nan=False)
DIVISORS = st.sampled_from([2, 3, 4, 10, 1.5, 2.5, 1.1, 3.7])


@given(st.lists(st.tuples(VALUES, st.booleans(), st.integers(0, 100)), max_size=80), DIVISORS)
def test_decides_as_a_sorted_list_when_trials_are_withdrawn(
    steps: list[tuple[float, bool, int]], divisor: float
) -> None:
    rung, oracle = Rung(length=1, divisor=divisor), SortedListOracle(divisor)
    there: dict[int, float] = {}
    for trial, (value, withdraws, which) in enumerate(steps):
        if withdraws and there:
            gone = sorted(there)[which % len(there)]
            rung.withdraw(gone)
            oracle.withdraw(there.pop(gone))
        else:
            assert rung.rank(trial, value) == oracle.offer(value)
            there[trial] = value
        assert len(rung.values) == len(there)


def test_fractional_divisor_is_the_decimal_number_that_was_written() -> None:
    assert math.floor(33 / 1.1) == 29, "the float quotient, which is not what a user would compute"
    rung = Rung(length=1, divisor=1.1)
    for trial in range(32):
        rung.rank(trial, trial)
    assert rung.rank(32, 28.5), "28.5 is the 30th smallest of 33, and floor(33 / 1.1) is 30"


@given(
    steps=st.lists(st.tuples(VALUES, st.booleans(), st.integers(0, 100)), max_size=40),
    divisor=DIVISORS,
    min_best=st.sampled_from([0, 1]),
)
def test_the_best_are_those_of_a_sorted_list(
    steps: list[tuple[float, bool, int]], divisor: float, min_best: int
) -> None:
    rung = Rung(length=1, divisor=divisor, min_best=1 - min_best)
    rung.min_best = min_best
    there: dict[int, float] = {}
    for step, (value, withdraws, which) in enumerate(steps):
        if withdraws and there:
            gone = sorted(there)[which % len(there)]
            rung.withdraw(gone)
            del there[gone]
        else:
            trial = (step * 37) % 61  # not in the order of their numbers
            rung.rank(trial, value)
            there[trial] = value
        k = max(math.floor(len(there) / Fraction(str(divisor))), min_best)
        best = sorted(there, key=lambda trial: (there[trial], trial))[:k]
        assert rung.best() == [trial for trial in best if there[trial] < math.inf]
        assert rung.values == there


def test_a_trial_is_ranked_once() -> None:
    rung = Rung(length=1, divisor=4)
    rung.rank(7, 0.5)
    assert rung.values == {7: 0.5}
    with pytest.raises(AssertionError, match="trial 7 was ranked"):
        rung.rank(7, 0.4)


def chosen_pairs(rho: float, *, trials: int, divisor: int, seed: int) -> tuple[list[float], list[tuple[float, float]]]:
    """Return values at a rung, and value pairs at both rungs for the best 1/divisor, normal with this correlation."""
    rng = Random(seed)
    values = [rng.gauss(0, 1) for _ in range(trials)]
    best = sorted(values)[: trials // divisor]
    return values, [(value, rho * value + math.sqrt(1 - rho**2) * rng.gauss(0, 1)) for value in best]


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.6, 0.9])
def test_the_correlation_is_that_of_all_trials_though_only_the_best_went_on(rho: float) -> None:
    drawn = [chosen_pairs(rho, trials=800, divisor=4, seed=seed) for seed in range(12)]
    assert fmean(rank_correlation(values, pairs) for values, pairs in drawn) == pytest.approx(rho, abs=0.1)
    among_the_best = fmean(rank_correlation([value for value, _ in pairs], pairs) for _, pairs in drawn)
    assert rho == 0.0 or among_the_best < rho - 0.1


def test_ranks_count_not_values() -> None:
    pairs = [(float(x), float(x % 7)) for x in range(40)]
    bent = [(math.exp(x / 10), math.inf if y == 6 else y**3) for x, y in pairs]
    values = [value for value, _ in pairs]
    assert rank_correlation(values, pairs) == pytest.approx(rank_correlation([x for x, _ in bent], bent))


def estimated(rho: float, *, trials: int) -> RungCorrelation:
    """Estimate from the best quarter of trials, whose values at both rungs are normal with this correlation."""
    correlation, rng = RungCorrelation(), Random(3)
    rung = Rung(length=1, divisor=4)
    for trial in range(trials):
        value = rng.gauss(0, 1)
        if rung.rank(trial, value):
            later = rho * value + math.sqrt(1 - rho**2) * rng.gauss(0, 1)
            if correlation.add(value, later, cast("Mapping[int, float]", rung.values).values()):
                rung.divisor = less_strict(4, correlation.estimate)
    return correlation


@pytest.mark.parametrize(("rho", "trials", "divisor"), [(0.0, 1000, 1), (0.9, 300, 4)])
def test_a_rung_is_as_strict_as_it_ranks(rho: float, trials: int, divisor: float) -> None:
    assert less_strict(4, estimated(rho, trials=trials).estimate) == divisor


def test_one_report_at_both_rungs_says_nothing() -> None:
    correlation = RungCorrelation()
    assert not any(correlation.add(value, value, [value]) for value in range(50))
    assert correlation.compared == 0


def test_the_number_of_pairs_at_a_rung_is_bounded() -> None:
    correlation = RungCorrelation()
    for trial in range(5000):
        correlation.add(trial * 0.618 % 1, trial * 0.3 % 1, range(1000))
    assert correlation.compared > 4900
    assert len(pickle.dumps(correlation)) < 20_000


def useless_first_rung(seed: int) -> Callable[..., Curve]:
    """At step 1 the loss is noise; from then on it is a constant of the trial."""

    def trial(hparams: object) -> Curve:
        number = hparams["trial"]  # type: ignore[index]
        first, later = Random(f"{seed}:{number}").random(), Random(f"{number}").random()
        return Curve(lambda step: first if step < 2 else later)

    return trial


@pytest.mark.parametrize("kind", [ASHA, PromotionASHA])
def test_a_search_skips_the_rung_and_stays_strict_at_the_next(kind: type[ASHA] | type[PromotionASHA]) -> None:
    found = kind(max_trials=400, max_length=64, num_rungs=4, max_concurrent_trials=8, skip_uninformative_rungs=True)
    exact = kind(max_trials=400, max_length=64, num_rungs=4, max_concurrent_trials=8)
    for method in (found, exact):
        simulate(method, 8, useless_first_rung(seed=5))
    assert len(found.ranked[1]) > 280
    assert 90 <= len(exact.ranked[1]) <= 150
    assert len(found.ranked[2]) < 0.4 * len(found.ranked[1])


def test_brackets_of_adaptive_asha_skip_too() -> None:
    def trained(skip: bool) -> float:
        method = AdaptiveASHA(
            max_trials=300, max_length=81, divisor=3, max_concurrent_trials=8, skip_uninformative_rungs=skip
        )
        return simulate(method, 8, useless_first_rung(seed=5)).trained

    assert trained(True) > 1.1 * trained(False)


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
