"""The metrics of a run at Ray's endpoint for Prometheus; `clusters/grafana-dray.json` is a dashboard of them.

Ray prefixes each name with ``ray_``, adds labels such as ``NodeAddress``, and passes values on to the endpoint of the
driver's node every ten seconds. Counters begin at the driver's start, as Prometheus expects.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from ray.util import metrics

from dray.display.counts import Counts
from searchers.views import State

log = logging.getLogger(__name__)

EVERY_S = 5.0  # seconds between updates: half the period in which Ray passes them on
CHECKPOINT_S = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0]  # bounds of the histogram's buckets


@dataclass(frozen=True, slots=True)
class ExportedMetric:
    """A metric for Prometheus. `labels`: labels other than ``experiment``, the name of the experiment's directory."""

    kind: type[metrics.Metric]
    description: str
    labels: tuple[str, ...] = ()


METRICS = {
    "dray_trials": ExportedMetric(metrics.Gauge, "Trials, by state", ("state",)),
    "dray_slots_busy": ExportedMetric(metrics.Gauge, "Slots on which trials run"),
    "dray_decisions_total": ExportedMetric(metrics.Counter, "Decisions of the search, by kind", ("decision",)),
    "dray_restarts_total": ExportedMetric(metrics.Counter, "Restarts of trials after failures"),
    "dray_reports_total": ExportedMetric(metrics.Counter, "Reports of trials that reached the driver"),
    "dray_checkpoint_seconds": ExportedMetric(metrics.Histogram, "Time to write and commit a checkpoint"),
}
"""The metrics by name, without Ray's prefix."""


class Prometheus:
    """Exports a run's counters, labelled with its name. If that fails, the log says so once, and the run continues
    without the metrics."""

    def __init__(
        self, experiment: str, *, counts: Counts, states: Callable[[], Counter[State]], busy_slots: Callable[[], float]
    ) -> None:
        self._experiment, self._counts, self._states, self._busy_slots = experiment, counts, states, busy_slots
        self._sent: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._sent["dray_restarts_total", ""] = counts.restarts.total()  # those of earlier runs
        self._checkpoint_s: list[float] = []
        self._metrics: dict[str, metrics.Metric] = {}
        self._due, self._failed = 0.0, False

    def saved(self, seconds: float) -> None:
        """Note the time that a trial took to save a checkpoint."""
        self._checkpoint_s.append(seconds)

    def update(self, *, at_once: bool = False) -> None:
        """Export new values; cheap if they are not due yet."""
        if self._failed or (time.monotonic() < self._due and not at_once):
            return
        self._due = time.monotonic() + EVERY_S
        try:
            self._metrics = self._metrics or {name: _made(name, metric) for name, metric in METRICS.items()}
            self._export()
        except Exception as error:  # a search is worth more than its metrics
            log.warning("the metrics of %s are no longer exported: %r", self._experiment, error)
            self._failed = True

    def _export(self) -> None:
        states = self._states()
        for state in get_args(State):
            self._metrics["dray_trials"].set(states[state], self._labels(state=state))
        self._metrics["dray_slots_busy"].set(self._busy_slots(), self._labels())
        for decision, count in self._counts.decisions.copy().items():
            self._count("dray_decisions_total", count, decision=decision)
        self._count("dray_restarts_total", self._counts.restarts.total())
        self._count("dray_reports_total", self._counts.reports)
        seconds, self._checkpoint_s = self._checkpoint_s, []
        for each in seconds:
            self._metrics["dray_checkpoint_seconds"].observe(each, self._labels())

    def _count(self, name: str, count: int, **labels: str) -> None:
        """Increase a counter to `count`."""
        key = name, "".join(labels.values())
        if count > self._sent[key]:  # Ray refuses to add 0
            self._metrics[name].inc(count - self._sent[key], self._labels(**labels))
            self._sent[key] = count

    def _labels(self, **labels: str) -> dict[str, str]:
        return {"experiment": self._experiment, **labels}


def _made(name: str, metric: ExportedMetric) -> metrics.Metric:
    bounds = {"boundaries": CHECKPOINT_S} if metric.kind is metrics.Histogram else {}
    return metric.kind(name, metric.description, tag_keys=("experiment", *metric.labels), **bounds)
