"""Rungs of successive halving: their lengths, and the best 1/divisor of the trials at each.

Determined keeps a sorted list, inserts a new value v before equal ones, and lets the trial continue iff

    index < max(floor(n / divisor), 1)            with n values, including the new one

Since `index` is the number of values smaller than v, a trial continues iff v is no larger than the k-th smallest value,
with k = max(floor(n / divisor), 1). Two heaps give that value in O(log n): `best` holds the k smallest values with the
largest of them on top, `rest` the others with the smallest on top. Equal values are ordered by trial number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from heapq import heappop, heappush
from types import MappingProxyType
from typing import Protocol, cast

from searchers.events import Losses


class Order(Protocol):
    """Trials from the best to the worst: a `ValueOrder`, or a `ParetoOrder` for several objectives."""

    values: dict[int, float | Losses]  # by trial; +inf, the worst, for trials without finite losses

    def add(self, trial: int, value: float | Losses) -> None: ...

    def remove(self, trial: int) -> None: ...

    def is_among(self, trial: int, count: int) -> bool:
        """Whether the trial is one of the first `count`."""

    def equals_one_of(self, trial: int, count: int) -> bool:
        """Whether the trial is one of the first `count`, or has the same value as the last of these."""

    def first(self, count: int) -> list[int]: ...


class ValueOrder:
    """Trials in the order of their values, the smallest first, and of their numbers.

    Invariants: the trials in `_best` are the first ones; each trial has exactly one entry in one of the heaps; entries
    of removed trials remain until they reach the top.
    """

    def __init__(self) -> None:
        self.values: dict[int, float | Losses] = {}
        self._best: set[int] = set()
        self._best_heap: list[tuple[float, int]] = []  # (-value, -trial)
        self._rest_heap: list[tuple[float, int]] = []  # (value, trial)
        self._removed = 0  # entries of removed trials in the heaps

    def add(self, trial: int, value: float | Losses) -> None:
        assert not isinstance(value, Losses)
        self.values[trial] = value
        if self._best_heap and (-value, -trial) > self._best_heap[0]:
            heappush(self._best_heap, (-value, -trial))
            self._best.add(trial)
        else:
            heappush(self._rest_heap, (value, trial))

    def remove(self, trial: int) -> None:
        del self.values[trial]
        self._best.discard(trial)
        self._removed += 1
        self._drop_removed()

    def is_among(self, trial: int, count: int) -> bool:
        if len(self._best) != count:
            self._balance(count)
        return trial in self._best

    def equals_one_of(self, trial: int, count: int) -> bool:
        self._balance(count)
        return bool(self._best_heap) and cast("float", self.values[trial]) <= -self._best_heap[0][0]

    def first(self, count: int) -> list[int]:
        self._balance(count)
        return sorted(self._best, key=lambda trial: (self.values[trial], trial))

    def _balance(self, count: int) -> None:
        """Make `_best` the first `count`."""
        while len(self._best) > count:
            value, trial = heappop(self._best_heap)
            self._best.remove(-trial)
            heappush(self._rest_heap, (-value, -trial))
            self._drop_removed()
        while len(self._best) < count:
            value, trial = heappop(self._rest_heap)
            self._best.add(trial)
            heappush(self._best_heap, (-value, -trial))
            self._drop_removed()

    def _drop_removed(self) -> None:
        if not self._removed:
            return
        while self._best_heap and -self._best_heap[0][1] not in self.values:
            heappop(self._best_heap)
            self._removed -= 1
        while self._rest_heap and self._rest_heap[0][1] not in self.values:
            heappop(self._rest_heap)
            self._removed -= 1


class Rung:
    """Ranks the trials that reported at one length, and tells which of them continue.

    Args:
        length: The length at which trials reach the rung.
        divisor: >= 1; the best 1/divisor continue. A decimal number, so that floor(33 / 1.1) is 30.
        min_best: Number of trials among the best while n < divisor: 0 or 1.
        order: An empty order; by value, by default.

    Attributes:
        divisor, min_best: May be changed. Earlier decisions stand.

    >>> rung = Rung(length=1, divisor=2)
    >>> [rung.rank(trial, value) for trial, value in enumerate([0.5, 0.9, 0.4, 0.45])]
    [True, False, True, True]
    """

    def __init__(self, *, length: int, divisor: float, min_best: int = 1, order: Order | None = None) -> None:
        self.length, self.divisor, self.min_best = length, divisor, min_best
        self.order: Order = order or ValueOrder()

    @property
    def divisor(self) -> float:
        return self._divisor

    @divisor.setter
    def divisor(self, divisor: float) -> None:
        self._divisor = divisor
        self._numerator, self._denominator = Fraction(str(divisor)).as_integer_ratio()

    @property
    def values(self) -> Mapping[int, float | Losses]:
        """Values or losses by trial, +inf for trials without finite losses; withdrawn trials are excluded."""
        return MappingProxyType(self.order.values)

    def rank(self, trial: int, value: float | Losses) -> bool:
        """Add the trial, once, with its losses, or +inf as the worst.

        Returns:
            Whether the trial continues. It also does if its value equals the worst of the best.
        """
        assert trial not in self.order.values, f"trial {trial} was ranked in this rung before"
        self.order.add(trial, value)
        return self.order.equals_one_of(trial, self._count())

    def withdraw(self, trial: int) -> None:
        """Remove the trial. Earlier decisions stand."""
        self.order.remove(trial)

    def is_best(self, trial: int) -> bool:
        """Whether the trial is among the best 1/divisor."""
        return self.order.is_among(trial, self._count())

    def best(self) -> list[int]:
        """Return the best 1/divisor of the trials, best first, except those with an infinite value."""
        return [trial for trial in self.order.first(self._count()) if self.order.values[trial] != math.inf]

    def _count(self) -> int:
        n = len(self.order.values)
        return max(n * self._denominator // self._numerator, self.min_best) if n else 0


def rung_lengths(*, max_length: int, num_rungs: int, divisor: float) -> tuple[int, ...]:
    """Return `max(floor(max_length / divisor ** (num_rungs - 1 - r)), 1)` for each rung r. The last is max_length.

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
