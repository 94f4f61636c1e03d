"""Learns where trials fit in memory, and draws points that probably do.

A trial's memory is roughly a product of some hyperparameters, such as its batch size and width, so the limit is a plane
in their logarithms. Bayesian logistic regression on these learns the plane from a few failures. A trial that has
reported fits; one that ran out of memory does not. Until a trial runs out of memory, every point is considered likely
to fit.

Whether a trial fits is not random, so the regression may be as steep as a step. Its posterior is then far from normal:
with Laplace's approximation, searches stayed so far from the limit that their best loss suffered. The posterior is
therefore sampled.

Source: Murray, Adams and MacKay, "Elliptical slice sampling" (2010).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random

import numpy as np

from searchers.domains import Categorical, numbers_of, parameters
from searchers.events import Event, Exited, Reported
from searchers.numeric_domains import Double, Int, Log
from searchers.space import Space
from searchers.unit_cube import Array, UnitCube

_LIKELY, _SAFE = 0.85, 0.95
"""Chances of fitting that a proposal and a random draw need. A random draw has nothing to gain from the limit."""

_DRAWS = 100  # random points among which one is likely to fit

_NEIGHBOURS, _SCALES = 100, (0.05, 0.1, 0.2, 0.4)  # points around a proposal that doesn't fit, ever further away

_MAX_TRIALS = 100  # the latest trials kept of each kind

_WEIGHT, _SMALL_WEIGHT = 20.0, 4.0
"""Prior standard deviations of the weights, for columns from -1 to 1. The small one is for numbers up to 1, such as a
learning rate or a dropout, which seldom affect the memory."""

_CHAINS, _STEPS, _SHRINKS = 100, 25, 50

_GROWTH = 1.15  # of the number of trials between samplings


class MemoryModel:
    """A search's knowledge of where trials fit. It depends only on the events."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._cube, self._columns = UnitCube(space), _Columns(space)
        self._trained: dict[int, Array] = {}  # rows of columns by trial that has reported
        self._failed: dict[int, Array] = {}
        self._num_known, self._next_sampling = 0, 0
        self._rows: tuple[Array, int] = (np.empty((0, 0)), 0)  # those of the posterior, and how many of them fitted
        self._model: _Posterior | None = None  # None if it must be sampled again

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        """Learn from this event. `hparams` are the trial's."""
        trial = event.trial
        match event:
            case Reported() if trial not in self._trained:
                known = self._trained
            case Exited(reason="out_of_memory") if hparams:
                self._trained.pop(trial, None)
                known = self._failed
            case _:
                return
        known[trial] = self._columns.row(hparams)
        if len(known) > _MAX_TRIALS:
            del known[next(iter(known))]
        self._num_known += 1
        # One more trial that fits hardly changes the posterior, whose samples take as long as ten proposals.
        if known is self._failed or self._num_known >= self._next_sampling:
            self._next_sampling = math.ceil(self._num_known * _GROWTH)
            self._rows = np.array([*self._trained.values(), *self._failed.values()]), len(self._trained)
            self._model = None

    def probably_fits(self, point: Mapping[str, object]) -> bool:
        """Whether the point probably fits. Always true until a trial has run out of memory."""
        return not self._failed or bool(self._chances([point])[0] >= self._enough(_LIKELY))

    def sample(self, rng: Random) -> dict[str, object]:
        """Draw a random point that almost surely fits, or else the likeliest of many."""
        point = self.space.sample(rng)
        if not self._failed:
            return point
        points = [point, *(self.space.sample(rng) for _ in range(_DRAWS - 1))]
        chances = self._chances(points)
        fitting = np.flatnonzero(chances >= self._enough(_SAFE))
        return points[fitting[0] if len(fitting) else np.argmax(chances)]

    def closest(self, point: dict[str, object], rng: Random) -> dict[str, object] | None:
        """Return the point if it probably fits, or else the closest of many points around it that does, if any."""
        if self.probably_fits(point):
            return point
        row, around = self._cube.row(point), np.random.default_rng(rng.getrandbits(64))
        for scale in _SCALES:
            rows = self._cube.near(around, np.tile(row, (_NEIGHBOURS, 1)), scale)
            points = [self._cube.point(each) for each in rows]
            fits = self._chances(points) >= self._enough(_LIKELY)
            order: list[int] = np.argsort(((rows - row) ** 2).sum(axis=1), kind="stable").tolist()
            for number in order:
                if fits[number] and self.space.allows(points[number]):
                    return points[number]
        return None

    def _chances(self, points: Sequence[Mapping[str, object]]) -> Array:
        """Return the chance that each point fits, shape (n,)."""
        return self._posterior().chances(np.array([self._columns.row(point) for point in points]))

    def _enough(self, chance: float) -> float:
        """Return this chance, or the median one of the trials that did fit if it is lower: then the hyperparameters say
        little about the failures, and must not exclude most of the space."""
        return min(chance, self._posterior().median)

    def _posterior(self) -> _Posterior:
        if self._model is None:
            self._model = _Posterior(*self._rows, self._columns.weights)
        return self._model


class _Columns:
    """The encoding of a space's points for the regression, in columns from -1 to 1.

    A number, also one of several categories, has one column, its logarithm if its range is positive. Other categories
    are one-hot encoded. The columns of a conditional hyperparameter that a point lacks are 0. The last one is a bias.

    Attributes:
        weights: prior standard deviation of each column's weight.
    """

    def __init__(self, space: Space) -> None:
        self._root = space.root
        self._places: dict[str, tuple[int, Callable[[float], float] | None]] = {}  # None: one-hot
        weights: list[float] = []
        for name, domain in ((each.name, each.domain) for each in parameters(space.root)):
            count, place = 1, None
            match domain:
                case Categorical(vals=vals):
                    if all(isinstance(val, int | float) and not isinstance(val, bool) for val in vals):
                        ordered = [float(val) for val in vals]  # type: ignore[arg-type]
                        low, high = min(ordered), max(ordered)
                        place = partial(_category_position, vals=ordered)
                    else:
                        count, high = len(vals), math.inf
                case Log(bounds=(low, high)) | Int(minval=low, maxval=high) | Double(minval=low, maxval=high):
                    place = partial(_position, low=low, high=high)
            self._places[name] = len(weights), place
            weights += [_WEIGHT if high > 1 else _SMALL_WEIGHT] * count
        self.weights = np.array([*weights, _WEIGHT])

    def row(self, point: Mapping[str, object]) -> Array:
        """Encode a point as a row of shape (width,)."""
        row = np.zeros(len(self.weights))
        row[-1] = 1.0
        for name, value in numbers_of(self._root, point):
            start, place = self._places[name]
            if place is None:
                row[start + int(value)] = 1.0
            else:
                row[start] = place(value)
        return row


def _position(value: float, *, low: float, high: float) -> float:
    if low > 0:
        low, high, value = math.log(low), math.log(high), math.log(max(value, low))
    return min(max(2 * (value - low) / (high - low) - 1, -1.0), 1.0) if high > low else 0.0


def _category_position(choice: float, *, vals: Sequence[float]) -> float:
    return _position(vals[int(choice)], low=min(vals), high=max(vals))


class _Posterior:
    """Samples from the posterior of a logistic regression with normal priors.

    Args:
        rows: rows of trials, shape (n, width).
        num_trained: number of trials that fitted, which come first.
        deviations: the priors' standard deviations, shape (width,).

    Attributes:
        median: median chance of the trials that fitted; 1 without any.
    """

    def __init__(self, rows: Array, num_trained: int, deviations: Array) -> None:
        rng = np.random.default_rng(0)
        signed = np.where(np.arange(len(rows)) < num_trained, 1.0, -1.0)[:, None] * rows

        def log_likelihood(weights: Array) -> Array:
            likelihood: Array = -np.logaddexp(0, -weights @ signed.T).sum(axis=1)
            return likelihood

        self._weights = rng.normal(0, deviations, (_CHAINS, len(deviations)))
        known = log_likelihood(self._weights)
        for _ in range(_STEPS):
            # Each chain draws an ellipse through its point, and shrinks an arc of it until the likelihood suffices.
            other = rng.normal(0, deviations, self._weights.shape)
            enough = known + np.log1p(-rng.random(_CHAINS))
            high = rng.uniform(0, 2 * math.pi, _CHAINS)
            low, angle = high - 2 * math.pi, high.copy()
            left = np.arange(_CHAINS)  # chains that have not moved yet
            before = self._weights.copy()
            for _ in range(_SHRINKS):
                turned = np.cos(angle[left])[:, None] * before[left] + np.sin(angle[left])[:, None] * other[left]
                found = log_likelihood(turned)
                moves = found > enough[left]
                self._weights[left[moves]], known[left[moves]] = turned[moves], found[moves]
                left = left[~moves]
                if not len(left):
                    break
                low[left] = np.where(angle[left] < 0, angle[left], low[left])
                high[left] = np.where(angle[left] < 0, high[left], angle[left])
                angle[left] = rng.uniform(low[left], high[left])
        self.median = float(np.median(self.chances(rows[:num_trained]))) if num_trained else 1.0

    def chances(self, rows: Array) -> Array:
        """Return the chance that each row fits, shape (n,)."""
        chances: Array = (0.5 + 0.5 * np.tanh(rows @ self._weights.T / 2)).mean(axis=1)  # does not overflow
        return chances
