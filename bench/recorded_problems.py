"""Problems for multi-fidelity search from recorded learning curves: small real tasks, trained by dray (curves/).

KEPT IS LOOKED AT ONCE. Develop and tune on `TUNE_ON`, as often as you like. `KEPT` is for the final figures of a method
that is finished: whoever looks at it, changes the method and looks again has tuned on it, and nothing is left to tell
whether the method is any good elsewhere.

`RecordedProblem(recording("digits_mlp"), seed)` has what the problems of search_problems.py have. A recorded
configuration gets its own curve; of several trials each gets the next of its trainings, in turn. Any other point gets
the curve of the nearest recorded configuration, moved by the difference that a forest of extremely randomised trees
sees between the two. The nearest curve alone would be too rough a problem (it explains -4% to 53% of the variance of
configurations that are left out, the forest 65% to 96%: curves/describe.py), and all that a search could find around a
good configuration would be that configuration again. The trees pass through every recorded curve and average between
them, so no point is better than the best recorded one.

What is measured is the logarithm of a configuration's final loss, the mean of its trainings: a median cross entropy may
be twenty times the best one, and all good configurations would look the same beside it. Regret is normalised: 0 is the
best recorded configuration, 1 the median one. Time is in epochs: all configurations of a task cost the same.

Sources: Eggensperger et al., "Efficient Benchmarking of Hyperparameter Optimizers via Surrogates" (2015), for problems
from recorded trainings; Geurts et al., "Extremely randomized trees" (2006).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
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
"""Tasks to develop on."""
KEPT = ("digits_cnn", "cancer_mlp", "code_tags", "code_transformer", "pixels")
"""Tasks that are looked at once."""

THREE_RUNGS, FOUR_RUNGS = (3, 9, 27), (1, 3, 9, 27)
"""Epochs. After the first one, little is known."""

WORST = 2.0
"""No regret is larger: losses just before divergence have no bound."""

_NUM_TREES = 64
_ORDINARY = 0.95
"""Of all losses. The trees take larger ones to be as large as that, or one would outweigh all others."""


class Recording:
    """The learning curves of a task.

    Args:
        space: Of the configurations.
        configs: Points of the space.
        losses: After every epoch, > 0, of shape (configurations, trainings of each, epochs); NaN or inf after
            divergence.

    Attributes:
        best, median: Logarithms of final losses: the best configuration's, and the median one's.
        targets: What the trees pass through, of shape (configurations, epochs): logarithms of the losses' means.
    """

    def __init__(self, space: Space, configs: Sequence[Mapping[str, Any]], losses: Array) -> None:
        self.space, self.configs, self.losses = space, configs, losses
        self._cube = UnitCube(space)
        self._rows = np.stack([self._cube.row(config) for config in configs])
        means = np.log(losses.mean(axis=1))
        means[~np.isfinite(means)] = np.inf
        self.best, self.median = float(means[:, -1].min()), float(np.median(means[:, -1]))
        self.targets = np.minimum(means, np.quantile(means[means < np.inf], _ORDINARY))
        forest = ExtraTreesRegressor(_NUM_TREES, random_state=0).fit(self._rows, self.targets)
        # A row at a time: the forest's own `predict` takes ten times as long.
        self._trees = [tree.tree_ for tree in forest.estimators_]

    def nearest(self, config: Mapping[str, Any]) -> int:
        """The number of the recorded configuration that is nearest in the unit cube."""
        return int(((self._rows - self._cube.row(config)) ** 2).sum(axis=1).argmin())

    def expected(self, config: Mapping[str, Any]) -> Array:
        """The logarithms of a point's losses, as the trees see it, of shape (epochs,)."""
        row = self._cube.row(config)[None].astype(np.float32)
        found: Array = np.mean([tree.predict(row).reshape(-1) for tree in self._trees], axis=0)
        return found

    def curve(self, config: Mapping[str, Any], training: int) -> Array:
        """The losses of a point: of the nearest configuration's training, moved to the point."""
        nearest = self.nearest(config)
        curve: Array = self.losses[nearest, training] * np.exp(self.expected(config) - self.targets[nearest])
        return curve


@cache
def recording(task: str) -> Recording:
    """The recording of a task, from its table.

    Raises:
        FileNotFoundError: There is none.
    """
    table = pq.read_table(CURVES / f"{task}.parquet")
    space = parse_space(json.loads(table.schema.metadata[b"space"]))
    seeds = np.array(table["seed"])
    losses = np.array(table["losses"].to_pylist(), dtype=float)
    configs = [json.loads(text) for text, seed in zip(table["hparams"].to_pylist(), seeds, strict=True) if seed == 0]
    return Recording(space, configs, losses.reshape(len(configs), seeds.max() + 1, -1))


class RecordedProblem:
    """A search on a recorded task.

    Args:
        recorded: The task's recording.
        seed: Of the search; it decides with which training of a configuration the trials begin.
        rungs: Epochs at which trials are compared, ascending; the last one is a full training.
    """

    def __init__(self, recorded: Recording, seed: int = 0, *, rungs: Sequence[int] = THREE_RUNGS) -> None:
        self.recorded, self.seed, self.rungs = recorded, seed, tuple(rungs)
        self.space = recorded.space
        self._trials: Counter[int] = Counter()  # by the nearest configuration

    def curve(self, config: Mapping[str, Any]) -> Callable[[float], float]:
        """The loss after t epochs of a new trial."""
        nearest = self.recorded.nearest(config)
        training = (self.seed + self._trials[nearest]) % self.recorded.losses.shape[1]
        self._trials[nearest] += 1
        losses = self.recorded.curve(config, training)
        return lambda t: float(losses[int(t) - 1])

    def cost(self, config: Mapping[str, Any]) -> float:
        """Time of an epoch, in epochs."""
        return 1.0

    def regret(self, config: Mapping[str, Any]) -> float:
        """The regret of a configuration, trained to the end; at most `WORST`."""
        recorded = self.recorded
        # As the trees see it: that a training of its neighbour diverged does not make a good point a bad one.
        final = float(recorded.expected(config)[-1])
        return min((final - recorded.best) / (recorded.median - recorded.best), WORST)
