"""The scales of a metric's axis: linear, with all values or without the worst, and logarithmic; and which is best."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

SPREAD = 20
"""From this ratio of the largest to the smallest value on, a loss has a logarithmic axis."""
FAR = 5
"""A linear scale may hide values that are worse than the median, and this many times as far from it as the best is."""
MAX_HIDDEN = 0.15
"""The largest share of the values that it hides: first epochs, say, and a bad trial."""
DIVERGED = 0.02
"""The largest share that a logarithmic scale hides, which has room for all but the values of trials that diverged."""
EDGE = 0.05
LOG = "logarithmic"


def scaled(figure: dict[str, Any], title: str, values: Iterable[float], sign: int | None) -> dict[str, Any]:
    """The figure with the y-axis of a metric, and with the other scales that its page offers.

    The axis is logarithmic if the values span a factor of 20, unless they are bounded by 1 (as an F1 score or an error
    rate is) or larger is better: then it is the differences near the largest values that count.

    Args:
        figure: with "layout".
        title: of the axis.
        values: of the metric.
        sign: 1 if smaller is better, -1 if larger is; None if that is not known.

    Returns:
        The figure with "scales", the axis by the name of its scale, and "scale", the name of the one that it has now.
    """
    found = np.array([value for value in values if math.isfinite(value)])
    scales = _linear(found, sign)
    scale = next(iter(scales))
    if len(found) > 1 and found.min() > 0:
        scales[LOG] = _log(found, sign)
        if sign != -1 and found.max() > 1 and found.max() / found.min() > SPREAD:
            scale = LOG
    axis = {"title": {"text": title}, **scales[scale]}
    return {**figure, "layout": {**figure["layout"], "yaxis": axis}, "scales": scales, "scale": scale}


def _linear(found: np.ndarray[Any, Any], sign: int | None) -> dict[str, dict[str, Any]]:
    """First without the worst values, if they are far out."""
    if len(found) < 2 or sign is None:
        return {"linear": {}}
    scores = sign * found
    best, middle = np.quantile(scores, [0.0, 0.5])
    limit = max(middle + FAR * (middle - best), np.quantile(scores, 1 - MAX_HIDDEN, method="higher"))
    shown = scores[scores <= limit]
    far, hidden = shown.max(), len(scores) - len(shown)
    if not hidden or far <= best:
        return {"linear": {}}
    edge = EDGE * (far - best)
    ends = sorted([float(sign * (best - edge)), float(sign * (far + edge))])
    return {f"linear, worst {hidden:,} of {len(found):,} hidden": {"range": ends}, "linear, all values": {}}


def _log(found: np.ndarray[Any, Any], sign: int | None) -> dict[str, Any]:
    """Without the largest values if they are further out than the others reach, as of a trial that diverged."""
    low, most, high = (math.log10(value) for value in np.quantile(found, [0.0, 1 - DIVERGED, 1.0]))
    if sign == 1 and high - most > most - low > 0:
        high = most
    edge = EDGE * max(high - low, 0.1)
    return {"type": "log", "range": [low - edge, high + edge], **ticks_of(low, high)}


def ticks_of(low: float, high: float) -> dict[str, Any]:
    """Ticks of a logarithmic axis between two exponents, few enough for a small figure."""
    if high - low < 0.7:  # there would be hardly any; plotly knows finer ones
        return {}
    ticks = logarithms(low, high)
    return {"tickmode": "array", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def logarithms(low: float, high: float) -> list[float]:
    """Round numbers between two exponents of ten, and a little beyond."""
    decades = range(math.floor(low), math.ceil(high) + 1)
    steps = (1,) if high - low > 2.5 else (1, 2, 5)
    return [step * 10.0**decade for decade in decades for step in steps]
