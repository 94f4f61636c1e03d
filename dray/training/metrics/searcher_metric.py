"""What happens if a validation lacks the metric that the config's ``searcher.metric`` names."""

from __future__ import annotations

from collections.abc import Mapping

from dray.training.errors import SearcherMetricError

BY_TRIAL = "validation returned", "return it from evaluate_batch() or evaluate_full_dataset()"
BY_PROGRAM = "the program reported", "report it with core_context.train.report_validation_metrics()"


def check_metric(
    metric: str, validation: Mapping[str, object], by: tuple[str, str] = BY_TRIAL, *, known: bool = False
) -> None:
    """Check that the search can compare a validation.

    Args:
        metric: the searcher's.
        validation: metrics by name, as plain values.
        by: what provided them, and how it would provide the metric.
        known: the search has received the metric from this trial before: then it may be missing.

    Raises:
        SearcherMetricError: the metric is missing, or not a number.
    """
    provided, how = by
    if metric in validation and not isinstance(validation[metric], (int, float)):
        raise SearcherMetricError(
            f"searcher.metric: {metric!r} must be a number, but {provided} {validation[metric]!r:.80}"
        )
    if metric not in validation and not known:
        raise SearcherMetricError(
            f"searcher.metric: the search compares {metric!r}, but {provided} "
            f"{sorted(validation) or 'no validation metrics'}; {how}, or set searcher.metric to one of these"
        )


def metric_warning(metric: str, validation: Mapping[str, object]) -> str:
    """The warning with ``searcher: {name: single}``, which compares nothing, so that training continues; "" if the
    metric is present."""
    if isinstance(validation.get(metric), (int, float)):
        return ""
    return (
        f"searcher.metric is {metric!r}, but the validation metrics are {sorted(validation)}. The trial trains on, "
        "because `single` compares nothing, but it will have no best validation; set searcher.metric to one of these"
    )
