"""The scales of a metric's axis: linear, with all values or without the worst, or logarithmic; and the default."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

SPREAD = 20
"""The ratio of the largest to the smallest value from which a loss has a logarithmic axis."""
FAR = 5
"""A linear scale may hide values that are worse than the median, and this many times as far from it as the best one."""
MAX_HIDDEN = 0.15
"""The largest share of values that a linear scale hides, such as first epochs and a bad trial."""
DIVERGED = 0.02
"""The largest share of values that a logarithmic scale hides: those of diverged trials."""
EDGE = 0.05
LOG = "logarithmic"


def scaled(figure: dict[str, Any], title: str, values: Iterable[float], sign: int | None) -> dict[str, Any]:
    """The figure with a metric's y-axis, and with the other scales that the page offers.

    The axis is logarithmic if the values span a factor of 20, unless they are bounded by 1 (like an F1 score or an
    error rate) or larger is better: then differences near the largest values matter.

    Args:
        figure: a mapping with "layout".
        title: the title of the axis.
        values: the metric's values.
        sign: 1 if smaller is better, -1 if larger is better; None if unknown.

    Returns:
        The figure with "scales", the axes by name of the scale, and "scale", the name of the current one.
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


def is_log(values: Iterable[float], sign: int | None) -> bool:
    """Whether the axis of `scaled` is logarithmic by default."""
    return bool(scaled({"layout": {}}, "", values, sign)["scale"] == LOG)


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
    """A logarithmic axis, without the largest values if they are outliers, as from diverged trials."""
    low, most, high = (math.log10(value) for value in np.quantile(found, [0.0, 1 - DIVERGED, 1.0]))
    if sign == 1 and high - most > most - low > 0:
        high = most
    edge = EDGE * max(high - low, 0.1)
    return {"type": "log", "range": [low - edge, high + edge], **ticks_of(low, high)}


def ticks_of(low: float, high: float) -> dict[str, Any]:
    """Ticks of a logarithmic axis between two exponents, few enough for a small figure."""
    if high - low < 0.7:  # too few round numbers; plotly chooses finer ticks
        return {}
    ticks = logarithms(low, high)
    return {"tickmode": "array", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def logarithms(low: float, high: float) -> list[float]:
    """Round numbers between two powers of ten, and a little beyond."""
    decades = range(math.floor(low), math.ceil(high) + 1)
    steps = (1,) if high - low > 2.5 else (1, 2, 5)
    return [step * 10.0**decade for decade in decades for step in steps]
