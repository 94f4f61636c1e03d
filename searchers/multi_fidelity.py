"""Bayesian optimisation of the metric at the last rung, from the results of all trials at all rungs.

The model (see `rung_process`) estimates how well each rung predicts the next. A trial that was stopped early therefore
contributes as much as its rung is informative, and no value has to be made up for the rungs that it did not reach.

* The first trials are random, then every second one, then every fifth, because a model of few results is unreliable.
* The value to improve on is the best expected one minus the noise: a gain within the noise does not count.
* Running and paused trials are assumed to end as predicted, so that concurrent trials get different hyperparameters.
* Points that probably don't fit in memory are passed over (see `memory_model`).
* A failed trial counts as one of the worst, unless it ran out of memory, which says nothing about its loss. Values
  worse than the median are compressed, since a diverged trial's loss of 10 is no more informative than one of 3.
* A proposal depends only on the events and the trial's number. The model is refitted whenever the number of results has
  grown by 15 %.

Sources: Kandasamy et al., "Multi-fidelity Bayesian Optimisation with Continuous Approximations" (arXiv 1703.06240), for
a process over hyperparameters and fidelities; Jones et al., "Efficient Global Optimization of Expensive Black-Box
Functions" (1998), for expected improvement; Ament et al., "Unexpected Improvements to Expected Improvement" (arXiv
2310.20708), for its logarithm; Ginsbourger et al., "Kriging is well-suited to parallelize optimization" (2010), for
running trials.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

import numpy as np
from scipy.special import erfcx, ndtr

from searchers.beliefs import Belief
from searchers.events import FAILURES, Event, Exited, Reported, Started, assert_never
from searchers.memory_model import MemoryModel
from searchers.rung_process import Array, Parameters, Results, RungProcess, fitted
from searchers.samplers import Prior
from searchers.space import Space
from searchers.unit_cube import UnitCube

_STARTUP = 12  # results before the first proposal

_RANDOM_EVERY, _RANDOM_EVERY_EARLY, _EARLY = 5, 2, 40
"""Every fifth trial is random; every second one while there are at most 40 results."""

_MAX_RESULTS, _MAX_LIVE = 240, 64
"""Maximum numbers of results and live trials in the model. With 240 results a proposal takes 15 ms of CPU."""

_GROWTH, _FIT_STEPS = 1.15, 25

_NUM_RANDOM, _NUM_BELIEVED, _NUM_NEAR, _NUM_BEST = 400, 100, 200, 10
_SCALES = (0.2, 0.07, 0.03, 0.012)
"""The candidates are random points and neighbours of the best points, then ever closer neighbours of the best
candidates."""


@dataclass(slots=True, kw_only=True)
class _Trial:
    row: Array  # hyperparameters in the unit cube
    rung: int = -1  # highest rung with a result
    last: float | None = None  # last reported value


class MultiFidelitySampler:
    """Proposes hyperparameters by a Gaussian process over hyperparameters and rungs.

    Args:
        space: The space to draw from.
        seed: Any integer.
        rungs: `Method.rungs`. Without rungs, a trial's last value counts once the trial has completed.
        prior: Beliefs about good hyperparameters.
    """

    def __init__(self, space: Space, *, seed: int, rungs: Sequence[float], prior: Prior = MappingProxyType({})) -> None:
        self.space, self.seed = space, seed
        self._belief = Belief(space, prior)
        self._cube = UnitCube(space)
        self._memory = MemoryModel(space)
        self._trials: dict[int, _Trial] = {}
        self._live: dict[int, None] = {}  # in order of their start
        self._num_results, self._next_fit = 0, _STARTUP
        self._lengths: tuple[float, ...] = ()
        self._rungs: list[RungResults] = []
        self._to_fit: Results | None = None  # results for the next fit, if one is due
        self.extended(rungs)

    def ask(self, trial: int) -> dict[str, object]:
        rng = np.random.default_rng(Random(f"{self.seed}:{trial}:multi-fidelity").getrandbits(64))
        for row in self._believed(rng) if self._is_random(trial) else self._proposals(rng):
            point = self._cube.point(row)
            if self.space.allows(point) and self._memory.probably_fits(point):
                return point
        return self._memory.sample(Random(f"{self.seed}:{trial}"))  # like RandomSampler

    def choose(self, new: int, paused: Collection[int]) -> int | None:
        """Choose the paused trial to train on, or None for the new one.

        Their expected improvements at the last rung are compared per unit of length that they still need.
        """
        known = [trial for trial in paused if trial in self._trials and self._trials[trial].rung >= 0]
        if not known or not self._cube.width or self._num_results < _STARTUP:
            return None
        rng = np.random.default_rng(Random(f"{self.seed}:{new}:choose").getrandbits(64))
        proposal = self._proposals(rng)[0]
        running = [trial for trial in self._live if trial not in paused]
        results = self._results()
        process = self._process(results, running[-_MAX_LIVE:])
        rows, numbers = np.array([proposal, *(self._trials[trial].row for trial in known)]), np.array([-1, *known])
        _, first = np.unique(results.trials, return_index=True)
        ends, _ = process.of_trials(results.rows[first], results.trials[first])
        gains = log_expected_improvement(*process.of_trials(rows, numbers), float(ends.min()) - process.noise)
        lengths = [self._lengths[-1], *(self._lengths[-1] - self._lengths[self._trials[trial].rung] for trial in known)]
        best = int(np.argmax(gains - np.log(lengths)))
        return known[best - 1] if best else None

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        self._memory.tell(event, hparams)
        match event:
            case Started(trial=trial):
                self._live[trial] = None
                if trial not in self._trials:
                    self._trials[trial] = _Trial(row=self._cube.row(hparams))
            case Reported(trial=trial, step=step, value=value):
                if value is not None and trial in self._trials:
                    self._trials[trial].last = value
                    self._put(trial, bisect_right(self._lengths, step) - 1, value)
            case Exited(trial=trial, reason=reason):
                self._live.pop(trial, None)
                if trial not in self._trials:
                    return
                known, top = self._trials[trial], len(self._lengths) - 1
                if reason in FAILURES:
                    self._put(trial, min(known.rung + 1, top), math.inf)
                elif reason == "completed" and known.last is not None:
                    self._put(trial, top, known.last)
            case _:
                assert_never(event)

    def extended(self, rungs: Sequence[float]) -> None:
        """Optimise the metric at the new last rung, keeping the results at the other rungs."""
        known = dict(zip(self._lengths, self._rungs, strict=True))
        self._lengths = tuple(sorted(set(rungs))) or (math.inf,)
        self._rungs = [known.get(length, RungResults(_MAX_RESULTS)) for length in self._lengths]
        self._parameters = Parameters(self._cube.axes, len(self._lengths))
        self._fitted = self._parameters.mean
        if self._num_results >= _STARTUP:
            self._to_fit = self._results()

    def _is_random(self, trial: int) -> bool:
        if not self._cube.width or self._num_results < _STARTUP:
            return True
        return trial % (_RANDOM_EVERY_EARLY if self._num_results <= _EARLY else _RANDOM_EVERY) == 0

    def _put(self, trial: int, rung: int, value: float) -> None:
        """Record the trial's result at this rung, unless it has one here or at a higher rung."""
        if rung <= self._trials[trial].rung:
            return
        self._trials[trial].rung = rung
        if self._rungs[rung].put(trial, value):
            kept = self._live.keys() | set(itertools.chain.from_iterable(each.values for each in self._rungs))
            self._trials = {number: known for number, known in self._trials.items() if number in kept}
        self._num_results += 1
        if self._num_results >= self._next_fit:
            self._next_fit = math.ceil(self._num_results * _GROWTH)
            self._to_fit = self._results()

    def _results(self) -> Results:
        """Select the model's data: an equal share from each rung; lower rungs fill what higher ones leave unused."""
        left = _MAX_RESULTS
        trials: list[int] = []
        rungs: list[int] = []
        values: list[Array] = []
        for number in reversed(range(len(self._rungs))):
            known = self._rungs[number].values
            chosen = self._rungs[number].sample(left // (number + 1))
            if chosen:
                left -= len(chosen)
                trials += chosen
                rungs += [number] * len(chosen)
                values.append(normalised(np.array([known[trial] for trial in chosen])))
        return Results(
            rows=np.reshape([self._trials[trial].row for trial in trials], (len(trials), self._cube.width)),
            rungs=np.array(rungs, np.intp),
            trials=np.array(trials, np.intp),
            values=np.concatenate([np.zeros(0), *values]),
        )

    def _proposals(self, rng: np.random.Generator) -> Array:
        """Return candidate rows, the most promising first."""
        results = self._results()
        process = self._process(results, itertools.islice(reversed(self._live), _MAX_LIVE))
        _, first = np.unique(results.trials, return_index=True)
        rows = results.rows[first]
        expected, _ = process.at_the_end(rows)
        best = rows[np.argsort(expected, kind="stable")[:_NUM_BEST]]
        target = float(expected.min()) - process.noise

        near = self._cube.near(rng, np.resize(best, (_NUM_NEAR, self._cube.width)), _SCALES[0])
        candidates = np.vstack([self._cube.random(rng, _NUM_RANDOM), near])
        if self._belief:
            candidates = np.vstack([candidates, self._belief.random(rng, _NUM_BELIEVED)])
        weight = self._belief.weight(results, self._num_results)

        def gains_of(rows: Array) -> Array:
            return log_expected_improvement(*process.at_the_end(rows), target) + weight * self._belief.log_density(rows)

        gains = gains_of(candidates)
        for scale in _SCALES[1:]:
            best = candidates[np.argsort(-gains, kind="stable")[:_NUM_BEST]]
            near = self._cube.near(rng, np.repeat(best, _NUM_BEST, axis=0), scale)
            candidates = np.vstack([candidates, near])
            gains = np.concatenate([gains, gains_of(near)])
        return candidates[np.argsort(-gains, kind="stable")]

    def _believed(self, rng: np.random.Generator) -> Array:
        """Return random rows from the belief, or none if a trial is to be drawn from the whole space."""
        return self._belief.random(rng, _NUM_BELIEVED if rng.random() < self._belief.trust(self._results()) else 0)

    def _process(self, results: Results, live: Iterable[int]) -> RungProcess:
        """Return the posterior of the newest fit, given these results and live trials."""
        if self._to_fit is not None:
            self._fitted = fitted(self._parameters, self._to_fit, steps=_FIT_STEPS)
            self._to_fit = None
        rows = [self._trials[trial].row for trial in live]
        return RungProcess(self._parameters, self._fitted, results, np.reshape(rows, (len(rows), self._cube.width)))


def normalised(values: Array) -> Array:
    """Scale values to median 0 and, in their better half, to the spread of a standard normal distribution.

    Values worse than the median are compressed to at most 1.5; non-finite values become 1.5.

    >>> normalised(np.array([1.0, 2.0, 3.0, 4.0, 1000.0, np.inf])).round(1).tolist()
    [-1.6, -0.8, 0.0, 0.6, 1.5, 1.5]
    """
    finite = values[np.isfinite(values)]
    if not len(finite):
        return np.full(len(values), _CAP)
    largest = float(np.abs(finite).max()) or 1.0
    values, finite = values / largest, finite / largest  # otherwise differences of huge values could overflow
    middle, good = np.median(finite), np.quantile(finite, 0.1)
    spread = (middle - good) / _FIRST_DECILE or float(np.std(finite)) or 1.0
    scaled = np.clip((values - middle) / spread, -_CLIP, _CLIP)
    return np.where(scaled > 0, -_CAP * np.expm1(-scaled / _CAP), scaled)


_CAP, _CLIP = 1.5, 20.0
_FIRST_DECILE = 1.2816  # distance of a normal distribution's first decile from its median, in standard deviations


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


_HASH = 2_654_435_761  # Knuth's multiplicative hash orders trials at random, and equally in every process


class RungResults:
    """Results of a bounded number of trials at one rung.

    The bound keeps a proposal as fast after 100,000 trials as after 300. The best, the latest and a random sample of
    the others are kept. Without that sample the model would forget bad regions and propose them again.
    """

    def __init__(self, max_results: int) -> None:
        self._max_results = max_results
        self._values: dict[int, float] = {}

    @property
    def values(self) -> Mapping[int, float]:
        """Normalised values (smaller is better; +inf if not finite) by trial, in order of arrival."""
        return MappingProxyType(self._values)

    def put(self, trial: int, value: float) -> bool:
        """Add the result of a trial that has none at this rung. Returns whether older results were dropped."""
        self._values[trial] = value
        if len(self._values) <= 2 * self._max_results:
            return False
        kept = self.sample(self._max_results)
        for other in [other for other in self._values if other not in kept]:
            del self._values[other]
        return True

    def sample(self, count: int) -> Set[int]:
        """Select at most `count` trials: a third of them the best, a third the latest, the others at random.

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
