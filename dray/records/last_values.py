"""The last value of every metric of every trial, for tables with a metric as a column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Metric = tuple[str, str]  # kind and name


class LastValues:
    """Filled by `ExperimentReader`; a trial that trained some batches again has the value of the most batches."""

    def __init__(self) -> None:
        self._loaded: dict[Metric, tuple[Any, Any, Any]] = {}  # arrays: trials, batches, values
        self._last: dict[Metric, tuple[dict[int, int], dict[int, float]]] = {}  # batches and values by trial

    def load(self, every: Sequence[Metric], series: Any, trials: Any, batches: Any, values: Any) -> None:
        """Take the values from arrays of all rows, in place of those known before; ``series`` are indices in
        ``every``."""
        import numpy as np

        key = trials * len(every) + series
        final = np.zeros(1 + key.max(initial=-1), np.int64)
        np.maximum.at(final, key, batches)
        ends = np.flatnonzero(batches == final[key])
        self._last, self._loaded = {}, {}
        for code, metric in enumerate(every):
            mine = ends[series[ends] == code]
            self._loaded[metric] = trials[mine], batches[mine], values[mine]

    def report(self, metric: Metric, trial: int, batches: int, value: float) -> None:
        at, last = self._of(metric)
        if batches >= at.get(trial, 0):
            at[trial], last[trial] = batches, value

    def of(self, metric: Metric) -> Mapping[int, float]:
        """The last value of a metric, which may be NaN, by trial."""
        return self._of(metric)[1]

    def _of(self, metric: Metric) -> tuple[dict[int, int], dict[int, float]]:
        if metric in self._loaded:  # Python objects are made of a metric when it is first asked for
            trials, batches, values = (column.tolist() for column in self._loaded.pop(metric))
            self._last[metric] = dict(zip(trials, batches, strict=True)), dict(zip(trials, values, strict=True))
        return self._last.setdefault(metric, ({}, {}))
