"""Many learning curves as one band: the median and the quartiles of the trials that are there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

POINTS = 120
"""The most points of a band."""
LEAST = 4
"""The fewest trials of a band: of three, the quartiles would be made up."""
SHARE = 0.5
"""The least share of a group's trials that a point needs. Beyond, the band would be that of the few that went on."""
Curve: TypeAlias = tuple[Sequence[float | None], Sequence[float]]
"""The places of a curve's points, in order, and their values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The median and the quartiles of curves.

    Attributes:
        x: where; `low`, `middle`, `high` and `trials` belong to these places.
        low, middle, high: the quartiles.
        trials: the number of curves that have a value there.
        of: the number of curves that have any.
        exact: whether the places are all those that the curves have; else they are evenly spaced. Between two of its
            points, a curve has the values of the straight line.
        not_finite: the number of curves of which values were left out, because they are NaN or infinite.
    """

    x: list[float]
    low: list[float]
    middle: list[float]
    high: list[float]
    trials: list[int]
    of: int
    exact: bool
    not_finite: int


def band_of(curves: Sequence[Curve], *, points: int = POINTS) -> Band | None:
    """The band of a group's curves; None if there is no place with enough of them."""
    found, not_finite = list[tuple[Any, Any]](), 0
    for places, values in curves:
        x, y = np.array(places, float), np.array(values, float)
        kept = np.isfinite(x) & np.isfinite(y)
        not_finite += bool((~np.isfinite(y)).any())
        if kept.any():
            found.append((x[kept], y[kept]))
    if len(found) < LEAST:
        return None
    grid = np.unique(np.concatenate([x for x, _ in found]))
    exact = len(grid) <= points
    if not exact:
        grid = np.linspace(grid[0], grid[-1], points)
    sampled = np.stack([np.interp(grid, x, y, left=np.nan, right=np.nan) for x, y in found])
    trials = np.isfinite(sampled).sum(axis=0)
    enough = trials >= max(LEAST, math.ceil(SHARE * len(found)))
    if not enough.any():
        return None
    columns = [column[np.isfinite(column)] for column in sampled.T[enough]]
    low, middle, high = np.array([np.quantile(column, (0.25, 0.5, 0.75)) for column in columns]).T.tolist()
    return Band(
        x=grid[enough].tolist(),
        low=low,
        middle=middle,
        high=high,
        trials=trials[enough].tolist(),
        of=len(found),
        exact=exact,
        not_finite=not_finite,
    )
