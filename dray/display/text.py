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


def searched_line(space: Space) -> str:
    """The ranges of a search space, in one line; "" if everything is constant."""
    found = "; ".join(f"{name}: {values}" for name, values in ranges(space.root))
    return f"searching {found}" if found else ""
