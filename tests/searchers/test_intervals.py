"""Intervals hold the true value as often as they say; the noise is drawn with fixed seeds."""

from __future__ import annotations

import math
from random import Random

import pytest

from searchers.intervals import difference, mean_of

RUNS = 1000
TOLERANCE = 4 * math.sqrt(0.95 * 0.05 / RUNS)
"""Four standard errors of the share of intervals that hold the true value."""


@pytest.mark.parametrize("n", [2, 3, 20])
def test_interval_of_a_mean_holds_it_95_times_in_100(n: int) -> None:
    rng, held = Random(n), 0
    for _ in range(RUNS):
        found = mean_of([rng.gauss(0.7, 3) for _ in range(n)])
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 0.7 <= found.high
    assert abs(held / RUNS - 0.95) <= TOLERANCE


@pytest.mark.parametrize("n", [2, 3])
def test_interval_of_a_paired_difference_holds_it_95_times_in_100(n: int) -> None:
    rng, held, paired, unpaired = Random(n), 0, 0.0, 0.0
    for _ in range(RUNS):
        luck = [rng.gauss(0, 5) for _ in range(n)]
        one, other = ({seed: true + luck[seed] + rng.gauss(0, 1) for seed in range(n)} for true in (0.7, 0.4))
        found = difference(one, other)
        apart = difference(one, {seed + n: value for seed, value in other.items()})
        assert found.low is not None
        assert found.high is not None
        assert apart.low is not None
        assert apart.high is not None
        held += found.low <= 0.3 <= found.high
        paired, unpaired = paired + found.high - found.low, unpaired + apart.high - apart.low
    assert abs(held / RUNS - 0.95) <= TOLERANCE
    if n > 2:
        assert paired < 0.5 * unpaired  # the seeds' luck cancels out


def test_interval_without_pairs_is_welchs() -> None:
    one, other = [3.1, 2.2, 4.7, 3.3, 2.9, 3.4], [4.9, 9.8, 5.1, 3.2]
    found = difference({("a", i): x for i, x in enumerate(one)}, {("b", i): x for i, x in enumerate(other)})
    assert (found.low, found.high) == pytest.approx((-6.857946557560368, 1.8912798908937005))  # scipy.stats.ttest_ind
    assert found.runs == 4


def test_pairs_are_those_that_both_have() -> None:
    found = difference({1: 5.0, 2: 3.0, 3: 100.0}, {1: 4.0, 2: 1.0, 4: -100.0})
    half = 12.706204736 * 0.5  # t with 1 degree of freedom; the standard error of 1 and 2 is 0.5
    assert (found.mean, found.low, found.high, found.runs) == pytest.approx((1.5, 1.5 - half, 1.5 + half, 2))


def test_one_run_has_no_interval() -> None:
    assert mean_of([2.0]).low is None
    found = difference({"a": 2.0, "b": 3.0}, {"c": 1.0})
    assert (found.mean, found.low, found.high, found.runs) == (1.5, None, None, 1)
    assert not found.excludes_zero


def test_equal_runs_have_an_interval_without_width() -> None:
    found = difference({1: 2.0, 2: 2.0}, {1: 1.5, 2: 1.5})
    assert (found.low, found.mean, found.high) == (0.5, 0.5, 0.5)
    assert found.excludes_zero
    assert not difference({1: 2.0, 2: 2.0}, {1: 2.0, 2: 2.0}).excludes_zero
    apart = difference({1: 2.0, 2: 2.0}, {3: 1.5, 4: 1.5})
    assert (apart.low, apart.high) == (0.5, 0.5)
