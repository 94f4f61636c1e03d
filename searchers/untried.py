"""The points of a finite space that a search has not tried yet."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import cast

import numpy as np

from searchers.grids import Points
from searchers.space import Space
from searchers.unit_cube import UnitCube


class Untried:
    """Replaces points that were tried by the closest ones that were not.

    Args:
        space: A finite space.
        points: All of its points.

    >>> from searchers import parse_space
    >>> space = parse_space({"x": {"type": "int", "minval": 1, "maxval": 4}})
    >>> untried = Untried(space, space.every_point())
    >>> untried.add({"x": 2}), untried.add({"x": 3})
    (None, None)
    >>> untried.closest({"x": 3}), untried.closest({"x": 1})
    ({'x': 4}, {'x': 1})
    """

    def __init__(self, space: Space, points: Points) -> None:
        self._points, self._cube = points, UnitCube(space)
        self._rows = np.array([self._cube.row(point) for point in points])
        self._is_left = np.ones(points.size, np.bool_)

    def add(self, point: Mapping[str, object]) -> None:
        """Note that a point is tried."""
        self._is_left[self._distances(point).argmin()] = False

    def closest(self, point: dict[str, object]) -> dict[str, object]:
        """Return the point if it was not tried, or else the closest one that was not; the point if none is left."""
        distances = self._distances(point)
        if self._is_left[distances.argmin()] or not self._is_left.any():
            return point
        left = np.flatnonzero(self._is_left)
        return cast("dict[str, object]", copy.deepcopy(self._points.nth(int(left[distances[left].argmin()]))))

    def _distances(self, point: Mapping[str, object]) -> np.typing.NDArray[np.float64]:
        squares: np.typing.NDArray[np.float64] = ((self._rows - self._cube.row(point)) ** 2).sum(axis=1)
        return squares
