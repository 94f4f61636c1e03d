"""A rung that ranks trials by several objectives: which are among the best 1/divisor by `searchers.pareto`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from itertools import islice
from types import MappingProxyType

from searchers.objectives import Losses
from searchers.pareto import ParetoOrder


class ParetoRung:
    """What trials reported at one length: the counterpart of `Rung`, with the same number of the best.

    Unlike there, a new trial that equals the last of the best is not among them: the order has no ties.

    Args:
        length, divisor, least: As in `Rung`.

    >>> rung = ParetoRung(length=1, divisor=2)
    >>> [rung.rank(trial, Losses(values)) for trial, values in enumerate([(1, 4), (4, 1), (5, 5), (2, 2)])]
    [True, False, False, False]
    >>> rung.best()
    [0, 1]
    """

    def __init__(self, *, length: int, divisor: float, least: int = 1) -> None:
        self.length = length
        exact = Fraction(str(divisor))
        self._numerator, self._denominator = exact.numerator, exact.denominator
        self._least = least
        self._values: dict[int, Losses | float] = {}
        self._order = ParetoOrder()

    @property
    def values(self) -> Mapping[int, Losses | float]:
        """Trials to losses, +inf for those without; except those withdrawn."""
        return MappingProxyType(self._values)

    def rank(self, trial: int, value: Losses | float) -> bool:
        """Add the trial's losses, once per trial; a float is +inf, the worst. Returns whether the trial continues."""
        assert trial not in self._values, f"trial {trial} was ranked in this rung before"
        assert isinstance(value, Losses) or value == math.inf
        self._values[trial] = value
        self._order.add(trial, value if isinstance(value, Losses) else None)
        return self.is_best(trial)

    def is_best(self, trial: int) -> bool:
        """Whether the trial is now among the best 1/divisor."""
        return self._order.is_among(trial, self._count())

    def best(self) -> list[int]:
        """The best 1/divisor of the trials, best first, except those without losses."""
        return [trial for trial in self.in_order() if self._values[trial] != math.inf]

    def in_order(self) -> Iterator[int]:
        """The best 1/divisor of the trials, best first."""
        return islice(self._order, self._count())

    def set_least(self, least: int) -> None:
        """Change `least`."""
        self._least = least

    def withdraw(self, trial: int) -> None:
        """Remove the trial. Earlier decisions stand."""
        del self._values[trial]
        self._order.remove(trial)

    def _count(self) -> int:
        n = len(self._values)
        return max(n * self._denominator // self._numerator, self._least) if n else 0
