"""What earlier searches expect of a point: the mean of this search's process before its own results.

The mean is a weighted sum of what each earlier search's own process expects, and this search's process models what is
left: where the tasks differ. A weight is the least-squares slope of this task's results on what the source expects of
them, never negative, shrunk towards an equal share of all sources: so a source that ranks this task's results the wrong
way round, or not at all, is out after a few of them.

Sources: Golovin et al., "Google Vizier" (2017), for processes on the residuals of earlier ones; Feurer et al.,
"Practical Transfer Learning for Bayesian Optimization" (arXiv 1802.02219), for weights that follow from how well each
earlier search predicts this one's results; Rasmussen and Williams, "Gaussian Processes for Machine Learning" (2006),
section 2.7, for known functions in a process's mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from scipy.optimize import nnls

from searchers.rung_process import Array, Indices, Parameters, Results, RungProcess, fitted
from searchers.unit_cube import UnitCube
from searchers.warm_start import Source

_FIT_STEPS = 25

_DEVIATION = 1.0
"""Prior standard deviation of a weight around its equal share, in units of that share."""
_NOISE = 1.0
_NUM_RANDOM, _NUM_NEAR, _NUM_BEST, _SCALE = 200, 100, 10, 0.1
"""Standard deviation of what sources can't explain in a result, normalised."""


class PriorMean:
    """The mean that earlier searches give.

    Args:
        cube: Of this search's space.
        sources: What the earlier ones have learned; at least one of them with trials in this space.
        lengths: Of this search's rungs.
    """

    def __init__(self, cube: UnitCube, sources: Sequence[Source], lengths: Sequence[float]) -> None:
        self._cube, self._sources = cube, sources
        self._shares = [length / lengths[-1] if math.isfinite(lengths[-1]) else 1.0 for length in lengths]

    @cached_property
    def _experts(self) -> list[_Expert]:
        return [_Expert(self._cube, source, self._shares) for source in self._sources]

    def expected(self, rows: Array, rungs: Indices) -> Array:
        """What each source expects of rows at rungs, in its own unit, shape (n, sources)."""
        return np.stack([expert.expected(rows, rungs) for expert in self._experts], axis=1)

    def weights(self, results: Results | None) -> Array:
        """The weight of each source, given this task's results, if there are any; shape (sources,)."""
        if results is None:
            return np.full(len(self._sources), 1 / len(self._sources))
        features, values = self.expected(results.rows, results.rungs), results.values.copy()
        for rung in np.unique(results.rungs):
            here = results.rungs == rung
            features[here] -= features[here].mean(axis=0)
            values[here] -= values[here].mean()
        count = features.shape[1]
        prior = math.sqrt(count) / _DEVIATION
        found, _ = nnls(
            np.vstack([features / _NOISE, prior * np.eye(count)]),
            np.concatenate([values / _NOISE, np.full(count, prior / count)]),
        )
        return np.asarray(found)

    def residuals(self, results: Results) -> tuple[Results, Array]:
        """The results less this mean, and the weights."""
        weights = self.weights(results)
        mean = self.expected(results.rows, results.rungs) @ weights
        return replace(results, values=results.values - mean), weights

    def process(self, parameters: Parameters, theta: Array, results: Results, live: Array) -> WithMean:
        """The process that expects this mean where it knows no better; arguments as for `RungProcess`."""
        residuals, weights = self.residuals(results)
        return WithMean(RungProcess(parameters, theta, residuals, live), self, weights)

    def at_the_end(self, rows: Array) -> Array:
        """What each source expects of rows at the last rung, shape (n, sources)."""
        return self.expected(rows, np.full(len(rows), len(self._shares) - 1))

    def first(self, rng: np.random.Generator) -> Array:
        """Rows for a trial before this task's first results, the best first: by a random mixture of the sources."""
        mixture = rng.dirichlet(np.ones(len(self._experts)))
        best = np.concatenate([expert.best(rng) for expert in self._experts])
        near = self._cube.near(rng, np.resize(best, (_NUM_NEAR, self._cube.width)), _SCALE)
        rows = np.vstack([self._cube.random(rng, _NUM_RANDOM), near])
        expected: Array = self.at_the_end(rows) @ mixture
        return rows[np.argsort(expected, kind="stable")]


class WithMean:
    """A process of residuals with the mean added: what `RungProcess` is without sources."""

    def __init__(self, process: RungProcess, mean: PriorMean, weights: Array) -> None:
        self._process, self._mean, self._weights = process, mean, weights
        self.noise = process.noise

    def at_the_end(self, rows: Array) -> tuple[Array, Array]:
        """As `RungProcess.at_the_end`."""
        expected, deviation = self._process.at_the_end(rows)
        return expected + self._mean.at_the_end(rows) @ self._weights, deviation


class _Expert:
    """The process of one source, over those hyperparameters of this search that vary among its trials."""

    def __init__(self, cube: UnitCube, source: Source, shares: Sequence[float]) -> None:
        trials = list(source.within(cube.space))
        flat = [(number, rung, value) for number, trial in enumerate(trials) for rung, value in trial.values.items()]
        numbers, rungs, values = (np.array(column) for column in zip(*flat, strict=True))
        rows = np.array([cube.row(trial.hparams) for trial in trials])
        varies = cube.axes[np.ptp(rows, axis=0) > 0]
        self._known = np.isin(cube.axes, varies)
        _, axes = np.unique(cube.axes[self._known], return_inverse=True)
        known = rows[:, self._known]
        results = Results(rows=known[numbers], rungs=rungs, trials=numbers, values=values)
        parameters = Parameters(axes, len(source.lengths))
        theta = fitted(parameters, results, steps=_FIT_STEPS)
        self._process = RungProcess(parameters, theta, results, np.empty((0, len(axes))))
        # The rung of the source that is nearest to each of this search's, as a share of the whole length.
        far = np.abs(np.log(np.array(shares)[:, None] / np.array(source.lengths)))
        self._nearest = far.argmin(axis=1)
        self._cube = cube
        self._best = rows[np.argsort(self._process.at_the_end(known)[0], kind="stable")[:_NUM_BEST]]

    def best(self, rng: np.random.Generator) -> Array:
        """Rows of the trials with the best expectations, the best first; hyperparameters that the source does not know
        are random."""
        rows = self._cube.random(rng, len(self._best))
        rows[:, self._known] = self._best[:, self._known]
        return rows

    def expected(self, rows: Array, rungs: Indices) -> Array:
        """What is expected of rows at rungs of this search, shape (n,)."""
        return self._process.expected(rows[:, self._known], self._nearest[rungs])
