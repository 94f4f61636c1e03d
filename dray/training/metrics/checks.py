"""Checks of a trial's reports: the metrics that the search compares, the trial's length, losses that are NaN."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from dray.training.errors import SearcherMetricError
from dray.training.host import Reached, Report

log = logging.getLogger(__name__)


FROM_TRIAL = "validation returned", "return it from evaluate_batch() or evaluate_full_dataset()"
FROM_PROGRAM = "the program reported", "report it with core_context.train.report_validation_metrics()"


def check_metrics(
    metrics: Sequence[str],
    validation: Mapping[str, object],
    source: tuple[str, str] = FROM_TRIAL,
    *,
    known: bool = False,
) -> None:
    """Check that a validation has the searcher's metrics.

    Args:
        source: words of the error: the validation's source, and how to add a metric there.
        known: the search has received the metrics from this trial before, so that they may be missing.

    Raises:
        SearcherMetricError: a metric is not a number, or is missing.
    """
    provided, how = source
    field = "searcher.metrics" if len(metrics) > 1 else "searcher.metric"
    for metric in metrics:
        if metric in validation and not isinstance(validation[metric], (int, float)):
            raise SearcherMetricError(
                f"{field}: {metric!r} must be a number, but {provided} {validation[metric]!r:.80}"
            )
        if metric not in validation and not known:
            raise SearcherMetricError(
                f"{field}: the search compares {metric!r}, but {provided} "
                f"{sorted(validation) or 'no validation metrics'}; {how}, or set {field} to one of these"
                f"{_hint(metric, validation)}"
            )


def _hint(metric: str, validation: Mapping[str, object]) -> str:
    from searchers.errors import did_you_mean  # imported here, because workers should import little

    return did_you_mean(metric, validation.keys())


class OtherMetrics:
    """Warns once of each metric that is text or a vector: only numbers are recorded in an experiment."""

    def __init__(self) -> None:
        self._warned: set[tuple[str, str]] = set()

    def warn(self, metrics: Mapping[str, object], source: str) -> None:
        for name, value in metrics.items():
            if not isinstance(value, (int, float)) and (source, name) not in self._warned:
                self._warned.add((source, name))
                log.warning(
                    "%s: the metric %r is not one number, so that searches, tables and plots leave it out; report a "
                    "number for each name, and write text and vectors to TensorBoard or a file",
                    source,
                    name,
                )


def is_loss(kind: str, name: str, metric: str) -> bool:
    """Whether a metric of this kind ("training", "validation") is a loss: the searcher's, or named with "loss".

    Others, such as gradient norms with loss scaling, may be infinite or undefined in a healthy trial.
    """
    return kind in ("training", "validation") and (name == metric or "loss" in name.lower())


def diverged(metric: str, reported: Mapping[str, Mapping[str, object] | None]) -> str:
    """A message about the first loss that is not finite; "" if all are.

    >>> diverged("error", {"training": {"loss": 0.5}, "validation": {"error": float("nan")}})
    'the validation metric error is nan'
    """
    for kind, metrics in reported.items():
        for name, value in (metrics or {}).items():
            if is_loss(kind, name, metric) and isinstance(value, float) and not math.isfinite(value):
                return f"the {kind} metric {name} is {value}"
    return ""


def time_of(metric: str, validation: Mapping[str, object]) -> float:
    """The trial's length according to a validation.

    Raises:
        SearcherMetricError: the metric is missing, or is not a finite number >= 0.
    """
    if metric not in validation:
        raise SearcherMetricError(
            f"searcher.time_metric: the search measures length by {metric!r}, but validation returned "
            f"{sorted(validation)}; return it from evaluate_batch() or evaluate_full_dataset() (with the core API, "
            "report it with each report_validation_metrics()), or name one of these"
        )
    time = validation[metric]
    if isinstance(time, bool) or not isinstance(time, (int, float)) or not math.isfinite(time) or time < 0:
        raise SearcherMetricError(f"searcher.time_metric: {metric!r} must be a finite number >= 0, got {time!r}")
    return time


def crossed(rungs: Sequence[float], before: float | None, now: float) -> Reached:
    """The point reached by a trial whose length was `before` (None: no validation yet) and is `now`.

    `rungs` are ascending, and the last one is the length of a complete trial.

    >>> crossed([1, 4, 16], None, 0.5), crossed([1, 4, 16], 0.5, 5), crossed([1, 4, 16], 5, 16)
    ('nothing', 'rung', 'end')
    """
    if now >= rungs[-1]:
        return "end"
    return "rung" if any((before is None or before < rung) and rung <= now for rung in rungs) else "nothing"


class MetricChecks:
    """Checks the reports of one trial. `is_single`: of `searcher: {name: single}`, whose program need not report."""

    def __init__(self, metrics: Sequence[str], *, is_single: bool, stops_on_nan: bool) -> None:
        self.metrics, self.is_single, self._stops_on_nan = metrics, is_single, stops_on_nan

    def check_program(self, report: Report | None, *, known: bool) -> None:
        """Check a report of a program with its own loop, or its end if None. See `check_metrics`."""
        if report is None and self.is_single:
            return  # it may only evaluate a model
        validation = {} if report is None else report.validation
        if validation is not None and (report is None or report.compared):
            check_metrics(self.metrics, validation, FROM_PROGRAM, known=known)

    def diverged(self, report: Report) -> str:
        """Log and return the reason if the trial must be stopped because a loss is NaN or infinite; else ""."""
        if not self._stops_on_nan or report.final:
            return ""
        why = diverged(self.metrics[0], {"training": report.training, "validation": report.validation})
        if why:
            log.warning("the trial is stopped (stop_on_nan): after %d batches %s", report.batches, why)
        return why
