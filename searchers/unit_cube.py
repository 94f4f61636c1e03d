"""Encoding of a space's points as rows of numbers from 0 to 1, for models that measure distances between points.

A number has one column, its position in its range (on a log scale where the domain is logarithmic). A categorical is
one-hot encoded. The columns of a conditional hyperparameter that a point lacks are 0.5. Constants have no column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from searchers.domains import Categorical, build, numbers_of, parameters
from searchers.numeric_domains import Double, Int, Log
from searchers.space import Space

Array = npt.NDArray[np.float64]

MIDDLE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    domain: Categorical | Int | Double | Log
    columns: slice
    parent: int | None  # the column of the category that it belongs to; None if unconditional

    def where_present(self, rows: Array, values: Array) -> Array:
        """Replace the values of the rows that lack this hyperparameter by 0."""
        return values if self.parent is None else np.where(rows[:, self.parent] == 1, values, 0.0)


class UnitCube:
    """The encoding of one space, in rows of `width` columns.

    Attributes:
        by_name: The columns of each hyperparameter, by its name in `parameters`.
        axes: The number of the hyperparameter of each column, shape (width,).
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self.by_name: dict[str, Axis] = {}
        self.width = 0
        for each in parameters(space.root):
            count = len(each.domain.vals) if isinstance(each.domain, Categorical) else 1
            column = None if each.parent is None else self.by_name[each.parent[0]].columns.start + each.parent[1]
            columns = slice(self.width, self.width + count)
            self.by_name[each.name] = Axis(domain=each.domain, columns=columns, parent=column)
            self.width += count
        counts = [axis.columns.stop - axis.columns.start for axis in self.by_name.values()]
        self.axes = np.repeat(np.arange(len(counts), dtype=np.intp), counts)

    def row(self, point: Mapping[str, object]) -> Array:
        """Encode a point as a row of shape (width,)."""
        row = np.full(self.width, MIDDLE)
        for name, value in numbers_of(self.space.root, point):
            axis = self.by_name[name]
            if isinstance(axis.domain, Categorical):
                row[axis.columns] = 0.0
                row[axis.columns.start + int(value)] = 1.0
            else:
                row[axis.columns] = place(axis.domain, value)
        return row

    def point(self, row: Array) -> dict[str, object]:
        """Decode a row to the closest point: numbers are rounded to their domains, and the largest column determines
        the category."""

        def value_of(name: str, domain: Categorical | Int | Double | Log) -> float:
            columns = self.by_name[name].columns
            if isinstance(domain, Categorical):
                return int(np.argmax(row[columns]))
            return value_at(domain, float(row[columns.start]))

        found = build(self.space.root, value_of)
        assert isinstance(found, dict)
        return found

    def numbers(self, point: Mapping[str, object]) -> npt.NDArray[np.bool_]:
        """Return which columns encode the numbers of this point, shape (width,)."""
        columns = np.zeros(self.width, np.bool_)
        for name, _ in numbers_of(self.space.root, point):
            columns[self.by_name[name].columns] = not isinstance(self.by_name[name].domain, Categorical)
        return columns

    def random(self, rng: np.random.Generator, count: int) -> Array:
        """Draw independent uniform points as rows of shape (count, width), ignoring the space's constraint."""
        rows = rng.random((count, self.width))
        for axis in self.by_name.values():
            if isinstance(axis.domain, Categorical):
                rows[:, axis.columns] = np.eye(len(axis.domain.vals))[rng.integers(0, len(axis.domain.vals), count)]
        return self.without_absent(rows)

    def near(self, rng: np.random.Generator, rows: Array, scale: float) -> Array:
        """Draw one neighbour of each row.

        Each number changes with probability 1/2, by a normal step of standard deviation `scale`, reflected at the ends;
        each category is redrawn with probability `scale`.
        """
        fresh = self.random(rng, len(rows))
        moved = np.where(rng.random(rows.shape) < 0.5, rows + rng.normal(0, scale, rows.shape), rows)
        moved = 1 - np.abs(1 - np.abs(moved) % 2)
        for axis in self.by_name.values():
            if isinstance(axis.domain, Categorical):
                redrawn = rng.random((len(rows), 1)) < scale
                moved[:, axis.columns] = np.where(redrawn, fresh[:, axis.columns], rows[:, axis.columns])
        for axis in self.by_name.values():
            if axis.parent is not None and not isinstance(axis.domain, Categorical):
                # The hyperparameter exists now, but not in the original row.
                is_new = (moved[:, axis.parent] > rows[:, axis.parent])[:, None]
                moved[:, axis.columns] = np.where(is_new, rng.random((len(rows), 1)), moved[:, axis.columns])
        return self.without_absent(moved)

    def without_absent(self, rows: Array) -> Array:
        """Set the columns of absent hyperparameters to 0.5."""
        # Parents come before children.
        for axis in self.by_name.values():
            if axis.parent is not None:
                rows[rows[:, axis.parent] != 1, axis.columns] = MIDDLE
        return rows


def _scale(domain: Int | Double | Log) -> tuple[float, float, bool]:
    """Return the ends of a number's range, half a step wider for discrete domains, and whether it is logarithmic."""
    match domain:
        case Int(minval=low, maxval=high, step=step, log=log):
            return low - step / 2, high + step / 2, log
        case Double(minval=low, maxval=high, step=step):
            return low - (step or 0) / 2, high + (step or 0) / 2, False
        case Log(bounds=(low, high)):
            return low, high, True


def distance(domain: Int | Double | Log, within: float) -> float:
    """Return the length of a distance in a number's range, or of a factor in a logarithmic one, in the unit cube."""
    low, high, log = _scale(domain)
    return math.log(within) / math.log(high / low) if log else within / (high - low)


def place(domain: Int | Double | Log, value: float) -> float:
    """Return the place of a number in its range, from 0 to 1."""
    return min(max(beyond(domain, value), 0.0), 1.0)


def beyond(domain: Int | Double | Log, value: float) -> float:
    """Return the place of a number, which is below 0 or above 1 if it is outside of the range."""
    low, high, log = _scale(domain)
    if log:
        low, high, value = math.log(low), math.log(high), math.log(max(value, 1e-300))
    return (value - low) / (high - low) if high > low else MIDDLE


def value_at(domain: Int | Double | Log, place: float) -> float:
    """Return the closest value to a place in its range, from 0 to 1."""
    low, high, log = _scale(domain)
    if log:
        value = math.exp(math.log(low) + place * (math.log(high) - math.log(low)))
    else:
        value = low + place * (high - low)
    return domain.nearest(min(max(value, low), high))
