"""Problems for multi-fidelity search from recorded learning curves: small real tasks, trained by dray (curves/).

KEPT IS LOOKED AT ONCE. Develop and tune on `TUNE_ON`, as often as you like. `KEPT` is for the final figures of a method
that is finished: whoever looks at it, changes the method and looks again has tuned on it, and nothing is left to tell
whether the method is any good elsewhere.

`RecordedProblem(recording("digits_mlp"), seed)` has what the problems of search_problems.py have. A point of the space
gets the curve of the nearest recorded configuration, in the Euclidean distance of `searchers.unit_cube`; of several
trials at one configuration each gets the next of its trainings, in turn. Time is in epochs: all configurations of a
task cost the same.

What is measured is the logarithm of a configuration's final loss, the mean of its trainings: a median cross entropy may
be twenty times the best one, and all good configurations would look the same beside it. Regret is normalised: 0 is the
best recorded configuration, 1 the median one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

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
"""No regret is larger: the loss of a configuration that diverges has no bound."""


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """The learning curves of a task.

    Args:
        space: of the configurations.
        configs: points of the space.
        losses: after every epoch, of shape (configurations, trainings of each, epochs); NaN or inf after divergence.
    """

    space: Space
    configs: Sequence[Mapping[str, Any]]
    losses: Array


@cache
def recording(task: str) -> Recording:
    """The recording of a task, from its table.

    Raises:
        FileNotFoundError: There is none.
    """
    table = pq.read_table(CURVES / f"{task}.parquet")
    space = parse_space(json.loads(table.schema.metadata[b"space"]))
    seeds = np.array(table["seed"])
    order = np.lexsort((seeds, np.cumsum(seeds == 0)))
    losses = np.array(table["losses"].to_pylist(), dtype=float)[order]
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
        self._cube = UnitCube(recorded.space)
        self._rows = np.stack([self._cube.row(config) for config in recorded.configs])
        self._trials: Counter[int] = Counter()  # of each configuration
        finals = np.log(recorded.losses[:, :, self.rungs[-1] - 1].mean(axis=1))
        self._finals = np.where(np.isfinite(finals), finals, np.inf)
        self.best, self.median = float(self._finals.min()), float(np.median(self._finals))

    def nearest(self, config: Mapping[str, Any]) -> int:
        """The number of the recorded configuration that is nearest to this point."""
        return int(((self._rows - self._cube.row(config)) ** 2).sum(axis=1).argmin())

    def curve(self, config: Mapping[str, Any]) -> Callable[[float], float]:
        """The loss after t epochs of a new trial."""
        number = self.nearest(config)
        trainings = self.recorded.losses[number]
        losses = trainings[(self.seed + self._trials[number]) % len(trainings)]
        self._trials[number] += 1
        return lambda t: float(losses[int(t) - 1])

    def cost(self, config: Mapping[str, Any]) -> float:
        """Time of an epoch, in epochs."""
        return 1.0

    def regret(self, config: Mapping[str, Any]) -> float:
        """The regret of a configuration, trained to the end; at most `WORST`."""
        regret = (self._finals[self.nearest(config)] - self.best) / (self.median - self.best)
        return float(min(regret, WORST))
