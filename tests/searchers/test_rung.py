"""A rung decides like Determined's sorted list, in O(log n)."""

from __future__ import annotations

import math
from bisect import bisect_left
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from searchers.rung import Rung


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
