"""First points of a search, from what earlier searches over similar spaces found.

Each earlier search gets a model of its own (see `rung_process`) in the unit cube of the new space. The points are a
portfolio: each is good for those earlier searches for which none before it is, so that one of the first
trials is good if the new task resembles any of them. What is learned ends there; the search's own sampler goes on from
the results of these points.

Sources: Wistuba et al., "Learning Hyperparameter Optimization Initializations" (DSAA 2015), for the portfolio; Feurer
et al., "Auto-Sklearn 2.0" (arXiv 2007.04074), for building it greedily.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from searchers.domains import Categorical, numbers_of
from searchers.events import FAILURES, Exited, Losses, Reported
from searchers.objectives import loss_of
from searchers.pareto import pareto_order
from searchers.rung_process import Array, Parameters, Results, RungProcess, fit_parameters
from searchers.rung_results import RungResults, normalised, select
from searchers.space import Space
from searchers.unit_cube import MIDDLE, UnitCube, beyond

LEAST = 8
"""The fewest finite results of an earlier search that are worth a model."""
MOST_POINTS = 10
_MAX_RESULTS, _FIT_STEPS = 160, 25
_NUM_BEST, _NUM_RANDOM, _NUM_SCALE = 10, 256, 512
"""The candidates: the best of each earlier search, and random ones; and the random points that give its scale."""
_GAIN = 0.01
_NOT_TRIED = 1.5
"""The regret of a search that has no point yet; 1 is that of the median point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """An earlier search.

    Attributes:
        rungs: `Method.rungs`.
        hparams: The hyperparameters of its trials.
        events: Their reports, normalised (smaller is better), and their ends.
    """

    rungs: Sequence[float]
    hparams: Mapping[int, Mapping[str, object]]
    events: Sequence[Reported | Exited]


def first_points(
    space: Space, earlier: Sequence[Earlier], *, seed: int, points: Sequence[Mapping[str, object]] = ()
) -> list[dict[str, object]]:
    """Return points for the first trials, the most useful one first; [] if nothing was learned.

    Args:
        space: The new space. It need not be that of the earlier searches: numbers outside of it are clipped, and
            hyperparameters that an earlier search did not have are drawn at random.
        earlier: The earlier searches; those with fewer than `LEAST` results are left out.
        seed: Any integer.
        points: Points that will be tried before those, which they only complement: at most `MOST_POINTS` in all.
    """
    cube = UnitCube(space)
    models = [Model(cube, each) for each in earlier if num_results(each) >= LEAST]
    models = [model for model in models if model.known.any()]
    if not models:
        return []
    rng = np.random.default_rng(Random(f"{seed}:like").getrandbits(64))
    at_random = cube.random(rng, _NUM_SCALE)
    proposed = [np.where(np.isnan(model.best), cube.random(rng, len(model.best)), model.best) for model in models]
    rows = cube.without_absent(np.clip(np.vstack([*proposed, at_random[:_NUM_RANDOM]]), 0.0, 1.0))
    # As they will be tried: rounded.
    found = [dict(point) for point in points]
    found += [point for point in map(cube.point, rows) if space.allows(point)]
    if not found:  # the constraint allows hardly anything
        return []
    candidates = np.reshape([cube.row(point) for point in found], (len(found), cube.width))
    regrets = np.array([model.regrets(candidates, at_random) for model in models])
    least = np.full(len(models), _NOT_TRIED)
    for regret in regrets.T[: len(points)]:
        least = np.minimum(least, regret)
    chosen: list[int] = []
    while len(points) + len(chosen) < MOST_POINTS:
        means = np.minimum(least[:, None], regrets).mean(axis=0)
        best = int(np.argmin(means))
        if means[best] > least.mean() - _GAIN:
            break
        chosen.append(best)
        least = np.minimum(least, regrets[:, best])
    return [found[each] for each in chosen]


def num_results(earlier: Earlier) -> int:
    return sum(math.isfinite(value) for rung in _rungs(earlier) for (value,) in rung.values.values())


class Model:
    """What an earlier search predicts of points of the new space.

    Attributes:
        known: The columns of hyperparameters that it had, shape (width,).
        best: The hyperparameters of the trials with the best predictions, not clipped to the space; NaN where a trial
            had none, or a category that the space has not.
    """

    def __init__(self, cube: UnitCube, earlier: Earlier) -> None:
        rungs = _rungs(earlier)
        rows = {trial: _row(cube, hparams) for trial, hparams in earlier.hparams.items()}
        selected = list(select(rungs, _MAX_RESULTS))
        trials = [trial for _, chosen in selected for trial in chosen]
        values = [[rungs[number].values[trial][0] for trial in chosen] for number, chosen in selected]
        unfilled = np.array([rows[trial] for trial in trials])
        self.known = ~np.isnan(unfilled).all(axis=0)
        results = Results(
            rows=np.nan_to_num(unfilled, nan=MIDDLE),
            rungs=np.repeat([number for number, _ in selected], list(map(len, values))),
            trials=np.array(trials, np.intp),
            values=np.concatenate([normalised(np.array(each)) for each in values]),
        )
        parameters = Parameters(cube.axes, len(rungs))
        theta = fit_parameters(parameters, results, steps=_FIT_STEPS)
        self._process = RungProcess(parameters, theta, results)
        order = np.argsort(self._process.expected, kind="stable").tolist()
        self.best = np.array([rows[trial] for trial in list(dict.fromkeys(trials[i] for i in order))[:_NUM_BEST]])

    def regrets(self, rows: Array, at_random: Array) -> Array:
        regrets: Array = np.clip(self.predictions(rows, at_random)[0], 0.0, _NOT_TRIED)
        return regrets

    def predictions(self, rows: Array, at_random: Array) -> tuple[Array, Array]:
        """Return means and standard deviations for these rows: 0 is the best mean of all, 1 the median of the random
        ones'."""
        means, deviations = self._at_the_end(rows)
        scale = self._at_the_end(at_random)[0]
        low, middle = min(means.min(), scale.min()), float(np.median(scale))
        size = max(middle - low, 1e-9)
        return (means - low) / size, deviations / size

    def _at_the_end(self, rows: Array) -> tuple[Array, Array]:
        return self._process.at_the_end(np.where(self.known, rows, MIDDLE))


def _rungs(earlier: Earlier) -> list[RungResults]:
    """Return the results of the search, by rung: a trial has one at each rung that one of its reports was the first to
    reach, and a failed trial has a last one. A rung has none if all are failures."""
    lengths = sorted(set(earlier.rungs)) or [math.inf]
    top, losses = len(lengths) - 1, [dict[int, float | Losses]() for _ in lengths]
    reached: dict[int, int] = {}
    last: dict[int, float | Losses] = {}

    def put(trial: int, rung: int, loss: float | Losses) -> None:
        if rung > reached.get(trial, -1):
            reached[trial], losses[rung][trial] = rung, loss

    for event in earlier.events:
        if (trial := event.trial) not in earlier.hparams:
            continue
        if isinstance(event, Reported):
            last[trial] = loss_of(event.value) if event.losses is None else event.losses
            put(trial, bisect_right(lengths, event.step) - 1, last[trial])
        elif event.reason in FAILURES:
            put(trial, min(reached.get(trial, -1) + 1, top), math.inf)
        elif event.reason == "completed" and trial in last:
            put(trial, top, last[trial])
    rungs = [RungResults(_MAX_RESULTS) for _ in lengths]
    for rung, found in zip(rungs, losses, strict=True):
        values = _as_numbers(found)
        # If all trials of a rung failed, their neighbours, the best of the rung below, would be avoided.
        for trial, value in values.items() if any(map(math.isfinite, values.values())) else ():
            rung.put(trial, (value,))
    return rungs


def _as_numbers(losses: Mapping[int, float | Losses]) -> Mapping[int, float]:
    """Replace losses on several metrics by the number of their Pareto front; violated constraints come behind
    all fronts."""
    several = {trial: loss for trial, loss in losses.items() if isinstance(loss, Losses)}
    order = pareto_order(several)
    fronts = {trial: float(order.front_of(trial) or len(several) + place) for place, trial in enumerate(order)}
    return {trial: fronts[trial] if isinstance(loss, Losses) else loss for trial, loss in losses.items()}


def _row(cube: UnitCube, hparams: Mapping[str, object]) -> Array:
    """Encode hyperparameters of an earlier trial: numbers up to one range beyond their ends, and NaN for what the trial
    does not have in common with the space."""
    row = np.full(cube.width, np.nan)
    for name, value in numbers_of(cube.space.root, hparams):
        axis = cube.by_name[name]
        if isinstance(axis.domain, Categorical):
            row[axis.columns] = np.arange(len(axis.domain.vals)) == value
        else:
            row[axis.columns] = min(max(beyond(axis.domain, value), -1.0), 2.0)
    return row
