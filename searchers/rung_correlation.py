"""How well a rung predicts the next one, and how strict it is therefore.

A rung's informativeness is measured by the rank correlation of its values with those of the same trials at the next
rung. Only trials that continued have both values, and these were selected as the best at the lower rung. The estimate
is therefore based on the regression of the later on the earlier value, which selection by the earlier value does not
bias if the relation is linear (the correction for range restriction). No trial has to continue merely for the estimate:
when the 10th, 17th, 26th, ... trial at each rung did, that cost more than it gained. Ranks are transformed to normal
scores, so that a diverged trial counts as the last one and is no outlier.

Sources: Thorndike, "Personnel Selection" (1949), case 2; Sackett and Yang, "Correction for range restriction" (2000).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from itertools import islice
from statistics import NormalDist

_PRIOR = 0.8  # the correlation before any trial has both values
_PRIOR_PAIRS = 4.0  # the prior's weight, in trials
_FULLY_STRICT, _NOT_STRICT = (
    0.5,
    0.2,
)  # correlations from which a rung is as strict as configured, and at which not at all

_MAX_PAIRS = 512  # in the estimate of a correlation, and as many values
_GROWTH = 1.1  # factor by which the number of pairs grows between two estimates
_NORMAL = NormalDist()


class RungCorrelation:
    """An estimate of the rank correlation of a rung with the next, renewed as trials reach that one.

    Attributes:
        estimate: The correlation.
        compared: Number of trials that it is based on.
    """

    def __init__(self) -> None:
        self.estimate, self.compared = _PRIOR, 0
        self._pairs: list[tuple[float, float]] = []  # every `_stride`-th pair of values here and at the next rung
        self._stride, self._next_estimate = 1, 1.0

    def add(self, value: float, later: float, values: Collection[float]) -> bool:
        """Add a trial's values at the rung and at the next one.

        Args:
            values: The values of all trials at the rung.

        Returns:
            Whether there is a new estimate.
        """
        if value == later:  # a single report reached both rungs
            return False
        if self.compared % self._stride == 0:
            self._pairs.append((value, later))
        if len(self._pairs) > _MAX_PAIRS:
            self._pairs, self._stride = self._pairs[::2], 2 * self._stride
        self.compared += 1
        if self.compared < self._next_estimate:
            return False
        self._next_estimate = self.compared * _GROWTH
        sample = list(islice(values, 0, None, 1 + len(values) // _MAX_PAIRS))
        self.estimate = rank_correlation(sample, self._pairs)
        return True


def rank_correlation(values: Sequence[float], pairs: Sequence[tuple[float, float]]) -> float:
    """Estimate the rank correlation between two rungs for all trials, although only the best reach the second one.

    Args:
        values: Values of all trials at the rung; smaller is better.
        pairs: (value at the rung, value at the next rung) of trials that were selected by the former, or of all trials.

    Returns:
        From -1 to 1; close to a prior of 0.8 while there are few pairs.

    >>> rank_correlation(range(100), [(each, each + 0.5) for each in range(100)]) > 0.97
    True
    """
    ordered, later_ordered = sorted(values), sorted(later for _, later in pairs)
    xs = [_normal_score(ordered, value) for value, _ in pairs]
    ys = [_normal_score(later_ordered, later) for _, later in pairs]
    n = len(pairs) + _PRIOR_PAIRS
    x_mean, y_mean = sum(xs) / n, sum(ys) / n
    xx = _PRIOR_PAIRS + sum((x - x_mean) ** 2 for x in xs)
    yy = _PRIOR_PAIRS + sum((y - y_mean) ** 2 for y in ys)
    xy = _PRIOR * _PRIOR_PAIRS + sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    slope = xy / xx
    residual = max(yy - slope * xy, 0.0) / n
    return slope / math.hypot(slope, math.sqrt(residual)) if xy else 0.0


def _normal_score(ordered: Sequence[float], value: float) -> float:
    """Transform the value's rank to a quantile of the normal distribution; equal values share their mean rank."""
    rank = (bisect_left(ordered, value) + bisect_right(ordered, value)) / 2
    return _NORMAL.inv_cdf((rank + 0.5) / (len(ordered) + 1))


def less_strict(divisor: float, correlation: float) -> float:
    """Lower a rung's divisor: unchanged from a correlation of 0.5 on, 1 (all trials continue) below one of 0.2.

    >>> [less_strict(4, correlation) for correlation in (0.6, 0.35, 0.1)]
    [4.0, 2.0, 1.0]
    """
    strictness = (correlation - _NOT_STRICT) / (_FULLY_STRICT - _NOT_STRICT)
    return round(math.pow(divisor, min(max(strictness, 0.0), 1.0)), 3)
