"""What earlier searches expect of a point: the mean of this search's process before its own results.

The mean is a weighted sum of what each earlier search's own process expects, and this search's process models what is
left: where the tasks differ.

* A source's slope is that of this task's results on what the source expects of them, by least squares, never negative,
  shrunk towards an equal share of all sources (a normal prior with the same deviation of their sum, however many there
  are). A source that ranks the results the wrong way round is out after a few of them.
* All slopes are scaled by the probability that the sources together rank the results better than this search's process
  alone ranks those of each trial from all others; below one half they count for nothing. So unrelated sources, or those
  from which nothing more can be learned, leave the search as it would be without them.

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

_NUM_RESAMPLES = 100
_NUM_RANDOM, _NUM_NEAR, _NUM_BEST, _SCALE = 200, 100, 10, 0.1
"""Candidates for the first points: random ones, and some around the best points of the sources."""
_NUM_FEW = 16
"""The candidates of every second one of these."""


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

    @property
    def equal_weights(self) -> Array:
        """The weights before this task's first results, shape (sources,)."""
        return np.full(len(self._sources), 1 / len(self._sources))

    def fit(self, parameters: Parameters, results: Results, *, steps: int) -> tuple[Array, Array]:
        """The parameters of this search's process, and the sources' weights; arguments as for `fitted`."""
        alone = fitted(parameters, results, steps=steps)
        nothing = np.empty((0, results.rows.shape[1]))
        left_out = RungProcess(parameters, alone, results, nothing).left_out()
        slopes = self.slopes(results)
        better = _share_better(self._mean(results, slopes), left_out, results)
        if better < 0.5 or not slopes.any():
            return alone, np.zeros_like(slopes)
        weights = slopes * better
        return fitted(parameters, self._residuals(results, weights), steps=steps), weights

    def slopes(self, results: Results) -> Array:
        """The least-squares slope of the results on what each source expects of them, >= 0, shape (sources,)."""
        features, values = self.expected(results.rows, results.rungs), results.values.copy()
        for rung in np.unique(results.rungs):
            here = results.rungs == rung
            features[here] -= features[here].mean(axis=0)
            values[here] -= values[here].mean()
        count = len(self._sources)
        prior = math.sqrt(count) * np.eye(count)
        found, _ = nnls(np.vstack([features, prior]), np.concatenate([values, prior @ self.equal_weights]))
        return np.asarray(found)

    def process(
        self, parameters: Parameters, theta: Array, weights: Array, results: Results, live: Array
    ) -> RungProcess | WithMean:
        """The process that expects this mean where it knows no better; other arguments as for `RungProcess`."""
        if not weights.any():
            return RungProcess(parameters, theta, results, live)
        return WithMean(RungProcess(parameters, theta, self._residuals(results, weights), live), self, weights)

    def _mean(self, results: Results, weights: Array) -> Array:
        mean: Array = self.expected(results.rows, results.rungs) @ weights
        return mean

    def _residuals(self, results: Results, weights: Array) -> Results:
        return replace(results, values=results.values - self._mean(results, weights))

    def at_the_end(self, rows: Array) -> Array:
        """What each source expects of rows at the last rung, shape (n, sources)."""
        return self.expected(rows, np.full(len(rows), len(self._shares) - 1))

    def first(self, trial: int, rng: np.random.Generator) -> Array:
        """Rows for a trial before this task's first results, the best first: by a random mixture of the sources.

        Trials with even numbers get what the sources expect to be best, the others the best of a few random rows: tasks
        may differ more than the sources know.
        """
        mixture = rng.dirichlet(np.ones(len(self._experts)))
        rows = self._cube.random(rng, _NUM_FEW)
        if trial % 2 == 0:
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


def _share_better(one: Array, other: Array, results: Results) -> float:
    """The share of resamples of the trials in which one prediction of the results ranks more pairs at equal rungs right
    than the other."""
    values, rungs = results.values, results.rungs
    pairs = (rungs[:, None] == rungs) & (values[:, None] < values)
    fewer = pairs * ((other[:, None] >= other).astype(float) - (one[:, None] >= one))  # wrong pairs
    _, trials = np.unique(results.trials, return_inverse=True)
    count = int(trials.max()) + 1
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), _NUM_RESAMPLES)[:, trials]
    gains = ((drawn @ fewer) * drawn).sum(axis=1)
    return float(np.mean((gains > 0) + 0.5 * (gains == 0)))


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
