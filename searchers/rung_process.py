"""A Gaussian process over hyperparameters and rungs, which predicts the last rung from results at shorter lengths.

The loss of a trial with hyperparameters x at rung r is

    y = s_r * (f(x, r) + tau * d(trial, r)) + m_r + sigma_r * noise

* f has the covariance k(x, x') * c(r, r'). k is a Matern kernel with nu = 5/2 and a length scale for each
  hyperparameter. c is that of a first-order Markov chain over rungs: each pair of neighbouring rungs has a correlation,
  and the correlation of rungs further apart is the product of those in between. These correlations, fitted to the
  results, express how well each rung predicts the next.
* d is the deviation of a trial from others with the same hyperparameters (due to initial weights and batch order),
  independent between trials, with the same chain.
* m_r is the rung's level, with a wide prior: trials at higher rungs are selected, so the means of rungs differ.
  The levels are independent, or have a large part in common if the results of all rungs have the same scale.
* s_r is the rung's scale and sigma_r the scale of its noise; an uninformative rung is all noise.

The parameters maximise the posterior density, under priors wide enough for normalised values.

Sources: Kennedy and O'Hagan, "Predicting the output from a complex computer code when fast approximations are
available" (2000), for the chain; Rasmussen and Williams, "Gaussian Processes for Machine Learning" (2006), chapters 2
and 5; Snoek et al., "Practical Bayesian Optimization of Machine Learning Algorithms" (arXiv 1206.2944).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt
from scipy.linalg import blas, cho_solve, cholesky, lapack
from threadpoolctl import ThreadpoolController

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

_LEVEL = 4.0  # the prior variance of a rung's level, in normalised units
_JITTER = 1e-6

_BLOCK = 64  # rows predicted at a time, so that their matrices fit in the processor's cache

# Mean and standard deviation of the parameters' normal priors, in logarithms.
_LENGTH = (np.log(0.7), 0.8)
_DISTANCE = (np.log(0.2), 1.0)
_SCALE = (0.0, 0.5)
_TAU = (np.log(0.2), 1.0)
_SIGMA = (np.log(0.1), 1.0)


_BLAS = ThreadpoolController()
_Function = TypeVar("_Function", bound=Callable[..., object])


def _on_one_thread(function: _Function) -> _Function:
    """Let BLAS use one thread in this function.

    The matrices are small. On cores that are busy with training, two threads that wait for each other take a hundred
    times as long as one.
    """
    return cast("_Function", _BLAS.wrap(limits=1, user_api="blas")(function))


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Results of trials at rungs."""

    rows: Array  # hyperparameters, shape (n, width)
    rungs: Indices  # rung numbers, shape (n,)
    trials: Indices  # trial numbers, shape (n,)
    values: Array  # normalised losses, shape (n,)


class Parameters:
    """The process's parameters, as slices of a vector of logarithms.

    Args:
        axes: See `UnitCube`.
        num_rungs: The number of rungs.
        common_level: Whether the rungs' levels hardly differ. They do in results that are normalised for each rung.
    """

    def __init__(self, axes: Indices, num_rungs: int, *, common_level: bool = False) -> None:
        self.axes, self.num_rungs, self.common_level = axes, num_rungs, common_level
        apart, together = (_LEVEL / 16, _LEVEL) if common_level else (_LEVEL, 0.0)
        self.levels = apart * np.eye(num_rungs) + together  # prior covariance of the rungs' levels
        count = int(axes.max()) + 1 if len(axes) else 0
        ends = np.cumsum([count, num_rungs - 1, num_rungs, 1, num_rungs])
        self.lengths, self.distances, self.scales, self.tau, self.sigma = (
            slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)
        )
        sizes = np.diff(ends, prepend=0)
        priors = np.repeat([_LENGTH, _DISTANCE, _SCALE, _TAU, _SIGMA], sizes, axis=0)
        self.mean, self.deviation = priors[:, 0], priors[:, 1]

    def chain(self, theta: Array) -> Array:
        """Return the correlations between all rungs, shape (num_rungs, num_rungs)."""
        places = np.concatenate([[0.0], np.cumsum(np.exp(theta[self.distances]))])
        chain: Array = np.exp(-np.abs(places[:, None] - places[None]))
        return chain


class RungProcess:
    """The posterior, given results.

    Args:
        parameters: The layout of `theta`.
        theta: Logarithms of the parameters.
        results: At least one result.
    """

    @_on_one_thread
    def __init__(self, parameters: Parameters, theta: Array, results: Results) -> None:
        self._parameters, self._theta, self.results = parameters, theta, results
        noise = np.exp(theta[parameters.sigma])
        self.noise = float(noise[-1])  # standard deviation at the last rung
        self._scaled = self._scale(results.rows)
        scales, chain, rungs = np.exp(theta[parameters.scales]), parameters.chain(theta), results.rungs
        tau = float(np.exp(2 * theta[parameters.tau])[0])
        kernel = _matern(self._scaled, self._scaled)
        covariance = kernel + tau * (results.trials[:, None] == results.trials)
        covariance *= (scales[:, None] * scales * chain)[rungs][:, rungs]
        covariance += parameters.levels[rungs][:, rungs]
        covariance[np.diag_indices_from(covariance)] += noise[rungs] ** 2 + _JITTER
        self._factor = cholesky(covariance, lower=True, check_finite=False)
        self._weights = cho_solve((self._factor, True), results.values, check_finite=False)
        # At the last rung, a trial's covariance with a result is the kernel times the first of these plus the second.
        self._from_kernel = (scales[-1] * scales[rungs] * chain[-1][rungs])[:, None]
        level = parameters.levels[-1][rungs]
        self._variance = float(scales[-1] ** 2)  # prior variance of f at the last rung
        self._level, self._from_level = 0.0, np.zeros((len(rungs), 1))
        if parameters.common_level:
            self._level, self._from_level = float(parameters.levels[-1, -1]), level[:, None]
        self._offset = float(self._weights @ level)  # expected level of the last rung
        # At the last rung, for each result's hyperparameters.
        self.expected = self._offset + self._weights @ (self._from_kernel * kernel)

    @_on_one_thread
    def expecting(self, live: Array) -> RungProcess:
        """Return this process under the assumption that live trials end as expected.

        This reduces the deviations near them, and leaves all expectations unchanged.

        Args:
            live: Their hyperparameters, shape (k, width).
        """
        process, count, total = copy(self), len(self._scaled), len(self._scaled) + len(live)
        scaled = self._scale(live)
        solved = self._solved(self._from_kernel * _matern(self._scaled, scaled) + self._from_level)
        among = self._variance * _matern(scaled, scaled) + self._level - solved.T @ solved
        among[np.diag_indices_from(among)] += _JITTER * self._variance
        process._factor = np.zeros((total, total), order="F")
        process._factor[:count, :count], process._factor[count:, :count] = self._factor, solved.T
        process._factor[count:, count:] = cholesky(among, lower=True, check_finite=False)
        process._scaled = np.vstack([self._scaled, scaled])
        process._from_kernel = np.vstack([self._from_kernel, np.full((len(live), 1), self._variance)])
        process._from_level = np.vstack([self._from_level, np.full((len(live), 1), self._level)])
        return process

    def _scale(self, rows: Array) -> Array:
        scaled: Array = rows / np.exp(self._theta[self._parameters.lengths])[self._parameters.axes]
        return scaled

    def _solved(self, covariance: Array) -> Array:
        solved: Array = blas.dtrsm(1.0, self._factor, covariance, lower=True)
        return solved

    @_on_one_thread
    def at_the_end(self, rows: Array) -> tuple[Array, Array]:
        """Predict the last rung for new trials.

        Args:
            rows: Hyperparameters, shape (m, width).

        Returns:
            Mean and standard deviation, shape (m,), in the unit of that rung's values. The deviation excludes noise,
            the deviations d of the trials and, unless the levels have a part in common, the uncertainty of the level:
            it is the same for all trials, also for those that a new one is compared with.
        """
        mean, variance, count = np.empty(len(rows)), np.empty(len(rows)), len(self._weights)
        for begin in range(0, len(rows), _BLOCK):
            block = slice(begin, begin + _BLOCK)
            signal = self._from_kernel * _matern(self._scaled, self._scale(rows[block]))
            mean[block] = self._offset + self._weights @ signal[:count]
            solved = self._solved(signal + self._from_level)
            variance[block] = self._variance + self._level - np.einsum("ij,ij->j", solved, solved)
        return mean, np.sqrt(np.maximum(variance, 1e-10))


class Fit:
    """Maximises the posterior density of the parameters by BFGS, one evaluation at a time.

    Args:
        parameters: The search begins at their prior mean.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        # In units of the priors' standard deviations from their means.
        self._at = np.zeros(len(parameters.mean))
        self._inverse = np.eye(len(self._at))  # estimate of the inverse Hessian

    @property
    def theta(self) -> Array:
        theta: Array = self._theta(self._at)
        return theta

    def begin(self, results: Results) -> None:
        """Continue with these results, from the parameters found so far."""
        self._density = _Density(self._parameters, results)
        self._value = np.inf
        self._gradient, self._move = np.zeros(len(self._at)), np.zeros(len(self._at))

    @_on_one_thread
    def step(self) -> None:
        """Evaluate the density once, and move if it is higher than before. The first step only evaluates it."""
        # Within four deviations every covariance matrix can be factorised.
        at = np.clip(self._at + self._move, -4, 4)
        move = at - self._at
        value, gradient = self._evaluated(at)
        if self._value < np.inf:
            if value > self._value + 1e-4 * self._gradient @ move:
                self._move /= 4
                return
            change = gradient - self._gradient
            curvature = move @ change
            if curvature > 1e-10:
                across = np.eye(len(at)) - np.outer(move, change) / curvature
                self._inverse = across @ self._inverse @ across.T + np.outer(move, move) / curvature
        self._at, self._value, self._gradient = at, value, gradient
        # To the minimum of the quadratic approximation, at most one deviation away.
        move = -self._inverse @ gradient
        self._move = move / max(np.abs(move).max(initial=0.0), 1.0)

    def _theta(self, at: Array) -> Array:
        theta: Array = self._parameters.mean + self._parameters.deviation * at
        return theta

    def _evaluated(self, at: Array) -> tuple[float, Array]:
        value, gradient = self._density(self._theta(at))
        return value, gradient * self._parameters.deviation


def fit_parameters(parameters: Parameters, results: Results, *, steps: int) -> Array:
    """Return the parameters after this many steps of a new `Fit`."""
    fit = Fit(parameters)
    fit.begin(results)
    for _ in range(steps):
        fit.step()
    return fit.theta


class _Density:
    """The negative log posterior density of the parameters, and its gradient.

    All matrices are symmetric, so only the elements below their diagonals are computed: "pairs" of results.
    """

    def __init__(self, parameters: Parameters, results: Results) -> None:
        self._parameters, self._results = parameters, results
        rungs, rows = results.rungs, results.rows
        self._pairs = one, other = np.tril_indices(len(rows), -1)
        # Flat places of the pairs in a matrix and in its transpose, which are indexed several times as fast.
        self._flat, self._transposed = one * len(rows) + other, other * len(rows) + one
        self._same_trial = (results.trials[one] == results.trials[other]).astype(np.float64)
        self._levels = parameters.levels[rungs[one], rungs[other]]
        # Squared differences, summed over the columns of each hyperparameter: shape (hyperparameters, pairs).
        self._squares = np.zeros((parameters.lengths.stop, len(one)))
        for axis, column in zip(parameters.axes, np.ascontiguousarray(rows.T), strict=True):
            self._squares[axis] += (column[one] - column[other]) ** 2
        self._rung_pairs = rungs[one] * parameters.num_rungs + rungs[other]

    def __call__(self, theta: Array) -> tuple[float, Array]:
        parameters, rungs, values = self._parameters, self._results.rungs, self._results.values
        inverse_squares = np.exp(-2 * theta[parameters.lengths])
        distance = np.sqrt(5 * (inverse_squares @ self._squares))
        decay = np.exp(-distance)
        scales = np.exp(theta[parameters.scales])
        common = (scales[:, None] * scales * parameters.chain(theta)).ravel()[self._rung_pairs]
        tau = float(np.exp(2 * theta[parameters.tau])[0])
        sigma = np.exp(2 * theta[parameters.sigma])
        signal = common * ((1 + distance + distance**2 / 3) * decay + tau * self._same_trial)
        own_signal = scales[rungs] ** 2 * (1 + tau)
        covariance = np.diag(own_signal + parameters.levels[rungs, rungs] + sigma[rungs] + _JITTER)
        covariance.ravel()[self._flat] = signal + self._levels
        factor = cholesky(covariance, lower=True, check_finite=False)
        weights = cho_solve((factor, True), values, check_finite=False)
        inverse, _ = lapack.dpotri(factor, lower=True)
        off = (theta - parameters.mean) / parameters.deviation
        value = 0.5 * values @ weights + np.log(np.diag(factor)).sum() + 0.5 * off @ off

        # Derivatives with respect to the covariances of pairs, each of which is in the matrix twice, and the variances.
        one, other = self._pairs
        outer = inverse.T.ravel()[self._transposed] - weights[one] * weights[other]
        own_outer = 0.5 * (np.diag(inverse) - weights**2)
        gradient = off / parameters.deviation
        by_distance = outer * common * (1 + distance) * decay * (5 / 3)
        gradient[parameters.lengths] += (self._squares @ by_distance) * inverse_squares
        count = parameters.num_rungs
        by_rungs = np.bincount(self._rung_pairs, weights=outer * signal, minlength=count**2).reshape(count, count)
        by_rungs += by_rungs.T
        for step, distance_between in enumerate(np.exp(theta[parameters.distances])):
            gradient[parameters.distances.start + step] -= distance_between * by_rungs[: step + 1, step + 1 :].sum()
        by_rung = np.bincount(rungs, weights=own_outer * own_signal, minlength=count)
        gradient[parameters.scales] += by_rungs.sum(axis=0) + 2 * by_rung
        gradient[parameters.tau] += 2 * tau * ((outer * common) @ self._same_trial + own_outer @ scales[rungs] ** 2)
        gradient[parameters.sigma] += 2 * sigma * np.bincount(rungs, weights=own_outer, minlength=count)
        return float(value), gradient


def _matern(rows: Array, others: Array) -> Array:
    """Return the kernel of all pairs of scaled hyperparameters."""
    squares = -2 * rows @ others.T
    squares += np.einsum("ij,ij->i", rows, rows)[:, None]
    squares += np.einsum("ij,ij->i", others, others)
    np.maximum(squares, 0.0, out=squares)
    squares *= 5
    distances = np.sqrt(squares, out=squares)
    decay = np.exp(-distances)
    kernel: Array = distances * (1 / 3)
    kernel += 1.0
    kernel *= distances
    kernel += 1.0
    kernel *= decay
    return kernel
