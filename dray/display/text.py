"""Curves, times and search spaces as short text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from searchers.domains import ranges
from searchers.space import Space

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float]) -> str:
    """A curve in one line, a character for each value, from the smallest (▁) to the largest (█); a space for NaN."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return " " * len(values)
    low, high = min(known), max(known)
    steps = len(_BARS) - 1
    return "".join(
        " " if not math.isfinite(value)
        else _BARS[steps // 2] if high == low
        else _BARS[round((value - low) / (high - low) * steps)]
        for value in values
    )  # fmt: skip


def rough_time(seconds: float) -> str:
    """A rough time: 40 s, 12 min, 3 h 20 min, 2 days 4 h."""
    if seconds < 60:
        return f"{max(5, 5 * round(seconds / 5))} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60 // 10 * 10} min"
    return f"{minutes // 1440} days {minutes % 1440 // 60} h"


def searched_line(space: Space) -> str:
    """The ranges of a search space, in one line; "" if everything is constant."""
    found = "; ".join(f"{name}: {values}" for name, values in ranges(space.root))
    return f"searching {found}" if found else ""
