"""Means of runs that differ only in their seeds, and differences of such means, with 95% confidence intervals.

All intervals are Student's: the runs are taken as independent and about normal. Runs with the same seed share its
luck, such as the order of the data, so that the differences between them vary less than the runs themselves.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import TypeVar

LEVEL = 0.95
Seed = TypeVar("Seed", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean, or a difference of two means, and its confidence interval.

    Attributes:
        mean: The mean.
        low, high: The interval; None if there are too few runs for one.
        runs: The number of runs, or of pairs of runs; of two means without pairs, the smaller number.
    """

    mean: float
    low: float | None
    high: float | None
    runs: int

    @property
    def excludes_zero(self) -> bool:
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def mean_of(values: Sequence[float]) -> Interval:
    """Return the mean of one or more runs.

    >>> found = mean_of([1.0, 2.0, 3.0])  # the standard error is 1 / sqrt(3), and the quantile 4.303
    >>> found.mean, round(found.low, 3), round(found.high, 3)
    (2.0, -0.484, 4.484)
    """
    n = len(values)
    return _interval(fmean(values), variance(values) / n if n > 1 else math.nan, n - 1, n)


def difference(one: Mapping[Seed, float], other: Mapping[Seed, float]) -> Interval:
    """Return the mean of `one` minus that of `other`, each with one or more runs by seed.

    It is that of the pairs with the same seed. If there are none, it is Welch's, for runs that have nothing in common.

    >>> found = difference({1: 0.5, 2: 0.9, 3: 0.4}, {1: 0.4, 2: 0.7, 3: 0.3, 4: 0.1})
    >>> round(found.mean, 3), round(found.low, 3), round(found.high, 3), found.runs
    (0.133, -0.01, 0.277, 3)
    """
    if pairs := [value - other[seed] for seed, value in one.items() if seed in other]:
        return mean_of(pairs)
    means, runs = fmean(one.values()) - fmean(other.values()), min(len(one), len(other))
    if runs < 2:
        return Interval(mean=means, low=None, high=None, runs=runs)
    errors = [(variance(each.values()) / len(each), len(each) - 1) for each in (one, other)]
    squared = sum(error for error, _ in errors)
    freedom = squared**2 / sum(error**2 / degrees for error, degrees in errors) if squared else 1.0
    return _interval(means, squared, freedom, runs)


def _interval(mean: float, squared_error: float, freedom: float, runs: int) -> Interval:
    if runs < 2:
        return Interval(mean=mean, low=None, high=None, runs=runs)
    from scipy.special import stdtrit  # it takes a while to import

    half = float(stdtrit(freedom, (1 + LEVEL) / 2)) * math.sqrt(squared_error)
    return Interval(mean=mean, low=mean - half, high=mean + half, runs=runs)
