"""Points of a space as rows of numbers from 0 to 1, for models that measure distances between points.

A number has one column: its place in its range, in the logarithm where the space is logarithmic. A category has one
column for each value, 1 for that of the point. A conditional hyperparameter that a point lacks stands in the middle of
its columns. Constants have no column.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from searchers.domains import Categorical, Const, Nested
from searchers.numeric import Double, Int, Log
from searchers.space import Space

Array = npt.NDArray[np.float64]

_MIDDLE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """One hyperparameter.

    Attributes:
        domain: A `Categorical`, `Int`, `Double` or `Log`.
        columns: Its columns.
        parent: The column of the category that it belongs to; None if it always exists.
    """

    domain: Categorical | Int | Double | Log
    columns: slice
    parent: int | None


class UnitCube:
    """The rows of a space's points.

    Attributes:
        width: Columns of a row.
        axes: The number of the hyperparameter of each column, of shape (width,).
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self._axes: list[_Axis] = []
        self.width = 0
        self._collect(space.root, None)
        self.axes = np.array(
            [number for number, axis in enumerate(self._axes) for _ in range(axis.columns.stop - axis.columns.start)],
            dtype=np.intp,
        )

    def _collect(self, domain: object, parent: int | None) -> None:
        if isinstance(domain, Nested):
            for _, inner in domain.domains:
                self._collect(inner, parent)
        elif isinstance(domain, Categorical | Int | Double | Log):
            count = len(domain.vals) if isinstance(domain, Categorical) else 1
            axis = _Axis(domain=domain, columns=slice(self.width, self.width + count), parent=parent)
            self._axes.append(axis)
            self.width += count
            if isinstance(domain, Categorical):
                for choice, val in enumerate(domain.vals):
                    self._collect(val, axis.columns.start + choice)

    def row(self, point: Mapping[str, object]) -> Array:
        """A point's row, of shape (width,)."""
        row = np.full(self.width, _MIDDLE)
        self._write(self.space.root, point, iter(self._axes), row)
        return row

    def _write(self, domain: object, value: object, axes: Iterator[_Axis], row: Array) -> None:
        """Write the columns of the domain's axes, in their order; those that have no value stay as they are."""
        if isinstance(domain, Nested):
            for name, inner in domain.domains:
                self._write(inner, value.get(name) if isinstance(value, Mapping) else None, axes, row)
        elif isinstance(domain, Categorical):
            axis = next(axes)
            chosen, _ = (None, None) if value is None and None not in domain.vals else domain.find(value)
            if chosen is not None:
                row[axis.columns] = 0.0
                row[axis.columns.start + chosen] = 1.0
            for choice, val in enumerate(domain.vals):
                self._write(val, value if choice == chosen else None, axes, row)
        elif isinstance(domain, Int | Double | Log):
            axis = next(axes)
            if isinstance(value, int | float):
                row[axis.columns] = _place(domain, value)

    def point(self, row: Array) -> dict[str, object]:
        """The point closest to a row: numbers are rounded to their domains, of a category the largest column counts."""
        found = self._read(self.space.root, row, iter(self._axes))
        assert isinstance(found, dict)
        return found

    def _read(self, domain: object, row: Array, axes: Iterator[_Axis]) -> object:
        if isinstance(domain, Nested):
            return {name: self._read(inner, row, axes) for name, inner in domain.domains}
        if isinstance(domain, Categorical):
            chosen = int(np.argmax(row[next(axes).columns]))
            # Every branch is read, so that `axes` moves on.
            return [self._read(val, row, axes) for val in domain.vals][chosen]
        if isinstance(domain, Int | Double | Log):
            return _value(domain, float(row[next(axes).columns.start]))
        return copy.deepcopy(domain.val if isinstance(domain, Const) else domain)

    def random(self, rng: np.random.Generator, count: int) -> Array:
        """Rows of independent uniform points, of shape (count, width). The space's constraint is not asked."""
        rows = rng.random((count, self.width))
        for axis in self._axes:
            if isinstance(axis.domain, Categorical):
                rows[:, axis.columns] = np.eye(len(axis.domain.vals))[rng.integers(0, len(axis.domain.vals), count)]
        return self._without_absent(rows)

    def near(self, rng: np.random.Generator, rows: Array, scale: float) -> Array:
        """Rows around these, one for each: numbers move by a normal step of this scale, reflected at the ends, half of
        them on average stay as they are; a category is drawn anew with a probability of `scale`."""
        fresh = self.random(rng, len(rows))
        moved = np.where(rng.random(rows.shape) < 0.5, rows + rng.normal(0, scale, rows.shape), rows)
        moved = 1 - np.abs(1 - np.abs(moved) % 2)
        for axis in self._axes:
            if isinstance(axis.domain, Categorical):
                anew = rng.random((len(rows), 1)) < scale
                moved[:, axis.columns] = np.where(anew, fresh[:, axis.columns], rows[:, axis.columns])
        for axis in self._axes:
            if axis.parent is not None and not isinstance(axis.domain, Categorical):
                # It exists now, but did not in the row that it comes from.
                came = (moved[:, axis.parent] > rows[:, axis.parent])[:, None]
                moved[:, axis.columns] = np.where(came, rng.random((len(rows), 1)), moved[:, axis.columns])
        return self._without_absent(moved)

    def _without_absent(self, rows: Array) -> Array:
        """The rows with the columns of hyperparameters that they lack in the middle. Parents come before children."""
        for axis in self._axes:
            if axis.parent is not None:
                rows[rows[:, axis.parent] != 1, axis.columns] = _MIDDLE
        return rows


def _scale(domain: Int | Double | Log) -> tuple[float, float, bool]:
    """The ends of a number's range, and whether it is logarithmic. Integers have half a step more at either end."""
    match domain:
        case Int(minval=low, maxval=high, step=step, log=log):
            return low - step / 2, high + step / 2, log
        case Double(minval=low, maxval=high, step=step):
            return low - (step or 0) / 2, high + (step or 0) / 2, False
        case Log(bounds=(low, high)):
            return low, high, True


def _place(domain: Int | Double | Log, value: float) -> float:
    low, high, log = _scale(domain)
    if log:
        low, high, value = math.log(low), math.log(high), math.log(max(value, low))
    return min(max((value - low) / (high - low), 0.0), 1.0) if high > low else _MIDDLE


def _value(domain: Int | Double | Log, place: float) -> float:
    low, high, log = _scale(domain)
    if log:
        value = math.exp(math.log(low) + place * (math.log(high) - math.log(low)))
    else:
        value = low + place * (high - low)
    return domain.nearest(min(max(value, low), high))
