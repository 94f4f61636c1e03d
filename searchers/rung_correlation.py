"""How well a rung ranks: the rank correlation of the values there with those of the same trials at the next rung.

Only trials that continued have both values, and they were chosen for being the best at the first. What is fitted is
therefore the regression of the later value on the earlier one, which a choice by the earlier value does not bias if it
is linear (the correction for restricted range). So no trial has to continue for the estimate's sake; when the 10th,
17th, 26th, ... at each rung did, it cost more than it found. Both values are normal scores, by their ranks, so that a
diverged trial's counts as the last and no more.

Source: Thorndike, "Personnel Selection" (1949), case 2; Sackett and Yang, "Correction for range restriction" (2000).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from statistics import NormalDist

PRIOR = 0.8  # the correlation before any trial has both values

_PRIOR_PAIRS = 4.0  # it counts as much as so many trials

_ALL_ABOVE, _NONE_BELOW = 0.5, 0.2


def rank_correlation(values: Sequence[float], pairs: Sequence[tuple[float, float]]) -> float:
    """The correlation that all trials of a rung would have, if all went on to the next.

    Args:
        values: Of all trials at the rung, smaller is better.
        pairs: The values at the rung and at the next one, of trials that were chosen by the former, or of all.

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
    xy = PRIOR * _PRIOR_PAIRS + sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    slope = xy / xx
    residual = max(yy - slope * xy, 0.0) / n
    return slope / math.hypot(slope, math.sqrt(residual)) if xy else 0.0


def _normal_score(ordered: Sequence[float], value: float) -> float:
    """The value's rank as a quantile of the normal distribution; equal values share the middle of their ranks."""
    rank = (bisect_left(ordered, value) + bisect_right(ordered, value)) / 2
    return NormalDist().inv_cdf((rank + 0.5) / (len(ordered) + 1))


def less_strict(divisor: float, correlation: float) -> float:
    """The divisor for a rung: the given one from a correlation of 0.5 on, 1 (all trials continue) up to one of 0.2.

    >>> [less_strict(4, correlation) for correlation in (0.6, 0.35, 0.1)]
    [4.0, 2.0, 1.0]
    """
    strictness = (correlation - _NONE_BELOW) / (_ALL_ABOVE - _NONE_BELOW)
    return round(math.pow(divisor, min(max(strictness, 0.0), 1.0)), 3)
