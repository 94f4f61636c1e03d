"""Rungs of successive halving: their lengths, and which trials are among the best 1/divisor at one of them.

Determined keeps a sorted list, inserts a new value v before its equals, and lets the trial continue iff

    index < max(floor(n / divisor), 1)            n values, including the new one

Here `index` is the number of values smaller than v, so a trial continues iff v is no larger than the k-th smallest one,
with k = max(floor(n / divisor), 1). Two heaps give that value in O(log n): `best` holds the k smallest with the largest
of them on top, `rest` the others with the smallest on top. Of equal values, those of lower trial numbers come first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from heapq import heappop, heappush
from types import MappingProxyType
from typing import Any, Protocol

from searchers.events import Reported
from searchers.rung_correlation import PRIOR, less_strict, rank_correlation


class AnyRung(Protocol):
    """What a method needs of a rung, whatever it ranks by: `Rung` and `ParetoRung` document it."""

    length: int

    @property
    def values(self) -> Mapping[int, Any]: ...

    def rank(self, trial: int, value: Any) -> bool: ...

    def is_best(self, trial: int) -> bool: ...

    def best(self) -> list[int]: ...

    def set_least(self, least: int) -> None: ...

    def withdraw(self, trial: int) -> None: ...


_MOST_PAIRS = 512
_GROWTH = 1.1
"""How many pairs, and how many values, a rung's correlation is estimated from; and again with so many times as many."""


class Rung:
    """The values that trials reported at one length; smaller is better.

    Always true: the trials in `_best` are the k smallest by (value, trial); each ranked trial has exactly one entry in
    one of the heaps; entries of withdrawn trials remain until they come to the top, and neither top is one of them.

    Args:
        length: The length at which trials reach the rung.
        divisor: > 1. Used as the decimal number it is written as, so that floor(33 / 1.1) is 30.
        least: How many trials are among the best while n < divisor: 0 or 1.

    Attributes:
        length: As given.
        divisor: As given, or less, by what `compare` learned.
        correlation: The estimated rank correlation of the values here with those at the next rung, by `compare`.
        compared: The number of trials that it is estimated from.

    >>> rung = Rung(length=1, divisor=2)
    >>> [rung.rank(trial, value) for trial, value in enumerate([0.5, 0.9, 0.4, 0.45])]
    [True, False, True, True]
    """

    def __init__(self, *, length: int, divisor: float, least: int = 1) -> None:
        self.length, self.divisor = length, divisor
        self._strictest, self._least = divisor, least
        self._numerator, self._denominator = Fraction(str(divisor)).as_integer_ratio()
        self.correlation, self.compared = PRIOR, 0
        self._pairs: list[tuple[float, float]] = []  # every so many of all, from the first on
        self._stride, self._next_estimate = 1, 1.0
        self._values: dict[int, float] = {}
        self._best: set[int] = set()
        self._best_heap: list[tuple[float, int]] = []  # (-value, -trial)
        self._rest_heap: list[tuple[float, int]] = []  # (value, trial)
        self._withdrawn = 0  # entries of withdrawn trials in the heaps

    @property
    def values(self) -> Mapping[int, float]:
        """Trials to values, except those withdrawn."""
        return MappingProxyType(self._values)

    def rank(self, trial: int, value: float) -> bool:
        """Add the trial's value, once per trial.

        Returns:
            Whether the trial continues. One that equals the last of the best does, even if it is not one of them.
        """
        assert trial not in self._values, f"trial {trial} was ranked in this rung before"
        self._values[trial] = value
        if self._best_heap and (-value, -trial) > self._best_heap[0]:
            heappush(self._best_heap, (-value, -trial))
            self._best.add(trial)
        else:
            heappush(self._rest_heap, (value, trial))
        self._balance()
        return bool(self._best_heap) and value <= -self._best_heap[0][0]

    def is_best(self, trial: int) -> bool:
        """Whether the trial is now among the best 1/divisor."""
        return trial in self._best

    def best(self) -> list[int]:
        """The best 1/divisor of the trials, best first, except those whose value is infinite."""
        return [trial for value, trial in sorted((self._values[t], t) for t in self._best) if value < math.inf]

    def compare(self, trial: int, later: float) -> None:
        """Learn from a ranked trial's value at the next rung how much this rung says of it, and be less strict if it
        says little. Decisions so far stand."""
        value = self._values[trial]
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
        values = list(self._values.values())
        self.correlation = rank_correlation(values[:: 1 + len(values) // _MOST_PAIRS], self._pairs)
        self.divisor = less_strict(self._strictest, self.correlation)
        self._numerator, self._denominator = Fraction(str(self.divisor)).as_integer_ratio()
        self._balance()

    def set_least(self, least: int) -> None:
        """Change `least`."""
        if self._least != least:
            self._least = least
            self._balance()

    def withdraw(self, trial: int) -> None:
        """Remove the trial. Earlier decisions stand."""
        del self._values[trial]
        self._best.discard(trial)
        self._withdrawn += 1
        self._balance()

    def _balance(self) -> None:
        n = len(self._values)
        k = max(n * self._denominator // self._numerator, self._least) if n else 0
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


def compared_rungs(lengths: Sequence[int], reports: Iterable[Reported], *, divisor: float) -> list[Rung]:
    """Rungs with the values of a search's trials, to see what each says of the next.

    Args:
        lengths: Of the rungs, ascending.
        reports: Of all trials, in their order; values are normalised, smaller is better.
        divisor: Of the search.
    """
    rungs = [Rung(length=length, divisor=divisor) for length in dict.fromkeys(lengths)]
    reached: dict[int, int] = {}
    for report in reports:
        value = math.inf if report.value is None or math.isnan(report.value) else report.value
        number = reached.get(report.trial, 0)
        while number < len(rungs) and report.step >= rungs[number].length:
            if number:
                rungs[number - 1].compare(report.trial, value)
            rungs[number].rank(report.trial, value)
            number += 1
        reached[report.trial] = number
    return rungs


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
