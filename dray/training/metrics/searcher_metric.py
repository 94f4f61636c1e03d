"""What happens if a validation lacks a metric that the config's ``searcher.metric`` or ``searcher.metrics`` names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dray.training.errors import SearcherMetricError

BY_TRIAL = "validation returned", "return it from evaluate_batch() or evaluate_full_dataset()"
BY_PROGRAM = "the program reported", "report it with core_context.train.report_validation_metrics()"


def check_metrics(
    metrics: Sequence[str], validation: Mapping[str, object], by: tuple[str, str] = BY_TRIAL, *, known: bool = False
) -> None:
    """Check that the search can compare a validation.

    Args:
        metrics: the searcher's; none if it compares nothing.
        validation: metrics by name, as plain values.
        by: what provided them, and how it would provide the metric.
        known: the search has received the metrics from this trial before: then they may be missing.

    Raises:
        SearcherMetricError: a metric is missing, or not a number.
    """
    provided, how = by
    field = "searcher.metrics" if len(metrics) > 1 else "searcher.metric"
    compared = "searcher.metrics: the search compares" if len(metrics) > 1 else "searcher.metric: the search compares"
    for metric in metrics:
        if metric in validation and not isinstance(validation[metric], (int, float)):
            raise SearcherMetricError(
                f"{field}: {metric!r} must be a number, but {provided} {validation[metric]!r:.80}"
            )
        if metric not in validation and not known:
            raise SearcherMetricError(
                f"{compared} {metric!r}, but {provided} {sorted(validation) or 'no validation metrics'}; {how}, or set "
                f"{field} to one of these{_hint(metric, validation)}"
            )


def metric_warning(metric: str, validation: Mapping[str, object]) -> str:
    """The warning with ``searcher: {name: single}``, which compares nothing, so that training continues; "" if the
    metric is present."""
    if isinstance(validation.get(metric), (int, float)):
        return ""
    return (
        f"searcher.metric is {metric!r}, but the validation metrics are {sorted(validation)}. The trial trains on, "
        "because `single` compares nothing, but it will have no best validation; set searcher.metric to one of these"
        f"{_hint(metric, validation)}"
    )


def _hint(metric: str, validation: Mapping[str, object]) -> str:
    from dray.errors import did_you_mean  # here, as workers should import little

    return did_you_mean(metric, validation.keys())
