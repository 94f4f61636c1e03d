"""Rungs of successive halving: their lengths, and the best 1/divisor of the trials at each.

Determined keeps a sorted list, inserts a new value v before equal ones, and lets the trial continue iff

    index < max(floor(n / divisor), 1)            with n values, including the new one

Since `index` is the number of values smaller than v, a trial continues iff v is no larger than the k-th smallest value,
with k = max(floor(n / divisor), 1). Two heaps give that value in O(log n): `best` holds the k smallest values with the
largest of them on top, `rest` the others with the smallest on top. Equal values are ordered by trial number.

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
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from heapq import heappop, heappush
from itertools import islice
from statistics import NormalDist
from types import MappingProxyType
from typing import cast

from searchers.events import Losses
from searchers.pareto import ParetoOrder

_PRIOR = 0.8  # the correlation before any trial has both values
_PRIOR_PAIRS = 4.0  # the prior's weight, in trials
_FULLY_STRICT, _NOT_STRICT = (
    0.5,
    0.2,
)  # correlations from which a rung is as strict as configured, and at which not at all

_MAX_PAIRS = 512  # in the estimate of a correlation, and as many values
_GROWTH = 1.1  # factor by which the number of pairs grows between two estimates


class Rung:
    """Values that trials reported at one length; smaller is better. `ParetoRung` is for several objectives.

    Invariants: the trials in `_best` are the k smallest by (value, trial); each ranked trial has exactly one entry in
    one of the heaps; entries of withdrawn trials remain until they reach the top, and are then removed.

    Args:
        length: The length at which trials reach the rung.
        divisor: > 1. Interpreted as a decimal number, so that floor(33 / 1.1) is 30.
        min_best: Number of trials among the best while n < divisor: 0 or 1.

    >>> rung = Rung(length=1, divisor=2)
    >>> [rung.rank(trial, value) for trial, value in enumerate([0.5, 0.9, 0.4, 0.45])]
    [True, False, True, True]
    """

    def __init__(self, *, length: int, divisor: float, min_best: int = 1) -> None:
        self.length, self.divisor = length, divisor  # `compare` lowers the divisor if the correlation is low
        self._configured_divisor, self._min_best = divisor, min_best
        self._numerator, self._denominator = Fraction(str(divisor)).as_integer_ratio()
        self._values: dict[int, float | Losses] = {}
        self.num_approaching = 0  # running trials on their way to this rung, for methods that pause trials
        self._paused: set[int] = set()
        self._paused_heap: list[tuple[float, int]] = []  # (value, trial); entries not in `_paused` are dropped on top
        self.correlation = _PRIOR  # estimated rank correlation with the next rung
        self.compared = 0  # number of trials that the estimate is based on
        self._pairs: list[tuple[float, float]] = []  # every `_stride`-th pair of values here and at the next rung
        self._stride, self._next_estimate = 1, 1.0
        self._best: set[int] = set()
        self._best_heap: list[tuple[float, int]] = []  # (-value, -trial)
        self._rest_heap: list[tuple[float, int]] = []  # (value, trial)
        self._withdrawn = 0  # entries of withdrawn trials in the heaps

    @property
    def values(self) -> Mapping[int, float | Losses]:
        """Values or losses by trial, +inf for trials without finite losses; withdrawn trials are excluded."""
        return MappingProxyType(self._values)

    def rank(self, trial: int, value: float | Losses) -> bool:
        """Add the trial's value, once per trial.

        Returns:
            Whether the trial continues. It also does if its value equals the worst of the best.
        """
        assert trial not in self._values, f"trial {trial} was ranked in this rung before"
        assert not isinstance(value, Losses)
        self._values[trial] = value
        if self._best_heap and (-value, -trial) > self._best_heap[0]:
            heappush(self._best_heap, (-value, -trial))
            self._best.add(trial)
        else:
            heappush(self._rest_heap, (value, trial))
        self._balance()
        return bool(self._best_heap) and value <= -self._best_heap[0][0]

    def best(self) -> list[int]:
        """Return the best 1/divisor of the trials, best first, except those with an infinite value."""
        found = ((self._value(trial), trial) for trial in self._best)
        return [trial for value, trial in sorted(found) if value < math.inf]

    def set_min_best(self, min_best: int) -> None:
        if self._min_best != min_best:
            self._min_best = min_best
            self._balance()

    def withdraw(self, trial: int) -> None:
        """Remove the trial. Earlier decisions stand."""
        del self._values[trial]
        self._best.discard(trial)
        self._withdrawn += 1
        self._balance()

    def pause(self, trial: int) -> None:
        """Mark a ranked trial as paused."""
        self._paused.add(trial)
        heappush(self._paused_heap, (self._value(trial), trial))

    def unpause(self, trial: int) -> bool:
        """Remove the trial from the paused ones, and return whether it was one of them."""
        was_paused = trial in self._paused
        self._paused.discard(trial)
        return was_paused

    def unpause_all(self) -> list[int]:
        trials = sorted(self._paused)
        self._paused.clear()
        return trials

    def promotable(self) -> int | None:
        """Return the best paused trial, if it is among the best 1/divisor of all trials at this rung."""
        heap = self._paused_heap
        while heap and heap[0][1] not in self._paused:
            heappop(heap)
        return heap[0][1] if heap and heap[0][1] in self._best else None

    def compare(self, trial: int, later: float) -> None:
        """Update the correlation with the next rung, where this trial's value is `later`, and the divisor with it.

        Earlier decisions stand.
        """
        value = self._value(trial)
        if value == later:  # a single report reached both rungs
            return
        if self.compared % self._stride == 0:
            self._pairs.append((value, later))
        if len(self._pairs) > _MAX_PAIRS:
            self._pairs, self._stride = self._pairs[::2], 2 * self._stride
        self.compared += 1
        if self.compared < self._next_estimate:
            return
        self._next_estimate = self.compared * _GROWTH
        values = cast("list[float]", list(self._values.values()))
        self.correlation = rank_correlation(values[:: 1 + len(values) // _MAX_PAIRS], self._pairs)
        self.divisor = less_strict(self._configured_divisor, self.correlation)
        self._numerator, self._denominator = Fraction(str(self.divisor)).as_integer_ratio()
        self._balance()

    def _value(self, trial: int) -> float:
        value = self._values[trial]
        assert not isinstance(value, Losses)
        return value

    def _count(self) -> int:
        n = len(self._values)
        return max(n * self._denominator // self._numerator, self._min_best) if n else 0

    def _balance(self) -> None:
        k = self._count()
        self._drop_withdrawn()
        while len(self._best) > k:
            value, trial = heappop(self._best_heap)
            self._best.remove(-trial)
            heappush(self._rest_heap, (-value, -trial))
            self._drop_withdrawn()
        while len(self._best) < k:
            value, trial = heappop(self._rest_heap)
            self._best.add(trial)
            heappush(self._best_heap, (-value, -trial))
            self._drop_withdrawn()

    def _drop_withdrawn(self) -> None:
        if not self._withdrawn:
            return
        while self._best_heap and -self._best_heap[0][1] not in self._values:
            heappop(self._best_heap)
            self._withdrawn -= 1
        while self._rest_heap and self._rest_heap[0][1] not in self._values:
            heappop(self._rest_heap)
            self._withdrawn -= 1


class ParetoRung(Rung):
    """Losses that trials reported at one length, ranked in `ParetoOrder`.

    Unlike in `Rung`, a new trial that equals the worst of the best does not continue: the order has no ties.

    >>> rung = ParetoRung(length=1, divisor=2)
    >>> [rung.rank(trial, Losses(values)) for trial, values in enumerate([(1, 4), (4, 1), (5, 5), (2, 2)])]
    [True, False, False, False]
    >>> rung.best()
    [0, 1]
    """

    def __init__(self, *, length: int, divisor: float, min_best: int = 1) -> None:
        super().__init__(length=length, divisor=divisor, min_best=min_best)
        self._order = ParetoOrder()

    def rank(self, trial: int, value: float | Losses) -> bool:
        """Add the trial's losses, or +inf as the worst, once per trial. Returns whether the trial continues."""
        assert trial not in self._values, f"trial {trial} was ranked in this rung before"
        assert isinstance(value, Losses) or value == math.inf
        self._values[trial] = value
        self._order.add(trial, value if isinstance(value, Losses) else None)
        return self._order.is_among(trial, self._count())

    def best(self) -> list[int]:
        return [trial for trial in self._in_order() if self._values[trial] != math.inf]

    def _in_order(self) -> Iterator[int]:
        return islice(self._order, self._count())

    def set_min_best(self, min_best: int) -> None:
        self._min_best = min_best

    def withdraw(self, trial: int) -> None:
        del self._values[trial]
        self._order.remove(trial)

    def pause(self, trial: int) -> None:
        self._paused.add(trial)

    def promotable(self) -> int | None:
        return next((trial for trial in self._in_order() if trial in self._paused), None)


def rung_lengths(*, max_length: int, num_rungs: int, divisor: float) -> tuple[int, ...]:
    """Return max(floor(max_length / divisor ** (num_rungs - 1 - r)), 1) for r = 0, 1, ...; the last is max_length.

    Lengths count from the trial's beginning. If max_length is too short for this many rungs, the first ones are equal:

    >>> rung_lengths(max_length=100, num_rungs=5, divisor=4)
    (1, 1, 6, 25, 100)
    """
    exact = Fraction(str(divisor))
    return tuple(max(math.floor(max_length / exact**power), 1) for power in reversed(range(num_rungs)))


def longer_rungs(rungs: tuple[int, ...], *, max_length: int, divisor: float) -> tuple[int, ...]:
    """Return these rungs and, above the last of them, every floor(max_length / divisor ** k) that is longer.

    >>> longer_rungs((1, 4, 16), max_length=256, divisor=4), longer_rungs((1, 4, 16), max_length=100, divisor=4)
    ((1, 4, 16, 64, 256), (1, 4, 16, 25, 100))
    """
    exact, added = Fraction(str(divisor)), [max_length]
    while (length := math.floor(max_length / exact ** len(added))) > rungs[-1]:
        added.append(length)
    return (*rungs, *reversed(added))


def rungs_that_fit(*, length: int, divisor: float, at_most: int | None = None) -> int:
    """Return floor(log(length) / log(divisor)) + 1, the number of rungs that have lengths >= 1 without rounding up.

    Exact, unlike a quotient of two float logarithms:

    >>> rungs_that_fit(length=1000, divisor=10), math.floor(math.log(1000) / math.log(10)) + 1
    (4, 3)
    """
    exact, rungs = Fraction(str(divisor)), 1
    next_length = exact  # the shortest max_length that has one more rung
    while next_length <= length and rungs != at_most:
        rungs += 1
        next_length *= exact
    return rungs


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
    return NormalDist().inv_cdf((rank + 0.5) / (len(ordered) + 1))


def less_strict(divisor: float, correlation: float) -> float:
    """Lower a rung's divisor: unchanged from a correlation of 0.5 on, 1 (all trials continue) below one of 0.2.

    >>> [less_strict(4, correlation) for correlation in (0.6, 0.35, 0.1)]
    [4.0, 2.0, 1.0]
    """
    strictness = (correlation - _NOT_STRICT) / (_FULLY_STRICT - _NOT_STRICT)
    return round(math.pow(divisor, min(max(strictness, 0.0), 1.0)), 3)
