"""Length measured by a validation metric (Determined's ``max_time`` and ``time_metric``) instead of by batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dray.training.errors import SearcherMetricError
from dray.training.host import Reached


def time_of(metric: str, validation: Mapping[str, object]) -> float:
    """The trial's length, by this validation.

    Raises:
        SearcherMetricError: the metric is missing, or not a finite number >= 0.
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
    """What a trial whose length was ``before`` and is ``now`` has reached.

    Args:
        rungs: lengths, ascending; the last one is that of a complete trial.
        before: the length at the last validation that the search knows of, None if there was none.

    >>> crossed([1, 4, 16], None, 0.5), crossed([1, 4, 16], 0.5, 5), crossed([1, 4, 16], 5, 16)
    ('nothing', 'rung', 'end')
    """
    if now >= rungs[-1]:
        return "end"
    return "rung" if any((before is None or before < rung) and rung <= now for rung in rungs) else "nothing"
