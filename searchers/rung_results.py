"""Results of trials at the rungs of a search: a bounded number of them, chosen so that a model can learn from them.

After 100,000 trials an ask must cost what it costs after 300. Of each rung's results there are kept the best (where the
search is going), the latest (what was proposed last), and some of all others, whatever their values: without those a
model forgets where it is bad, and proposes it again.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Set
from types import MappingProxyType

_HASH = 2_654_435_761
"""Knuth's multiplicative hash: as good as a random order of trials, and the same in every process."""


class RungResults:
    """The results at one rung.

    Args:
        most: How many results are kept; up to twice as many between two clearings.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[int, float] = {}

    @property
    def values(self) -> Mapping[int, float]:
        """Trials to normalised values (smaller is better; +inf if it was not finite), in the order of arrival."""
        return MappingProxyType(self._values)

    def put(self, trial: int, value: float) -> bool:
        """Add a result of a trial that has none here. Returns whether others were dropped for it."""
        self._values[trial] = value
        if len(self._values) <= 2 * self._most:
            return False
        kept = self.sample(self._most)
        for other in [other for other in self._values if other not in kept]:
            del self._values[other]
        return True

    def sample(self, count: int) -> Set[int]:
        """At most `count` trials: a third of them the best, a third the latest, the others at random.

        >>> results = RungResults(9)
        >>> for trial in range(12):
        ...     _ = results.put(trial, abs(trial - 4.1))
        >>> sorted(results.sample(6))
        [0, 4, 5, 10, 11]
        """
        if len(self._values) <= count:
            return self._values.keys()
        each = count // 3
        best = heapq.nsmallest(each, self._values, key=lambda trial: (self._values[trial], trial))
        latest = itertools.islice(reversed(self._values), each)
        others = heapq.nsmallest(count - 2 * each, self._values, key=lambda trial: trial * _HASH % 2**32)
        return {*best, *latest, *others}
