"""One rung of successive halving: which trials are among the best 1/divisor of those that reached it?

Determined keeps a sorted list, inserts a value before its equals, and lets the trial continue iff

    index < max(floor(n / divisor), 1)            n values, the new one counted

`index` is the number of values smaller than v. So the rule says: v is no larger than the k-th smallest value, with
k = max(floor(n / divisor), 1). Two heaps know that value in O(log n): `kept` holds the k smallest with its largest on
top, `rest` the others with its smallest on top. Of equal values, those of trials with lower numbers come first.
"""

from __future__ import annotations

import math
from fractions import Fraction
from heapq import heapify, heappop, heappush
from typing import cast

from searchers.records import number_from_json, number_to_json


class Rung:
    """Values of trials at one length, smaller is better.

    Args:
        divisor: > 1. Taken as the decimal number that it is written as, so that floor(33 / 1.1) is 30.
        least: How many are among the best while n is smaller than the divisor: 0 or 1.

    >>> rung = Rung(divisor=2)
    >>> [rung.offer(trial, value) for trial, value in enumerate([0.5, 0.9, 0.4, 0.45])]
    [True, False, True, True]
    """

    def __init__(self, *, divisor: float, least: int = 1) -> None:
        exact = Fraction(str(divisor))
        self._numerator, self._denominator = exact.numerator, exact.denominator
        self._least = least
        self._values: dict[int, float] = {}
        self._is_kept: set[int] = set()  # trials whose entry is in _kept; the others' are in _rest
        self._kept: list[tuple[float, int]] = []  # (-value, -trial)
        self._rest: list[tuple[float, int]] = []  # (value, trial)
        self._withdrawn = 0  # trials whose entries are still in a heap

    def __len__(self) -> int:
        """Values in the rung, without those withdrawn."""
        return len(self._values)

    def __contains__(self, trial: int) -> bool:
        return trial in self._values

    def offer(self, trial: int, value: float) -> bool:
        """File the trial's value, and say whether the trial is to continue. Once per trial, also if withdrawn later."""
        assert trial not in self._values, f"trial {trial} was ranked in this rung before"
        self._values[trial] = value
        if self._kept and (-value, -trial) > self._kept[0]:
            self._keep(trial, value)
        else:
            heappush(self._rest, (value, trial))
        self._balance()
        return bool(self._kept) and value <= -self._kept[0][0]  # also if it equals the last of the best

    def value_of(self, trial: int) -> float:
        """The trial's value, as it was offered."""
        return self._values[trial]

    def is_best(self, trial: int) -> bool:
        """Whether the trial is now among the best 1/divisor; of equal values, lower trial numbers come first."""
        return trial in self._is_kept

    def best(self) -> list[int]:
        """Trials for which `is_best` is true and whose value is finite, the best first."""
        return [trial for value, trial in sorted((self._values[t], t) for t in self._is_kept) if value < math.inf]

    def set_least(self, least: int) -> None:
        """Change `least`."""
        if self._least != least:
            self._least = least
            self._balance()

    def withdraw(self, trial: int) -> None:
        """Forget the trial's value. Earlier decisions stand; later ones are made without it."""
        del self._values[trial]
        self._is_kept.discard(trial)  # its entry stays in its heap until it comes to the top
        self._withdrawn += 1
        self._balance()

    def _keep(self, trial: int, value: float) -> None:
        heappush(self._kept, (-value, -trial))
        self._is_kept.add(trial)

    def _balance(self) -> None:
        """Make `kept` the k smallest values, with live entries on top of both heaps."""
        n = len(self._values)
        k = max(n * self._denominator // self._numerator, self._least) if n else 0
        self._drop_withdrawn()
        while len(self._is_kept) > k:
            value, trial = heappop(self._kept)
            self._is_kept.remove(-trial)
            heappush(self._rest, (-value, -trial))
            self._drop_withdrawn()
        while len(self._is_kept) < k:
            value, trial = heappop(self._rest)
            self._keep(trial, value)
            self._drop_withdrawn()

    def _drop_withdrawn(self) -> None:
        if not self._withdrawn:
            return
        while self._kept and -self._kept[0][1] not in self._values:
            heappop(self._kept)
            self._withdrawn -= 1
        while self._rest and self._rest[0][1] not in self._values:
            heappop(self._rest)
            self._withdrawn -= 1

    def dump(self) -> list[list[object]]:
        """`[trial, value]` pairs by trial; the heaps follow from them."""
        return [[trial, number_to_json(value)] for trial, value in sorted(self._values.items())]

    def load(self, state: list[list[object]]) -> None:
        """Continue from a dump."""
        pairs = [(cast(int, trial), cast(float, number_from_json(value))) for trial, value in state]
        self._values = dict(pairs)
        self._is_kept, self._kept, self._withdrawn = set(), [], 0
        self._rest = [(value, trial) for trial, value in pairs]
        heapify(self._rest)
        self._balance()
