"""The one thinning of long curves: for the page, the report, the HTTP API and the tools of agents."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

LEAST = 5
"""The fewest points that a curve can be thinned to: the first, the last, the lowest, the highest, and NaN."""


def thinned(values: Sequence[float | None], most: int) -> list[int]:
    """The indices of the points of a curve to show: all, or at most `most` (at least `LEAST`).

    The curve is cut into intervals of equal numbers of points. Each keeps its first, last, lowest and highest point,
    and its first NaN (or None), or else its first infinite value. What room is left goes to other points, evenly
    spaced.

    >>> thinned([5, 4, 1, 4, None, 6, 7, 9, 7, 6], 6)
    [0, 2, 4, 5, 7, 9]
    """
    count, most = len(values), max(most, LEAST)
    if count <= most:
        return list(range(count))
    found = np.array(values, float)
    ends = np.linspace(0, count, most // LEAST + 1).astype(int).tolist()
    kept = sorted({start + place for start, end in pairwise(ends) for place in _kept(found[start:end])})
    others, room = np.setdiff1d(np.arange(count), kept), most - len(kept)
    spread = others[(2 * np.arange(room) + 1) * len(others) // (2 * max(room, 1))]
    return sorted([*kept, *spread.tolist()])


def _kept(values: np.ndarray[Any, Any]) -> set[int]:
    """The places that an interval keeps."""
    kept, finite = {0, len(values) - 1}, np.isfinite(values)
    if finite.any():
        kept |= {int(np.where(finite, values, np.inf).argmin()), int(np.where(finite, values, -np.inf).argmax())}
    for is_lost in (np.isnan(values), ~finite):
        if is_lost.any():
            return kept | {int(is_lost.argmax())}
    return kept
