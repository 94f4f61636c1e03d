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
* s_r is the rung's scale and sigma_r the scale of its noise; an uninformative rung is all noise.

The parameters maximise the posterior density, under priors wide enough for normalised values.

Sources: Kennedy and O'Hagan, "Predicting the output from a complex computer code when fast approximations are
available" (2000), for the chain; Rasmussen and Williams, "Gaussian Processes for Machine Learning" (2006), chapters 2
and 5; Snoek et al., "Practical Bayesian Optimization of Machine Learning Algorithms" (arXiv 1206.2944).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_solve, cholesky, lapack, solve_triangular
from scipy.optimize import minimize

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

_LEVEL = 4.0  # the prior variance of a rung's level, in normalised units
_JITTER = 1e-6

# Mean and standard deviation of the parameters' normal priors, in logarithms.
_LENGTH = (np.log(0.7), 0.8)
_DISTANCE = (np.log(0.2), 1.0)
_SCALE = (0.0, 0.5)
_TAU = (np.log(0.2), 1.0)
_SIGMA = (np.log(0.1), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Results of trials at rungs."""

    rows: Array  # hyperparameters, shape (n, width)
    rungs: Indices  # rung numbers, shape (n,)
    trials: Indices  # trial numbers, shape (n,)
    values: Array  # normalised losses, shape (n,)


class Parameters:
    """The process's parameters, as slices of a vector of logarithms. `axes`: see `UnitCube`."""

    def __init__(self, axes: Indices, num_rungs: int) -> None:
        self.axes, self.num_rungs = axes, num_rungs
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
        live: Hyperparameters of live trials, shape (k, width), for which f is assumed to be as expected at the last
            rung. This reduces the deviations near them, and leaves all expectations unchanged.
    """

    def __init__(self, parameters: Parameters, theta: Array, results: Results, live: Array) -> None:
        self._parameters, self._theta, self._results = parameters, theta, results
        noise = np.exp(theta[parameters.sigma])
        self.noise = float(noise[-1])  # standard deviation at the last rung
        self._scaled = self._scale(results.rows)
        self._scales, self._chain = np.exp(theta[parameters.scales]), parameters.chain(theta)
        covariance = self._prior(_matern(_distances(self._scaled, self._scaled)), results.trials, results.rungs)
        covariance += _LEVEL * (results.rungs[:, None] == results.rungs[None])
        covariance[np.diag_indices_from(covariance)] += noise[results.rungs] ** 2 + _JITTER
        self._factor = cholesky(covariance, lower=True, check_finite=False)
        self._weights = cho_solve((self._factor, True), results.values, check_finite=False)
        self._live = self._scale(live)
        self._live_solved = self._solved(self._at_the_end(self._live))
        among = self._variance * _matern(_distances(self._live, self._live)) - self._live_solved.T @ self._live_solved
        among[np.diag_indices_from(among)] += _JITTER * self._variance
        self._live_factor = cholesky(among, lower=True, check_finite=False)

    @property
    def _variance(self) -> float:
        """The prior variance of f at the last rung."""
        return float(self._scales[-1] ** 2)

    def _scale(self, rows: Array) -> Array:
        scaled: Array = rows / np.exp(self._theta[self._parameters.lengths])[self._parameters.axes]
        return scaled

    def _at_the_end(self, scaled: Array) -> Array:
        """Return the covariance of f at the last rung, for new trials, with the results."""
        count = len(scaled)
        last = np.full(count, self._parameters.num_rungs - 1)
        return self._prior(_matern(_distances(scaled, self._scaled)), np.full(count, -1), last)

    def _solved(self, cross: Array) -> Array:
        solved: Array = solve_triangular(self._factor, cross.T, lower=True, check_finite=False)
        return solved

    def _prior(self, kernel: Array, trials: Indices, rungs: Indices) -> Array:
        """Return the covariance of these trials at these rungs with the results, without levels and noise."""
        results = self._results
        tau = np.exp(2 * self._theta[self._parameters.tau])
        chain = self._chain[rungs][:, results.rungs]
        scales = self._scales[rungs][:, None] * self._scales[results.rungs]
        covariance: Array = scales * chain * (kernel + tau * (trials[:, None] == results.trials[None]))
        return covariance

    def at_the_end(self, rows: Array) -> tuple[Array, Array]:
        """Predict f at the last rung for new trials.

        Args:
            rows: Hyperparameters, shape (m, width).

        Returns:
            Mean and standard deviation, shape (m,), in the unit of that rung's values. The deviation excludes noise and
            the uncertainty of the level, which all rows share.
        """
        scaled = self._scale(rows)
        return self._predicted(scaled, self._at_the_end(scaled), self._variance)

    def of_trials(self, rows: Array, trials: Indices) -> tuple[Array, Array]:
        """Like `at_the_end`, but for these trials (-1: a new one) with their own deviations d, given their results."""
        scaled = self._scale(rows)
        last = np.full(len(rows), self._parameters.num_rungs - 1)
        cross = self._prior(_matern(_distances(scaled, self._scaled)), trials, last)
        tau = float(np.exp(2 * self._theta[self._parameters.tau])[0])
        return self._predicted(scaled, cross, (1 + tau) * self._variance)

    def _predicted(self, scaled: Array, cross: Array, prior_variance: float) -> tuple[Array, Array]:
        mean = (cross + _LEVEL * (self._results.rungs == self._parameters.num_rungs - 1)) @ self._weights
        solved = self._solved(cross)
        variance = prior_variance - np.einsum("ij,ij->j", solved, solved)
        if len(self._live):
            with_live = self._variance * _matern(_distances(self._live, scaled)) - self._live_solved.T @ solved
            solved = solve_triangular(self._live_factor, with_live, lower=True, check_finite=False)
            variance -= np.einsum("ij,ij->j", solved, solved)
        return mean, np.sqrt(np.maximum(variance, 1e-10))


def fitted(parameters: Parameters, results: Results, *, steps: int) -> Array:
    """Maximise the posterior density by at most `steps` steps of L-BFGS from the prior mean; returns log parameters."""
    found = minimize(
        _Density(parameters, results),
        parameters.mean,
        jac=True,
        method="L-BFGS-B",
        # Within four deviations every covariance matrix can be factorised.
        bounds=np.stack([parameters.mean - 4 * parameters.deviation, parameters.mean + 4 * parameters.deviation], 1),
        options={"maxiter": steps},
    )
    return np.asarray(found.x)


class _Density:
    """The negative log posterior density of the parameters, and its gradient."""

    def __init__(self, parameters: Parameters, results: Results) -> None:
        self._parameters, self._results = parameters, results
        rungs, rows = results.rungs, results.rows
        self._same_trial = (results.trials[:, None] == results.trials[None]).astype(np.float64)
        self._level = _LEVEL * (rungs[:, None] == rungs[None])
        count = parameters.lengths.stop
        # Squared differences, summed over the columns of each hyperparameter: shape (hyperparameters, n * n).
        self._squares = np.zeros((count, len(rows) ** 2))
        for column, axis in enumerate(parameters.axes):
            self._squares[axis] += ((rows[:, None, column] - rows[None, :, column]) ** 2).ravel()
        low, high = np.minimum(rungs[:, None], rungs[None]), np.maximum(rungs[:, None], rungs[None])
        # For each pair of neighbouring rungs, the pairs of results on either side of it.
        self._between = [(low <= step) & (high > step) for step in range(parameters.num_rungs - 1)]

    def __call__(self, theta: Array) -> tuple[float, Array]:
        parameters, results = self._parameters, self._results
        n = len(results.values)
        inverse_squares = np.exp(-2 * theta[parameters.lengths])
        distance = np.sqrt(5 * (inverse_squares @ self._squares)).reshape(n, n)
        decay = np.exp(-distance)
        kernel = (1 + distance + distance**2 / 3) * decay
        scales = np.exp(theta[parameters.scales])[results.rungs]
        common = scales[:, None] * scales * parameters.chain(theta)[results.rungs][:, results.rungs]
        tau = float(np.exp(2 * theta[parameters.tau])[0])
        sigma = np.exp(2 * theta[parameters.sigma])
        signal = common * (kernel + tau * self._same_trial)
        covariance = signal + self._level
        covariance[np.diag_indices(n)] += sigma[results.rungs] + _JITTER
        factor = cholesky(covariance, lower=True, check_finite=False)
        weights = cho_solve((factor, True), results.values, check_finite=False)
        inverse, _ = lapack.dpotri(factor, lower=True)
        inverse = np.tril(inverse) + np.tril(inverse, -1).T
        off = (theta - parameters.mean) / parameters.deviation
        value = 0.5 * results.values @ weights + np.log(np.diag(factor)).sum() + 0.5 * off @ off

        gradient = off / parameters.deviation
        outer = 0.5 * (inverse - np.outer(weights, weights))  # derivative with respect to the covariance
        by_signal = outer * signal
        by_distance = outer * common * (1 + distance) * decay * (5 / 3)
        gradient[parameters.lengths] += (self._squares @ by_distance.ravel()) * inverse_squares
        steps = np.exp(theta[parameters.distances])
        for step, between in enumerate(self._between):
            gradient[parameters.distances.start + step] -= steps[step] * by_signal[between].sum()
        gradient[parameters.scales] += 2 * np.bincount(
            results.rungs, weights=by_signal.sum(axis=1), minlength=parameters.num_rungs
        )
        gradient[parameters.tau] += 2 * tau * (outer * common * self._same_trial).sum()
        by_noise = np.bincount(results.rungs, weights=np.diag(outer), minlength=parameters.num_rungs)
        gradient[parameters.sigma] += 2 * sigma * by_noise
        return float(value), gradient


def _distances(rows: Array, others: Array) -> Array:
    """Return the Euclidean distances between all pairs."""
    squares = (rows**2).sum(axis=1)[:, None] + (others**2).sum(axis=1) - 2 * rows @ others.T
    distances: Array = np.sqrt(np.maximum(squares, 0.0))
    return distances


def _matern(distances: Array) -> Array:
    scaled = np.sqrt(5.0) * distances
    kernel: Array = (1 + scaled + scaled**2 / 3) * np.exp(-scaled)
    return kernel
