"""Problems for multi-fidelity search from tables of learning curves: small real tasks that dray trained (curves/).

USE `KEPT` ONLY ONCE. Develop and tune on `TUNE_ON`, as often as you like. `KEPT` is held out for the final figures of a
finished method: if you look at it, change the method and look again, you have tuned on it, and no data is left to show
how the method does elsewhere.

`RecordedProblem(recording("digits_mlp"), seed)` has the interface of the problems in search_problems.py. A point of the
space gets the curve that a forest of extremely randomised trees predicts from all recorded ones, plus the deviation of
one training of its nearest recorded configuration from their mean; trials with the same nearest configuration get its
trainings in turn. The nearest curve alone would be too rough a problem: it explains held-out configurations much less
well than the forest (curves/describe.py), and around a good configuration a search could only find that configuration
again.

The measure is the logarithm of a point's smallest loss after any epoch, as predicted by the forest. It uses the
smallest loss because training overfits small data sets in the end, and a search is for the best checkpoint; and the
logarithm because a median cross entropy may be twenty times the best one, which would make all good points look the
same. Regret is normalised: 0 is the best of many points, 1 the median one. Time is in epochs: all points of a task cost
the same.

Sources: Eggensperger et al., "Efficient Benchmarking of Hyperparameter Optimizers via Surrogates" (2015), for problems
from recorded trainings; Geurts et al., "Extremely randomized trees" (2006).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from sklearn.ensemble import ExtraTreesRegressor

from searchers import Space, parse_space
from searchers.unit_cube import UnitCube

Array = npt.NDArray[np.float64]

CURVES = Path(__file__).resolve().parent / "curves"

TUNE_ON = ("digits_mlp", "diabetes_mlp", "code_origin", "docs_gru", "digits_vit")
"""Tasks for development."""
KEPT = ("digits_cnn", "cancer_mlp", "code_tags", "code_transformer", "pixels")
"""Held-out tasks, to be used once."""

DIVISOR = 3
"""The ratio of neighbouring rungs: 3, 9, 27 epochs, or 1, 3, 9, 27. Little is known after the first epoch."""

_NUM_TREES, _LEAST_IN_LEAF = 64, 2
_NUM_POINTS = 4000
"""Random points, which together with the recorded ones determine the best and the median."""
_LEAST_LOSS = 1e-6
_ORDINARY = 0.95
"""The quantile at which losses are clipped, also non-finite ones: one diverged loss would outweigh all others."""


class Recording:
    """The learning curves of a task.

    Args:
        task: Its name.
        space: The space of the configurations.
        configs: Points of the space.
        losses: After every epoch, > 0, of shape (configurations, trainings of each, epochs); NaN or inf after
            divergence.

    Attributes:
        best, median: Logarithms of the smallest losses of the best and of the median point.
        means: The trees' targets, of shape (configurations, epochs): means of the trainings' logarithms.
    """

    def __init__(self, task: str, space: Space, configs: Sequence[Mapping[str, Any]], losses: Array) -> None:
        self.task, self.space, self.configs, self.losses = task, space, configs, losses
        self._cube = UnitCube(space)
        self._rows = np.stack([self._cube.row(config) for config in configs])
        logs = np.log(np.maximum(losses, _LEAST_LOSS))
        most = np.quantile(logs[np.isfinite(logs)], _ORDINARY)
        logs = np.minimum(np.nan_to_num(logs, nan=most, posinf=most), most)
        self.means: Array = logs.mean(axis=1)
        apart = logs - self.means[:, None]
        # Where one training diverged and another did not, the difference would make other points' losses absurd.
        usual = 3 * np.sqrt(np.median(apart**2))
        self._apart = np.clip(apart, -usual, usual)
        forest = ExtraTreesRegressor(_NUM_TREES, min_samples_leaf=_LEAST_IN_LEAF, random_state=0)
        forest.fit(self._rows, self.means)
        points = np.vstack([self._rows, self._cube.random(np.random.default_rng(0), _NUM_POINTS)])
        smallest = forest.predict(points).min(axis=1)
        self.best, self.median = float(smallest.min()), float(np.median(smallest))
        # A row at a time: the forest's own `predict` takes ten times as long.
        self._trees = [tree.tree_ for tree in forest.estimators_]

    def nearest(self, config: Mapping[str, Any]) -> int:
        """The number of the recorded configuration that is nearest in the unit cube."""
        return int(((self._rows - self._cube.row(config)) ** 2).sum(axis=1).argmin())

    def expected(self, config: Mapping[str, Any]) -> Array:
        """The logarithms of a point's losses, of shape (epochs,)."""
        row = self._cube.row(config)[None].astype(np.float32)
        found: Array = np.mean([tree.predict(row).reshape(-1) for tree in self._trees], axis=0)
        return found

    def curve(self, config: Mapping[str, Any], training: int) -> Array:
        """A point's losses in a training, of shape (epochs,)."""
        curve: Array = np.exp(self.expected(config) + self._apart[self.nearest(config), training])
        return curve


@cache
def recording(task: str, tables: Path = CURVES) -> Recording:
    """The recording of a task, from its table in a directory.

    Raises:
        FileNotFoundError: There is none.
    """
    table = pq.read_table(tables / f"{task}.parquet")
    space = parse_space(json.loads(table.schema.metadata[b"space"]))
    seeds = np.array(table["seed"])
    losses = np.array(table["losses"].to_pylist(), dtype=float)
    configs = [json.loads(text) for text, seed in zip(table["hparams"].to_pylist(), seeds, strict=True) if seed == 0]
    return Recording(task, space, configs, losses.reshape(len(configs), seeds.max() + 1, -1))


class RecordedProblem:
    """A search on a recorded task.

    Args:
        recorded: The task's recording.
        seed: Decides which training of each configuration the trials begin with.
        num_rungs: How many rungs; the last one is a full training.
        useless: The report at the first rung is that of another, random configuration.

    Attributes:
        rungs: Epochs at which trials are compared, ascending.
    """

    def __init__(self, recorded: Recording, seed: int = 0, *, num_rungs: int = 3, useless: bool = False) -> None:
        epochs = recorded.losses.shape[2]
        if epochs < DIVISOR ** (num_rungs - 1):
            raise ValueError(f"curves of {epochs} epochs are too short for {num_rungs} rungs")
        self.recorded, self.seed, self.useless = recorded, seed, useless
        self.rungs = tuple(epochs // DIVISOR**rung for rung in reversed(range(num_rungs)))
        self.space = recorded.space
        self._trials: Counter[int] = Counter()  # by the nearest configuration

    def curve(self, config: Mapping[str, Any]) -> Callable[[float], float]:
        """The loss after t epochs of a new trial."""
        nearest = self.recorded.nearest(config)
        training = (self.seed + self._trials[nearest]) % self.recorded.losses.shape[1]
        self._trials[nearest] += 1
        losses = self.recorded.curve(config, training)
        if self.useless:
            first = self.rungs[0] - 1
            other = Random(f"{self.seed}:{sorted(config.items())}").randrange(len(self.recorded.means))
            losses[first] = math.exp(self.recorded.means[other, first])
        return lambda t: float(losses[int(t) - 1])

    def cost(self, config: Mapping[str, Any]) -> float:
        """Time of an epoch, in epochs."""
        return 1.0

    def regret(self, config: Mapping[str, Any]) -> float:
        """The regret of a configuration's best checkpoint, once it is trained to the end."""
        recorded = self.recorded
        smallest = float(recorded.expected(config).min())
        return (smallest - recorded.best) / (recorded.median - recorded.best)
