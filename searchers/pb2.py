"""Population-based bandits (PB2): explores a population's hyperparameters by a model, instead of at random.

The source is Parker-Holder et al., "Provably Efficient Online Hyperparameter Optimization with Population-Based
Bandits" (arXiv 2002.02518). A Gaussian process predicts how the metric changes while a trial trains, from its
hyperparameters, and from the length and the metric from which it continues. A new trial gets the numbers with the best
upper confidence bound, given the length and the metric of the checkpoint that it begins from.

* The changes are normalised among those that begin at the same length, as they become smaller while a loss converges.
* Trials that have begun and not yet reported reduce the deviations near them, so that concurrent trials differ.
* A trial that fails or diverges counts as one of the worst.
* Points that probably don't fit in memory are passed over (see `memory_model`).
* Categories, and numbers until enough changes are known, are those of `Explorer`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt

from searchers.events import FAILURES, Event, Exited, Reported, Source, Started, assert_never
from searchers.memory_model import MemoryModel
from searchers.pbt import Explorer
from searchers.rung_process import Array, Parameters, Results, RungProcess, fit_parameters
from searchers.rung_results import normalised
from searchers.space import Space
from searchers.unit_cube import UnitCube

_STARTUP, _MAX_CHANGES, _MAX_LIVE = 8, 160, 64
"""Numbers of changes: before the first proposal, and at most in the model, which forgets the oldest; and the maximum
number of trials in the model that have not reported."""

_FIT_STEPS = 25

_EXPLORATION = 1.5  # standard deviations by which the confidence bound is better than the mean

_NUM_RANDOM, _NUM_BEST = 400, 10
_SCALES = (0.2, 0.07, 0.03, 0.012)
"""The candidates are random points, then ever closer neighbours of the best candidates."""


@dataclass(frozen=True, slots=True)
class _Change:
    """A change of the metric per unit of length, of a trial that trained from this length and metric."""

    row: Array  # hyperparameters in the unit cube
    step: float
    value: float
    change: float


class PB2:
    """Derives hyperparameters of a population by a Gaussian process over changes of the metric.

    Args:
        space: The space.
        seed: Any integer.
    """

    def __init__(self, space: Space, *, seed: int) -> None:
        self.space, self.seed = space, seed
        self._explorer, self._cube, self._memory = Explorer(space, seed), UnitCube(space), MemoryModel(space)
        count = int(self._cube.axes.max()) + 1 if self._cube.width else 0
        self._parameters = Parameters(np.append(self._cube.axes, [count, count + 1]), 1)
        self._at: dict[int, tuple[float, float]] = {}  # length and metric from which each trial trains on
        self._proposed: dict[int, Array | None] = {}  # hyperparameters of forks that have not reported, once started
        self._changes: deque[_Change] = deque(maxlen=_MAX_CHANGES)
        self._fitted: Array | None = None  # the process's parameters, if they are up to date

    def ask(self, trial: int) -> dict[str, object]:
        return self._explorer.ask(trial)

    def forked(self, trial: int, source: Source) -> None:
        """Remember where the trial begins. Only the metric at its source's latest report is known."""
        step, value = self._at.get(source.trial, (0.0, math.nan))
        self._at[trial] = source.step, value if step == source.step else math.nan
        if math.isfinite(self._at[trial][1]):
            self._proposed[trial] = None

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        self._memory.tell(event, hparams)
        match event:
            case Started(trial=trial):
                if trial in self._proposed:
                    self._proposed[trial] = self._cube.row(hparams)
            case Reported(trial=trial, step=step, value=value):
                if value is not None:
                    self._put(trial, step, value, hparams)
                    self._at[trial] = step, value
            case Exited(trial=trial, reason=reason):
                if hparams and reason in FAILURES:
                    self._put(trial, math.inf, math.inf, hparams)
                self._proposed.pop(trial, None)
            case _:
                assert_never(event)

    def _put(self, trial: int, step: float, value: float, hparams: Mapping[str, object]) -> None:
        self._proposed.pop(trial, None)
        begin, before = self._at.get(trial, (0.0, math.inf))
        # All untrained models are alike, so that normalised changes do not depend on the metric before.
        if step > begin and (begin == 0 or math.isfinite(before)):
            change = (value - (before if begin else 0)) / (step - begin) if math.isfinite(value) else math.inf
            self._changes.append(_Change(self._cube.row(hparams), begin, before, change))
            self._fitted = None

    def explore(self, trial: int, hparams: Mapping[str, object]) -> dict[str, object]:
        """Derive hyperparameters for a trial that begins from a checkpoint of a trial with `hparams`."""
        explored = self._explorer.explore(trial, hparams)
        numbers = self._cube.numbers(explored)
        if len(self._changes) >= _STARTUP and trial in self._proposed and numbers.any():
            for row in self._proposals(trial, self._cube.row(explored), numbers):
                point = self._cube.point(row)
                if self.space.allows(point) and self._memory.probably_fits(point):
                    return point
        return explored

    def _proposals(self, trial: int, row: Array, numbers: npt.NDArray[np.bool_]) -> Array:
        """Return rows that differ from this one in their numbers, the most promising first."""
        rng = np.random.default_rng(Random(f"{self.seed}:{trial}:pb2").getrandbits(64))
        process = self._process()
        place = self._places([self._at[trial]])

        def bounds(rows: Array) -> Array:
            mean, deviation = process.at_the_end(np.hstack([rows, np.repeat(place, len(rows), axis=0)]))
            bound: Array = mean - _EXPLORATION * deviation
            return bound

        candidates = np.where(numbers, self._cube.random(rng, _NUM_RANDOM), row)
        for scale in _SCALES:
            best = candidates[np.argsort(bounds(candidates), kind="stable")[:_NUM_BEST]]
            near = self._cube.near(rng, np.repeat(best, _NUM_BEST, axis=0), scale)
            candidates = np.vstack([candidates, np.where(numbers, near, row)])
        return candidates[np.argsort(bounds(candidates), kind="stable")]

    def _process(self) -> RungProcess:
        rows, values = np.array([each.row for each in self._changes]), np.empty(len(self._changes))
        changes = np.array([each.change for each in self._changes])
        steps = np.array([each.step for each in self._changes])
        for step in np.unique(steps):
            values[steps == step] = normalised(changes[steps == step])
        results = Results(
            rows=np.hstack([rows, self._places([(each.step, each.value) for each in self._changes])]),
            rungs=np.zeros(len(rows), np.intp),
            trials=np.arange(len(rows)),
            values=values,
        )
        if self._fitted is None:
            self._fitted = fit_parameters(self._parameters, results, steps=_FIT_STEPS)
        started = [(row, self._at[trial]) for trial, row in self._proposed.items() if row is not None][-_MAX_LIVE:]
        live = np.reshape([row for row, _ in started], (len(started), self._cube.width))
        places = self._places([at for _, at in started])
        return RungProcess(self._parameters, self._fitted, results).expecting(np.hstack([live, places]))

    def _places(self, at: Sequence[tuple[float, float]]) -> Array:
        """Scale lengths by those in the model, and replace metrics by their ranks; shape (len(at), 2)."""
        steps, values = np.reshape(at, (len(at), 2)).T
        known = [each.step for each in self._changes]
        first, last = min(known), max(known)
        ranks = np.searchsorted(np.sort([each.value for each in self._changes]), values) / len(known)
        return np.stack([(steps - first) / (last - first or 1), ranks], axis=1)
