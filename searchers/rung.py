"""Rungs of successive halving: their lengths, and which trials are among the best 1/divisor at one of them.

Determined keeps a sorted list, inserts a new value v before its equals, and lets the trial continue iff

    index < max(floor(n / divisor), 1)            n values, including the new one

Here `index` is the number of values smaller than v, so a trial continues iff v is no larger than the k-th smallest one,
with k = max(floor(n / divisor), 1). Two heaps give that value in O(log n): `best` holds the k smallest with the largest
of them on top, `rest` the others with the smallest on top. Of equal values, those of lower trial numbers come first.

How well a rung ranks is the rank correlation of the values there with those of the same trials at the next rung.
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
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from heapq import heappop, heappush
from itertools import islice
from statistics import NormalDist
from types import MappingProxyType
from typing import cast

from searchers.objectives import Losses
from searchers.pareto import ParetoOrder

_PRIOR = 0.8  # the correlation before any trial has both values
_PRIOR_PAIRS = 4.0  # it counts as much as so many trials
_ALL_ABOVE, _NONE_BELOW = 0.5, 0.2

_MOST_PAIRS = 512
_GROWTH = 1.1
"""How many pairs, and how many values, a rung's correlation is estimated from; and again with so many times as many."""


class Rung:
    """The values that trials reported at one length; smaller is better. Of several objectives see `ParetoRung`.

    Always true: the trials in `_best` are the k smallest by (value, trial); each ranked trial has exactly one entry in
    one of the heaps; entries of withdrawn trials remain until they come to the top, and neither top is one of them.

    The divisor is used as the decimal number it is written as, so that floor(33 / 1.1) is 30. `least` is how many
    trials are among the best while n < divisor: 0 or 1.

    >>> rung = Rung(length=1, divisor=2)
    >>> [rung.rank(trial, value) for trial, value in enumerate([0.5, 0.9, 0.4, 0.45])]
    [True, False, True, True]
    """

    def __init__(self, *, length: int, divisor: float, least: int = 1) -> None:
        self.length, self.divisor = length, divisor  # a lower one, once `compare` has learned
        self._strictest, self._least = divisor, least
        self._numerator, self._denominator = Fraction(str(divisor)).as_integer_ratio()
        self._values: dict[int, float | Losses] = {}
        self.coming = 0  # for a method that pauses trials: running ones that are on their way to this rung
        self._paused: set[int] = set()
        self._paused_heap: list[tuple[float, int]] = []  # (value, trial); others than `_paused` are dropped at the top
        self.correlation, self.compared = _PRIOR, 0  # with the values at the next rung, and of how many trials
        self._pairs: list[tuple[float, float]] = []  # every so many of all, from the first on
        self._stride, self._next_estimate = 1, 1.0
        self._best: set[int] = set()
        self._best_heap: list[tuple[float, int]] = []  # (-value, -trial)
        self._rest_heap: list[tuple[float, int]] = []  # (value, trial)
        self._withdrawn = 0  # entries of withdrawn trials in the heaps

    @property
    def values(self) -> Mapping[int, float | Losses]:
        """Trials to values, or to losses, +inf for those without; except those withdrawn."""
        return MappingProxyType(self._values)

    def rank(self, trial: int, value: float | Losses) -> bool:
        """Add the trial's value, once per trial. Returns whether the trial continues: also if it equals the last of the
        best."""
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
        """The best 1/divisor of the trials, best first, except those whose value is infinite."""
        found = ((self._value(trial), trial) for trial in self._best)
        return [trial for value, trial in sorted(found) if value < math.inf]

    def set_least(self, least: int) -> None:
        if self._least != least:
            self._least = least
            self._balance()

    def withdraw(self, trial: int) -> None:
        """Remove the trial. Earlier decisions stand."""
        del self._values[trial]
        self._best.discard(trial)
        self._withdrawn += 1
        self._balance()

    def pause(self, trial: int) -> None:
        """List a ranked trial as paused."""
        self._paused.add(trial)
        heappush(self._paused_heap, (self._value(trial), trial))

    def unpause(self, trial: int) -> bool:
        """Remove the trial from those paused, if it is one of them; and whether it was."""
        was_paused = trial in self._paused
        self._paused.discard(trial)
        return was_paused

    def unpause_all(self) -> list[int]:
        trials = sorted(self._paused)
        self._paused.clear()
        return trials

    def promotable(self) -> int | None:
        """The best paused trial, if it is among the best 1/divisor of all trials at this rung."""
        heap = self._paused_heap
        while heap and heap[0][1] not in self._paused:
            heappop(heap)
        return heap[0][1] if heap and heap[0][1] in self._best else None

    def compare(self, trial: int, later: float) -> None:
        """Learn from a ranked trial's value at the next rung how much this rung says of it, and be less strict if it
        says little. Decisions so far stand."""
        value = self._value(trial)
        if value == later:  # one report that reached both rungs
            return
        if self.compared % self._stride == 0:
            self._pairs.append((value, later))
        if len(self._pairs) > _MOST_PAIRS:
            self._pairs, self._stride = self._pairs[::2], 2 * self._stride
        self.compared += 1
        if self.compared < self._next_estimate:
            return
        self._next_estimate = self.compared * _GROWTH
        values = cast("list[float]", list(self._values.values()))
        self.correlation = rank_correlation(values[:: 1 + len(values) // _MOST_PAIRS], self._pairs)
        self.divisor = less_strict(self._strictest, self.correlation)
        self._numerator, self._denominator = Fraction(str(self.divisor)).as_integer_ratio()
        self._balance()

    def _value(self, trial: int) -> float:
        value = self._values[trial]
        assert not isinstance(value, Losses)
        return value

    def _count(self) -> int:
        n = len(self._values)
        return max(n * self._denominator // self._numerator, self._least) if n else 0

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
    """What trials reported at one length, ranked by several objectives, in the order of `ParetoOrder`.

    Unlike in `Rung`, a new trial that equals the last of the best is not among them: the order has no ties.

    >>> rung = ParetoRung(length=1, divisor=2)
    >>> [rung.rank(trial, Losses(values)) for trial, values in enumerate([(1, 4), (4, 1), (5, 5), (2, 2)])]
    [True, False, False, False]
    >>> rung.best()
    [0, 1]
    """

    def __init__(self, *, length: int, divisor: float, least: int = 1) -> None:
        super().__init__(length=length, divisor=divisor, least=least)
        self._order = ParetoOrder()

    def rank(self, trial: int, value: float | Losses) -> bool:
        """Add the trial's losses, once per trial; a float is +inf, the worst. Returns whether the trial continues."""
        assert trial not in self._values, f"trial {trial} was ranked in this rung before"
        assert isinstance(value, Losses) or value == math.inf
        self._values[trial] = value
        self._order.add(trial, value if isinstance(value, Losses) else None)
        return self._order.is_among(trial, self._count())

    def best(self) -> list[int]:
        return [trial for trial in self._in_order() if self._values[trial] != math.inf]

    def _in_order(self) -> Iterator[int]:
        return islice(self._order, self._count())

    def set_least(self, least: int) -> None:
        self._least = least

    def withdraw(self, trial: int) -> None:
        del self._values[trial]
        self._order.remove(trial)

    def pause(self, trial: int) -> None:
        self._paused.add(trial)

    def promotable(self) -> int | None:
        return next((trial for trial in self._in_order() if trial in self._paused), None)


def rung_lengths(*, max_length: int, num_rungs: int, divisor: float) -> tuple[int, ...]:
    """max(floor(max_length / divisor ** (num_rungs - 1 - r)), 1) for r = 0, 1, ...; the last one is max_length.

    Lengths count from the trial's beginning. If max_length is short for so many rungs, the first ones are equal:

    >>> rung_lengths(max_length=100, num_rungs=5, divisor=4)
    (1, 1, 6, 25, 100)
    """
    exact = Fraction(str(divisor))
    return tuple(max(math.floor(max_length / exact**power), 1) for power in reversed(range(num_rungs)))


def longer_rungs(rungs: tuple[int, ...], *, max_length: int, divisor: float) -> tuple[int, ...]:
    """These rungs and, above them, max_length / divisor ** k, rounded down, while that exceeds the last of them.

    >>> longer_rungs((1, 4, 16), max_length=256, divisor=4), longer_rungs((1, 4, 16), max_length=100, divisor=4)
    ((1, 4, 16, 64, 256), (1, 4, 16, 25, 100))
    """
    exact, added = Fraction(str(divisor)), [max_length]
    while (length := math.floor(max_length / exact ** len(added))) > rungs[-1]:
        added.append(length)
    return (*rungs, *reversed(added))


def rungs_that_fit(*, length: int, divisor: float, at_most: int | None = None) -> int:
    """floor(log(length) / log(divisor)) + 1: how many rungs have lengths >= 1 without rounding up.

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
    xy = _PRIOR * _PRIOR_PAIRS + sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
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
