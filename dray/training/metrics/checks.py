"""What a host checks in the reports of its trial: the searcher's metric is present, and no loss is NaN."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from dray.training.host import Report
from dray.training.metrics.divergence import diverged
from dray.training.metrics.searcher_metric import BY_PROGRAM, check_metrics, metric_warning

log = logging.getLogger(__name__)


class MetricChecks:
    """Checks the reports of one trial.

    Args:
        metrics: the config's `searcher.metric`, or all of its `searcher.metrics`, the first objective first.
        is_alone: the trial is the only one, of `searcher: {name: single}`, which compares nothing.
        stops_on_nan: the config's `stop_on_nan`.

    Attributes:
        compared: the metrics that the search compares; none if it compares nothing.
    """

    def __init__(self, metrics: Sequence[str], *, is_alone: bool, stops_on_nan: bool) -> None:
        self._metric, self._stops_on_nan = metrics[0], stops_on_nan
        self.is_alone, self._warned = is_alone, False
        self.compared = () if is_alone else tuple(metrics)

    def check_program(self, report: Report | None, *, known: bool) -> None:
        """Check a report of a program with its own loop; None once it has ended.

        Args:
            known: the search has received the metric from this trial before.

        Raises:
            SearcherMetricError: the search compares a metric that is missing or not a number.
        """
        validation = {} if report is None else report.validation
        if validation is not None and (report is None or report.compared):
            check_metrics(self.compared, validation, BY_PROGRAM, known=known)

    def warn(self, report: Report) -> str:
        """Log a warning, and return it, if the first validation of a trial that is alone lacks the metric."""
        if not self.is_alone or self._warned or report.validation is None or not report.compared:
            return ""
        self._warned = True
        if warning := metric_warning(self._metric, report.validation):
            log.warning(warning)
        return warning

    def diverged(self, report: Report) -> str:
        """Which loss is NaN or infinite, if the trial is to be stopped for that; else ""."""
        if not self._stops_on_nan or report.final:
            return ""
        why = diverged(self._metric, {"training": report.training, "validation": report.validation})
        if why:
            log.warning("the trial is stopped (stop_on_nan): after %d batches %s", report.batches, why)
        return why
