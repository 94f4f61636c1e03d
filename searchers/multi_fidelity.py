"""Bayesian optimisation of the metrics at the last rung, from the results of all trials at all rungs.

The model (see `rung_process`) estimates how well each rung predicts the next. A trial that was stopped early therefore
contributes as much as its rung is informative, and no value has to be made up for the rungs that it did not reach.

* The first trials are random, then every second one, then every fifth, because a model of few results is unreliable.
* A proposal has the largest gain (see `acquisition`) among random points, neighbours of the best trials, and ever
  closer neighbours of the best candidates.
* With several metrics, each objective and each limit has a process of its own. A size, which is known at once and does
  not change, thus is not as uncertain as a loss.
* Running and paused trials are assumed to end as predicted, so that concurrent trials get different hyperparameters,
  and what they will show need not be tried again.
* Points that probably don't fit in memory are passed over (see `memory_model`).
* A failed trial counts as one of the worst, unless it ran out of memory, which says nothing about its loss.
* A proposal depends only on the events and the trial's number. The model is refitted whenever the number of results has
  grown by 15 %. A fit continues from the last one, a step with each new result, so that no proposal waits for a fit.

Sources: Kandasamy et al., "Multi-fidelity Bayesian Optimisation with Continuous Approximations" (arXiv 1703.06240), for
a process over hyperparameters and fidelities; Ginsbourger et al., "Kriging is well-suited to parallelize optimization"
(2010), for running trials.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from random import Random
from types import MappingProxyType

import numpy as np

from searchers.acquisition import Gain, num_dominating
from searchers.beliefs import Belief
from searchers.events import FAILURES, Event, Exited, Reported, Started, assert_never
from searchers.memory_model import MemoryModel
from searchers.objectives import Objectives
from searchers.rung_process import Array, Fit, Parameters, Results, RungProcess
from searchers.rung_results import RungResults, Values, normalised_together, relative, select, standardised
from searchers.samplers import STARTUP, Prior
from searchers.space import Space
from searchers.unit_cube import UnitCube

_STARTUP = STARTUP["multi_fidelity"]  # results before the first proposal

_RANDOM_EVERY, _RANDOM_EVERY_EARLY, _EARLY = 5, 2, 40
"""Every fifth trial is random; every second one while there are at most 40 results."""

_MAX_RESULTS, _MAX_LIVE, _MAX_NEW = 160, 64, 128
"""Maximum numbers of results in the model, of the latest live trials, and of those that have no result yet."""

_GROWTH, _FIT_STEPS, _EXTENDED_FIT_STEPS = 1.15, 9, 25
"""Growth of the number of results between fits, the steps of a fit, and those of the first one after an extension."""

_NUM_RANDOM, _NUM_BELIEVED, _NUM_NEAR = 64, 64, 64
_NUM_BEST, _NUM_CLOSER, _SCALES = 10, 6, (0.2, 0.07, 0.03, 0.012)
"""The numbers of candidates: random ones, those from the beliefs, neighbours of the best trials, and then the best
candidates and the neighbours of each. The scales are their distances. With several objectives, there are three
times as many random candidates and neighbours, since a front is larger than an optimum."""

_NUM_DIRECTIONS = 8  # of the hypervolume


@dataclass(slots=True, kw_only=True)
class _Trial:
    row: Array  # hyperparameters in the unit cube
    rung: int = -1  # highest rung with a result
    last: Values | None = None  # last reported values


class MultiFidelitySampler:
    """Proposes hyperparameters by Gaussian processes over hyperparameters and rungs.

    Args:
        space: The space to draw from.
        seed: Any integer.
        rungs: `Method.rungs`. Without rungs, a trial's last value counts once the trial has completed.
        objectives: The objectives and constraints of a search with several metrics.
        prior: Beliefs about good hyperparameters.
    """

    def __init__(
        self,
        space: Space,
        *,
        seed: int,
        rungs: Sequence[float],
        objectives: Objectives | None = None,
        prior: Prior = MappingProxyType({}),
    ) -> None:
        self.space, self.seed = space, seed
        self._num_objectives = 1 if objectives is None else len(objectives.objectives)
        self._num_limits = 0 if objectives is None else objectives.num_limits
        self._failed: Values = (math.inf,) * (self._num_objectives + self._num_limits)
        self._has_losses = objectives is not None
        self._belief = Belief(space, prior)
        self._cube = UnitCube(space)
        self._memory = MemoryModel(space)
        self._trials: dict[int, _Trial] = {}
        self._live: dict[int, None] = {}  # in order of their start
        self._new: dict[int, None] = {}  # those of them that have no result yet
        self._num_results, self._next_fit = 0, _STARTUP
        self._lengths: tuple[float, ...] = ()
        self._rungs: list[RungResults] = []
        self.extended(rungs)

    def ask(self, trial: int) -> dict[str, object]:
        rng = self._rng(trial, "multi-fidelity")
        for row in self._believed(trial, rng) if self._is_random(trial) else self._proposals(rng):
            point = self._cube.point(row)
            if self.space.allows(point) and self._memory.probably_fits(point):
                return point
        return self._memory.sample(Random(f"{self.seed}:{trial}"))  # like RandomSampler

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        self._memory.tell(event, hparams)
        match event:
            case Started(trial=trial):
                self._live[trial] = None
                if trial not in self._trials:
                    self._trials[trial] = _Trial(row=self._cube.row(hparams))
                if self._trials[trial].rung < 0:
                    self._new[trial] = None
            case Reported(trial=trial, step=step):
                values = self._values(event)
                if values is not None and trial in self._trials:
                    self._trials[trial].last = values
                    self._put(trial, bisect_right(self._lengths, step) - 1, values)
            case Exited(trial=trial, reason=reason):
                self._live.pop(trial, None)
                self._new.pop(trial, None)
                if trial not in self._trials:
                    return
                known, top = self._trials[trial], len(self._lengths) - 1
                if reason in FAILURES:
                    self._put(trial, min(known.rung + 1, top), self._failed)
                elif reason == "completed" and known.last is not None:
                    self._put(trial, top, known.last)
            case _:
                assert_never(event)

    def extended(self, rungs: Sequence[float]) -> None:
        """Optimise the metrics at the new last rung, keeping the results at the other rungs."""
        known = dict(zip(self._lengths, self._rungs, strict=True))
        self._lengths = tuple(sorted(set(rungs))) or (math.inf,)
        self._rungs = [known.get(length, RungResults(_MAX_RESULTS)) for length in self._lengths]
        axes, count = self._cube.axes, len(self._lengths)
        self._parameters = [Parameters(axes, count)] * self._num_objectives
        self._parameters += [Parameters(axes, count, common_level=True)] * self._num_limits
        self._fits = [Fit(parameters) for parameters in self._parameters]
        self._steps_left = 0
        self._model: _Model | None = None
        if self._num_results >= _STARTUP:
            self._begin_fits()
            self._step_fits(_EXTENDED_FIT_STEPS)

    def _is_random(self, trial: int) -> bool:
        if not self._cube.width or self._num_results < _STARTUP:
            return True
        return trial % (_RANDOM_EVERY_EARLY if self._num_results <= _EARLY else _RANDOM_EVERY) == 0

    def _rng(self, trial: int, purpose: str) -> np.random.Generator:
        return np.random.default_rng(Random(f"{self.seed}:{trial}:{purpose}").getrandbits(64))

    def _values(self, report: Reported) -> Values | None:
        if not self._has_losses:
            return None if report.value is None else (report.value,)
        return self._failed if report.losses is None else report.losses.values + report.losses.excesses

    def _put(self, trial: int, rung: int, values: Values) -> None:
        """Record the trial's result at this rung, unless it has one here or at a higher rung."""
        if rung <= self._trials[trial].rung:
            return
        self._trials[trial].rung = rung
        self._new.pop(trial, None)
        if self._rungs[rung].put(trial, values):
            kept = self._live.keys() | set(itertools.chain.from_iterable(each.values for each in self._rungs))
            self._trials = {number: known for number, known in self._trials.items() if number in kept}
        self._num_results += 1
        self._model = None
        if self._num_results >= self._next_fit:
            self._next_fit = math.ceil(self._num_results * _GROWTH)
            self._begin_fits()
        else:
            # The steps are spread over the results until the next fit, so that no event has to wait for all of them.
            self._step_fits(min(self._steps_left, math.ceil(_FIT_STEPS / (self._num_results * (_GROWTH - 1)))))

    def _begin_fits(self) -> None:
        for fit, results in zip(self._fits, self._results(), strict=True):
            fit.begin(results)
        self._steps_left = _FIT_STEPS

    def _step_fits(self, steps: int) -> None:
        self._steps_left = max(self._steps_left - steps, 0)
        for fit in self._fits:
            for _ in range(steps):
                fit.step()

    def _results(self) -> list[Results]:
        """Select the model's data for each objective and each limit."""
        trials: list[int] = []
        rungs: list[int] = []
        objectives, limits = [np.empty((self._num_objectives, 0))], [np.empty((self._num_limits, 0))]
        selected = list(select(self._rungs, _MAX_RESULTS))
        if self._num_objectives == 1:
            firsts = [{trial: self._rungs[number].values[trial][0] for trial in chosen} for number, chosen in selected]
            together = normalised_together(firsts[::-1])[::-1]
        for place, (number, chosen) in enumerate(selected):
            trials += chosen
            rungs += [number] * len(chosen)
            values = np.array([self._rungs[number].values[trial] for trial in chosen]).T
            of_each = values[: self._num_objectives]
            objectives.append(
                np.stack([together[place]] if self._num_objectives == 1 else [standardised(each) for each in of_each])
            )
            limits.append(values[self._num_objectives :])
        columns = [*np.hstack(objectives), *map(relative, np.hstack(limits))]
        rows = self._rows(trials)
        return [
            Results(rows=rows, rungs=np.array(rungs, np.intp), trials=np.array(trials, np.intp), values=column)
            for column in columns
        ]

    def _rows(self, trials: Sequence[int]) -> Array:
        return np.reshape([self._trials[trial].row for trial in trials], (len(trials), self._cube.width))

    def _up_to_date(self) -> _Model:
        """Return the model of all results. It is computed again only after a new result."""
        if self._model is None:
            fits = zip(self._parameters, self._fits, self._results(), strict=True)
            processes = [RungProcess(parameters, fit.theta, results) for parameters, fit, results in fits]
            self._model = _Model(processes, self._num_objectives)
        return self._model

    def _proposals(self, rng: np.random.Generator) -> Array:
        """Return candidate rows, the most promising first."""
        new = itertools.islice(reversed(self._new), _MAX_NEW)
        latest = itertools.islice(reversed(self._live), _MAX_LIVE)
        live = self._rows(list(dict.fromkeys([*new, *latest])))
        model = self._up_to_date().expecting(live)
        known, expected = model.rows, model.expected
        if self._num_objectives > 1:  # what live trials add to the hypervolume need not be found again
            known, expected = np.vstack([known, live]), np.vstack([expected, model.at_the_end(live)[0]])
        gain = model.gain(expected, rng)
        weight = self._belief_weight()

        def gains_of(rows: Array) -> Array:
            gains = gain.log(*model.at_the_end(rows))
            return gains + weight * self._belief.log_density(rows) if self._belief else gains

        times = 1 if self._num_objectives == 1 else 3
        best = np.resize(known[gain.best], (times * _NUM_NEAR, self._cube.width))
        near = self._cube.near(rng, best, _SCALES[0])
        near = near[(np.abs(near - best) > 1e-9).any(axis=1)]  # without those that would be proposed again
        believed = self._belief.random(rng, _NUM_BELIEVED if self._belief else 0)
        candidates = np.vstack([self._cube.random(rng, times * _NUM_RANDOM), near, believed])
        gains = gains_of(candidates)
        for scale in _SCALES[1:]:
            best = candidates[np.argsort(-gains, kind="stable")[:_NUM_BEST]]
            near = self._cube.near(rng, np.repeat(best, times * _NUM_CLOSER, axis=0), scale)
            candidates = np.vstack([candidates, near])
            gains = np.concatenate([gains, gains_of(near)])
        return candidates[np.argsort(-gains, kind="stable")]

    def _believed(self, trial: int, rng: np.random.Generator) -> Array:
        """Return random rows from the belief, or none if the trial is to be drawn from the whole space."""
        if trial == 0 and self._belief:
            return self._belief.around(rng, _NUM_BELIEVED)
        is_believed = rng.random() < self._belief_weight()
        return self._belief.random(rng, _NUM_BELIEVED if is_believed else 0)

    def _belief_weight(self) -> float:
        return self._belief.weight(self._ranking(), self._num_results) if self._belief else 0.0

    def _ranking(self) -> Results:
        """Return the results of the objectives as one number: with several, of how many trials dominate the trial."""
        first, *others = self._results()[: self._num_objectives]
        if not others:
            return first
        values = np.stack([first.values, *(each.values for each in others)], axis=1)
        ranks = np.empty(len(values))
        for rung in np.unique(first.rungs):
            here = first.rungs == rung
            ranks[here] = num_dominating(values[here])
        return replace(first, values=ranks)


class _Model:
    """The processes of all objectives, followed by those of all limits.

    Attributes:
        rows: The trials that have results.
        expected: The means of `at_the_end` for new trials with the same hyperparameters, shape (n, metrics).
    """

    def __init__(self, processes: Sequence[RungProcess], num_objectives: int) -> None:
        self._processes, self._num_objectives = processes, num_objectives
        results = processes[0].results
        _, first = np.unique(results.trials, return_index=True)
        self.rows = results.rows[first]
        self.expected = np.stack([process.expected[first] for process in processes], axis=1)

    def expecting(self, live: Array) -> _Model:
        """Return this model under the assumption that live trials end as expected."""
        model = copy(self)
        model._processes = [process.expecting(live) for process in self._processes]
        return model

    def at_the_end(self, rows: Array) -> tuple[Array, Array]:
        """Predict all metrics of new trials: means and standard deviations, shape (n, metrics)."""
        return _columns([process.at_the_end(rows) for process in self._processes])

    def gain(self, known: Array, rng: np.random.Generator) -> Gain:
        """Return the gain over known trials with these predicted means."""
        directions = np.abs(rng.normal(size=(_NUM_DIRECTIONS, self._num_objectives)))
        return Gain(
            known,
            num_objectives=self._num_objectives,
            noise=np.array([process.noise for process in self._processes]),
            directions=directions / np.linalg.norm(directions, axis=1, keepdims=True),
        )


def _columns(predictions: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    mean, deviation = np.moveaxis(np.array(predictions), 1, 0)
    return mean.T, deviation.T
