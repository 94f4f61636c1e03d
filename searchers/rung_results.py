"""The results that a model of the rungs learns from, and their scale."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from searchers.acquisition import num_dominating
from searchers.unit_cube import Array

Values = tuple[float, ...]
"""A trial's result: one value for each objective, and one for each limit; +inf if not finite. Smaller is better."""

_HASH = 2_654_435_761  # Knuth's multiplicative hash orders trials at random, and equally in every process


class RungResults:
    """Results of a bounded number of trials at one rung.

    The bound keeps a proposal as fast after 100,000 trials as after 300. The best, the latest and a random sample of
    the others are kept. Without that sample the model would forget bad regions and propose them again. With several
    values, the best trials are those that the fewest others dominate.
    """

    def __init__(self, max_results: int) -> None:
        self._max_results = max_results
        self._values: dict[int, Values] = {}

    @property
    def values(self) -> Mapping[int, Values]:
        """Values by trial, in order of arrival."""
        return MappingProxyType(self._values)

    def put(self, trial: int, values: Values) -> bool:
        """Add the result of a trial that has none at this rung. Returns whether older results were dropped."""
        self._values[trial] = values
        if len(self._values) <= 2 * self._max_results:
            return False
        self._values = {kept: self._values[kept] for kept in self.sample(self._max_results)}
        return True

    def sample(self, count: int) -> list[int]:
        """Select at most `count` trials: a third of them the best, a third the latest, the others at random.

        They are in the order of arrival.

        >>> results = RungResults(9)
        >>> for trial in range(12):
        ...     _ = results.put(trial, (abs(trial - 4.1),))
        >>> results.sample(6)
        [0, 4, 5, 10, 11]
        """
        trials = np.array(list(self._values), np.int64)
        if len(trials) <= count:
            return list(self._values)
        values = np.array(list(self._values.values()))
        rank = values[:, 0] if values.shape[1] == 1 else num_dominating(values)
        third = count // 3
        best = np.lexsort((trials, rank))[:third]
        latest = np.arange(len(trials) - third, len(trials))
        others = np.argsort(trials * _HASH % 2**32, kind="stable")[: count - 2 * third]
        chosen: list[int] = trials[np.unique(np.concatenate([best, latest, others]))].tolist()
        return chosen


def select(rungs: Sequence[RungResults], most: int) -> Iterator[tuple[int, list[int]]]:
    """Select at most `most` results, as numbers of rungs with their trials, the last rung first.

    Each rung has an equal share; lower rungs fill what higher ones leave unused.
    """
    for number in reversed(range(len(rungs))):
        if chosen := rungs[number].sample(most // (number + 1)):
            most -= len(chosen)
            yield number, chosen


def normalised(values: Array) -> Array:
    """Scale values to median 0 and, in their better half, to the spread of a standard normal distribution.

    Values worse than the median are compressed to at most 1.5; non-finite values become 1.5.

    >>> normalised(np.array([1.0, 2.0, 3.0, 4.0, 1000.0, np.inf])).round(1).tolist()
    [-1.6, -0.8, 0.0, 0.6, 1.5, 1.5]
    """
    return _compressed(_centred(values))


def normalised_together(rungs: Sequence[Mapping[int, float]]) -> list[Array]:
    """Normalise the values of each rung, by trial; the rungs are in ascending order.

    Trials at a higher rung were selected, so that their values are close together, and would be stretched. Where values
    without noise repeat those at the rung before, they are not: else the stretched differences, of trials that are
    neighbours, would be taken for noise.

    >>> first = {trial: float(trial) for trial in range(100)}
    >>> second = {trial: 5.0 + 3.0 * trial for trial in range(10)}
    >>> [values[:3].round(2).tolist() for values in normalised_together([first, second])]
    [[-1.6, -1.57, -1.54], [-0.15, -0.11, -0.08]]
    """
    found: list[Array] = []
    before: dict[int, float] = {}
    for rung in rungs:
        centred = _centred(np.array(list(rung.values())))
        centred = centred / _stretch(before, dict(zip(rung, centred.tolist(), strict=True)))
        before = dict(zip(rung, centred.tolist(), strict=True))
        found.append(_compressed(centred))
    return found


def _centred(values: Array) -> Array:
    values, finite = _without_overflow(values)
    if not len(finite):
        return np.full(len(values), np.inf)
    good, middle = _quantiles(finite, 0.1, 0.5)
    spread = max((middle - good) / _FIRST_DECILE or float(np.std(finite)) or 1.0, _LEAST)
    centred: Array = (values - middle) / spread
    return centred


def _compressed(centred: Array) -> Array:
    centred = np.clip(centred, -_CLIP, _CLIP)
    return np.where(centred > 0, -_CAP * np.expm1(-centred / _CAP), centred)


def _stretch(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """How much wider apart the values of the same trials are at the next rung, if they are a linear function of those
    before; else 1."""
    trials = [trial for trial in after if math.isfinite(after[trial]) and math.isfinite(before.get(trial, math.inf))]
    if len(trials) < _FEW:
        return 1.0
    pairs = np.array([[before[trial], after[trial]] for trial in trials])
    one, other = pairs.std(axis=0).tolist()
    if not one or not other or np.corrcoef(pairs.T)[0, 1] < _EXACT:
        return 1.0
    return max(float(other / one), 1.0)


def standardised(values: Array) -> Array:
    """Scale values to mean 0 and standard deviation 1, keeping their proportions.

    An outlier on the worse side becomes the upper quartile plus 1.5 times the distance of the quartiles, and a
    non-finite value the worst of the others. With several objectives, a value worse than the median may be on the
    front, so that it must not be compressed.

    >>> standardised(np.array([0.0, 1.0, 2.0, 3.0, 1e9, np.inf])).round(1).tolist()
    [-1.3, -0.9, -0.4, 0.0, 1.3, 1.3]
    """
    values, finite = _without_overflow(values)
    if not len(finite):
        return np.ones(len(values))
    low, high, worst = _quantiles(finite, 0.25, 0.75, 1.0)
    if low < high:
        worst = min(worst, high + 1.5 * (high - low))
    values = np.minimum(values, worst)
    scaled: Array = (values - values.mean()) / (values.std() or 1.0)
    return scaled


def relative(excesses: Array) -> Array:
    """Scale a limit's excesses to their median size; 0 stays 0, and all are between -3 and 3.

    >>> relative(np.array([-1.0, 0.0, 1.0, 1000.0, np.inf])).round(1).tolist()
    [-1.0, 0.0, 1.0, 3.0, 3.0]
    """
    excesses, finite = _without_overflow(excesses)
    size = float(np.median(np.abs(finite))) if len(finite) else 0.0
    scaled: Array = _LIMIT * np.tanh(np.clip(excesses / max(size or 1.0, _LEAST), -_CLIP, _CLIP) / _LIMIT)
    return scaled


def _quantiles(values: Array, *shares: float) -> list[float]:
    """Return these quantiles, with linear interpolation. `np.quantile` takes ten times as long for a few values."""
    ordered, places = np.sort(values), np.array(shares) * (len(values) - 1)
    quantiles: list[float] = np.interp(places, np.arange(len(values)), ordered).tolist()
    return quantiles


def _without_overflow(values: Array) -> tuple[Array, Array]:
    """Scale values so that none of their differences overflows; also return the finite ones."""
    finite = values[np.isfinite(values)]
    largest = float(np.abs(finite).max()) if len(finite) else 0.0
    return (values / largest, finite / largest) if largest else (values, finite)


_CAP, _CLIP, _LIMIT = 1.5, 20.0, 3.0
_FEW, _EXACT = 8, 0.999  # trials at two rungs, and the correlation of their values, that show that there is no noise
_LEAST = 1e-300  # dividing 1 by less overflows
_FIRST_DECILE = 1.2816  # distance of a normal distribution's first decile from its median, in standard deviations
