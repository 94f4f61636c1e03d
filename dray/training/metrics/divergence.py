"""Which metrics show that a trial has diverged: losses that are NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Mapping


def is_loss(kind: str, name: str, metric: str) -> bool:
    """Whether a metric of this kind ("training", "validation") counts: the searcher's, and all with "loss" in the name.

    Others may be infinite or undefined in a sound trial, such as the norm of gradients before a loss is scaled.
    """
    return kind in ("training", "validation") and (name == metric or "loss" in name.lower())


def diverged(metric: str, reported: Mapping[str, Mapping[str, object] | None]) -> str:
    """The first loss that is not finite, for a message; "" if all are.

    Args:
        metric: the searcher's.
        reported: the metrics of each kind.

    >>> diverged("error", {"training": {"loss": 0.5}, "validation": {"error": float("nan")}})
    'the validation metric error is nan'
    """
    for kind, metrics in reported.items():
        for name, value in (metrics or {}).items():
            if is_loss(kind, name, metric) and isinstance(value, float) and not math.isfinite(value):
                return f"the {kind} metric {name} is {value}"
    return ""
