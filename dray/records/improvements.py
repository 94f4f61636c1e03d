"""Validations that are the best of their trial so far: the journal has them, so that an overview needs no metrics."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dray.config.searcher import Searcher
from searchers.objectives import Losses, is_better


class Improvements:
    """The best validation of each trial since this driver started.

    Args:
        searcher: what trials are compared by.
    """

    def __init__(self, searcher: Searcher) -> None:
        self._searcher = searcher
        self._best: dict[int, float] = {}
        self._losses: dict[int, Losses] = {}

    def among(self, trial: int, rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """The records of improvements among rows that a trial has reported.

        After a restart of the driver each trial's first validation counts as one again; an overview takes the best.
        """
        validations: dict[int, dict[str, float]] = defaultdict(dict)
        for row in rows:
            if row["kind"] == "validation":
                validations[row["batches"]][row["name"]] = row["value"]
        for metrics in validations.values():
            if (objectives := self._searcher.objectives) is not None:
                measured = objectives.measured(metrics)
                losses = objectives.normalised(measured)
                if losses is not None and (trial not in self._losses or is_better(losses, self._losses[trial])):
                    self._losses[trial] = losses
                    yield {"event": "validated", "trial": trial, "metrics": list(measured)}
                continue
            value = metrics.get(self._searcher.first_metric, math.nan)
            loss = self._searcher.sign * value
            if math.isfinite(loss) and loss < self._best.get(trial, math.inf):
                self._best[trial] = loss
                yield {"event": "validated", "trial": trial, "value": value}
