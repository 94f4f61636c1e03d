"""The length of a trial in the searcher's unit, and the rungs at which the search decides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dray.training.errors import SearcherMetricError
from dray.training.host import Reached, Report
from dray.training.metrics.checks import crossed, time_of
from dray.training.metrics.values import as_number
from dray.training.units import Batch, Epoch
from dray.worker.lease import SharedSettings


class Rungs:
    """The lengths at which the search decides, and the trial's current length.

    Args:
        lengths: ascending, in the searcher's unit; a trial completes at the last one. Empty: the search sets none.
        at: the greatest length reported to the search, or None.
    """

    def __init__(self, lengths: Sequence[float], at: float | None) -> None:
        self.lengths, self.at = lengths, at

    @property
    def remaining(self) -> list[float]:
        """The lengths that have not been reported to the search."""
        return [length for length in self.lengths if self.at is None or length > self.at]

    def reach(self, length: float) -> Reached:
        """Set the trial's length, and return what it has reached since the last call."""
        if not self.lengths:
            return "nothing"
        reached = crossed(self.lengths, self.at, length)
        self.at = length if self.at is None else max(self.at, length)
        return reached


def length_in_fit(report: Report, settings: SharedSettings, batch_size: int) -> float | None:
    """The length at a validation of `fit()`, in the searcher's unit; None without a validation."""
    if report.validation is None:
        return None
    if settings.time_metric is not None:
        return time_of(settings.time_metric, report.validation)
    match settings.max_length:
        case Epoch():
            assert report.epochs is not None, "a length in epochs was resolved without the length of an epoch"
            # Rungs are compared with whole epochs, so these must be whole numbers.
            return round(report.epochs) if math.isclose(report.epochs, round(report.epochs)) else report.epochs
        case Batch() | None:
            return report.batches
        case _:
            return report.batches * batch_size


def length_in_program(report: Report, settings: SharedSettings, batch_size: int) -> float | None:
    """The length at a validation that a program reports; None if the search does not compare it.

    Batches are the metric `batches` if the program reports it, else `steps_completed`; epochs are the metric `epochs`;
    with a `time_metric`, the length is that metric.

    Raises:
        SearcherMetricError: the metric is missing, or is not a valid length.
    """
    if report.validation is None or not report.compared or not report.validation.keys() >= set(settings.compared):
        return None
    length = _length_in_program(report, report.validation, settings, batch_size)
    if not 0 <= length < math.inf:
        # The search would reject it, which would end the whole experiment.
        raise SearcherMetricError(
            "searcher.max_length: a trial's length must be a finite number >= 0, but the program reported "
            f"{length!r} with steps_completed={report.batches}"
        )
    return length


def _length_in_program(
    report: Report, validation: Mapping[str, object], settings: SharedSettings, batch_size: int
) -> float:
    if report.length is not None:
        return report.length
    if settings.time_metric is not None:
        return time_of(settings.time_metric, {"batches": report.batches, **validation})
    match settings.max_length:
        case Batch() | None:
            return time_of("batches", {"batches": report.batches, **validation})
        case Epoch():
            if report.epochs is None and report.batches > 0 and len(settings.lengths) > 1:
                raise _no_epochs(report, validation, settings)
            return report.batches if report.epochs is None else report.epochs  # it does not matter without rungs
        case _:
            records = as_number(validation.get("records"))
            return report.batches * batch_size if records is None else records


def _no_epochs(report: Report, validation: Mapping[str, object], settings: SharedSettings) -> SearcherMetricError:
    by_time = settings.config.get("searcher", {}).get("time_metric") is not None
    field, other = ("time_metric", "batches") if by_time else ("max_length", "{batches: N}")
    return SearcherMetricError(
        f"searcher.{field}: the search counts epochs, but the program reported no 'epochs' with "
        f"steps_completed={report.batches}, only {sorted(validation)}; add 'epochs' (trained so far) "
        "to these metrics, or train over core_context.searcher.operations(), or count steps_completed: "
        f"set searcher.{field}: {other}"
    )
