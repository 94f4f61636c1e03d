"""The gain that trials promise, as a logarithm, from the predicted distributions of their metrics at the last rung.

* With one objective, the gain is the expected improvement on the best prediction, minus the noise: a gain within the
  noise does not count.
* With several, it is the expected improvement of the hypervolume that the front of the predictions dominates, as the
  mean over a few random directions from a reference point. In each of them the hypervolume is a power of the distance
  to the front. Each objective is scaled to the range of the front. The reference point is worse than all predictions: a
  closer one would keep a front that is incomplete from growing at its ends.
* With constraints, only trials that are predicted to keep them count for the front, and the gain is multiplied by the
  probability that all are kept. Until such a trial is known, only this probability counts.

Sources: Jones et al., "Efficient Global Optimization of Expensive Black-Box Functions" (1998), for expected
improvement; Ament et al., "Unexpected Improvements to Expected Improvement" (arXiv 2310.20708), for its logarithm;
Golovin and Zhang, "Random Hypervolume Scalarizations for Provable Multi-Objective Black Box Optimization" (arXiv
2006.04655), for the hypervolume in random directions; Gardner et al., "Bayesian Optimization with Inequality
Constraints" (2014), for constraints.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import erfcx, log_ndtr, ndtr

from searchers.unit_cube import Array

_NUM_BEST = 10  # `Gain.best`, with one objective

_MARGIN = 0.1  # distance of the reference point from the worst values, relative to the front's range

_NEGLIGIBLE = 1e-9  # range of a front that is a rounding error, in units of the metrics' standard deviations

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)  # of the quadrature, from -1 to 1


class Gain:
    """Compares trials with those that are known.

    Args:
        mean: Predicted means of the known trials, shape (n, metrics): objectives first, then constraints, which are
            kept where they are at most 0. At least one trial.
        num_objectives: The number of objectives.
        noise: Standard deviation of each metric's noise, shape (metrics,).
        directions: With several objectives, positive directions, shape (k, num_objectives).

    Attributes:
        best: Numbers of the best known trials: up to ten or, with several objectives, the front.
    """

    def __init__(self, mean: Array, *, num_objectives: int, noise: Array, directions: Array) -> None:
        self._num_objectives, self._noise, self._directions = num_objectives, noise, directions
        violation = mean[:, num_objectives:].max(axis=1, initial=0.0)
        kept = np.flatnonzero(violation == 0)
        self._any_kept = len(kept) > 0
        if not self._any_kept:
            self.best = np.argsort(violation, kind="stable")[:_NUM_BEST]
            return
        known = mean[kept, :num_objectives]
        if num_objectives == 1:
            self.best = kept[np.argsort(known[:, 0], kind="stable")[:_NUM_BEST]]
            self._target = float(known.min()) - noise[0]
            return
        front = nondominated(known)
        self.best = kept[front]
        self._low, high = known[front].min(axis=0), known[front].max(axis=0)
        self._range = np.where(high - self._low > _NEGLIGIBLE, high - self._low, 1.0)
        self._reference = (known.max(axis=0) - self._low) / self._range + _MARGIN
        self._reached = self._distances(known[front]).min(axis=2).max(axis=1)

    def log(self, mean: Array, deviation: Array) -> Array:
        """Return the logarithm of the gain of trials with these predictions, shape (m, metrics)."""
        gains = self._log_chances(mean, deviation)
        if not self._any_kept:
            return gains
        if self._num_objectives == 1:
            return gains + log_expected_improvement(mean[:, 0], deviation[:, 0], self._target)
        distances = self._distances(mean[:, : self._num_objectives])
        deviations = deviation[:, : self._num_objectives] / self._range / self._directions[:, None]
        return gains + log_hypervolume_improvement(distances, deviations, self._reached)

    def _distances(self, objectives: Array) -> Array:
        """Return how far each objective is from the reference point in each direction, shape (k, n, num_objectives)."""
        below = self._reference - (objectives - self._low) / self._range
        distances: Array = below / self._directions[:, None]
        return distances

    def _log_chances(self, mean: Array, deviation: Array) -> Array:
        """Return the logarithm of the probability that the constraints are kept, with the noise of a measurement."""
        limits = slice(self._num_objectives, None)
        chances: Array = log_ndtr(-mean[:, limits] / np.hypot(deviation[:, limits], self._noise[limits])).sum(axis=1)
        return chances


def nondominated(points: Array) -> Array:
    """Return the numbers of the points that no other dominates, of equal ones the first; smaller is better.

    >>> nondominated(np.array([[1.0, 3.0], [2.0, 2.0], [2.0, 3.0], [2.0, 2.0]])).tolist()
    [0, 1]
    """
    points, first = np.unique(points, axis=0, return_index=True)
    dominated = num_dominating(points) > 0
    return np.sort(first[~dominated])


def num_dominating(points: Array) -> Array:
    """Return for each point how many others dominate it, shape (n,)."""
    no_worse = (points[:, None] >= points).all(axis=2)
    better = (points[:, None] > points).any(axis=2)
    count: Array = (no_worse & better).sum(axis=1)
    return count


def log_expected_improvement(mean: Array, deviation: Array, target: float) -> Array:
    """Return log(E[max(target - y, 0)]) for normal y, accurate even many standard deviations above the target.

    Args:
        mean, deviation: Mean and standard deviation of y, shape (n,).
        target: The value to improve on.

    >>> y = np.random.default_rng(0).normal(1.0, 0.5, 1_000_000)
    >>> exact = np.exp(log_expected_improvement(np.array([1.0]), np.array([0.5]), 0.8))
    >>> abs(exact - np.maximum(0.8 - y, 0).mean()).round(3).tolist()
    [0.0]
    """
    z = (target - mean) / deviation
    low = np.minimum(z, -1.0)
    ratio = math.sqrt(math.pi / 2) * erfcx(-low / math.sqrt(2))  # Mills ratio, accurate where density and tail vanish
    far = -(low**2) / 2 - math.log(2 * math.pi) / 2 + np.log1p(low * ratio)
    high = np.maximum(z, -1.0)
    near = np.log(np.exp(-(high**2) / 2) / math.sqrt(2 * math.pi) + high * ndtr(high))
    gain: Array = np.where(z < -1.0, far, near) + np.log(deviation)
    return gain


def log_hypervolume_improvement(mean: Array, deviation: Array, reached: Array) -> Array:
    """Return log(mean over directions of E[max(min(y)^m - reached^m, 0)]), for vectors y of m independent normals.

    Args:
        mean, deviation: Means and standard deviations in each direction, shape (k, n, m).
        reached: For each direction, shape (k,), > 0.

    >>> y = np.random.default_rng(0).normal([1.0, 2.0], [0.5, 1.5], (1_000_000, 2)).min(axis=1)
    >>> found = log_hypervolume_improvement(np.array([[[1.0, 2.0]]]), np.array([[[0.5, 1.5]]]), np.array([0.8]))
    >>> abs(np.exp(found) - np.maximum(y**2 - 0.8**2, 0)[y > 0].sum() / len(y)).round(3).tolist()
    [0.0]
    """
    size, reached = mean.shape[2], reached[:, None]
    # The integral of m t^(m - 1) P(min(y) > t) over t > reached, by quadrature. Beyond the end, P is negligible.
    length = np.maximum((mean + 4 * deviation).min(axis=2) - reached, deviation.min(axis=2))
    places = reached + (_NODES[:, None, None] + 1) / 2 * length
    logs = log_ndtr((mean - places[..., None]) / deviation).sum(axis=3)
    logs += np.log(_WEIGHTS)[:, None, None] + np.log(size * places ** (size - 1)) + np.log(length / 2)
    gain: Array = np.logaddexp.reduce(logs, axis=(0, 1)) - math.log(len(mean))
    return gain
