"""Domains of numbers: integers, floats, and powers of a base."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from typing import TypeGuard

from searchers.errors import Faults

MAX_GRID = 1_000_000  # points of a grid, which is kept in memory
_TOLERANCE = 1e-9  # relative, since base ** exponent and sums of steps are inexact in the last digit


@dataclass(frozen=True, slots=True, kw_only=True)
class Int:
    """An integer from minval to maxval, both included, in steps of `step`.

    >>> Int(minval=1, maxval=9, count=3).grid("n", [])
    [1, 5, 9]
    """

    minval: int
    maxval: int
    count: int | None = None  # number of points on a grid
    step: int = 1
    log: bool = False  # uniform in the logarithm

    def sample(self, rng: Random) -> object:
        if self.log:
            return self.nearest(math.exp(rng.uniform(math.log(self.minval - 0.5), math.log(self.maxval + 0.5))))
        return self.minval + self.step * rng.randrange((self.maxval - self.minval) // self.step + 1)

    def nearest(self, value: float) -> int:
        top = (self.maxval - self.minval) // self.step
        return self.minval + self.step * min(max(round((value - self.minval) / self.step), 0), top)

    def grid(self, path: str, faults: Faults) -> list[object]:
        size = (self.maxval - self.minval) // self.step + 1
        count = self.count
        if count is None:
            count = size if self.step != 1 else _missing(path, faults)
        if _is_too_large(min(count, size), path, faults):
            return []
        if count >= size:
            return [self.minval + self.step * i for i in range(size)]
        rounded = [_rounded(point) for point in _even(self.minval, self.maxval, count)]
        return [self.nearest(value) for value in rounded] if self.step != 1 else list(rounded)

    def check(self, value: object, path: str, faults: Faults) -> object:
        if not is_number(value) or value != value // 1:
            faults.append((path, f"must be an integer from {self.minval} to {self.maxval}, got {value!r}"))
            return value
        whole = int(value)
        if not self.minval <= whole <= self.maxval or (whole - self.minval) % self.step:
            steps = f" in steps of {self.step}" if self.step != 1 else ""
            faults.append((path, f"must be an integer from {self.minval} to {self.maxval}{steps}, got {value!r}"))
        return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Double:
    """A float, uniform from minval to maxval; with `step`, one of minval + k * step."""

    minval: float
    maxval: float
    count: int | None = None  # number of points on a grid
    step: float | None = None

    def sample(self, rng: Random) -> object:
        if self.step is not None:
            return self._nth(rng.randrange(self._steps() + 1))
        return rng.uniform(self.minval, self.maxval)

    def nearest(self, value: float) -> float:
        if self.step is None:
            return min(max(value, self.minval), self.maxval)
        return self._nth(min(max(round((value - self.minval) / self.step), 0), self._steps()))

    def _steps(self) -> int:
        assert self.step is not None
        return math.floor((Fraction(str(self.maxval)) - Fraction(str(self.minval))) / Fraction(str(self.step)))

    def _nth(self, n: int) -> float:
        # In decimal arithmetic the third step of 0.1 is 0.3, not 0.30000000000000004.
        return float(Fraction(str(self.minval)) + n * Fraction(str(self.step)))

    def grid(self, path: str, faults: Faults) -> list[object]:
        all_steps = self.count is None and self.step is not None
        count = self.count
        if count is None:
            count = self._steps() + 1 if all_steps else _missing(path, faults)
        if _is_too_large(count, path, faults):
            return []
        if all_steps:
            return [self._nth(n) for n in range(count)]
        points = [float(point) for point in _even(Fraction(str(self.minval)), Fraction(str(self.maxval)), count)]
        return list(points) if self.step is None else list(dict.fromkeys(map(self.nearest, points)))

    def check(self, value: object, path: str, faults: Faults) -> object:
        tolerance = _TOLERANCE * (self.maxval - self.minval)
        if not is_number(value) or not self.minval - tolerance <= value <= self.maxval + tolerance:
            faults.append((path, f"must be a number from {self.minval} to {self.maxval}, got {value!r}"))
            return value
        if self.step is not None and abs(self.nearest(value) - value) > _TOLERANCE * self.step:
            faults.append((path, f"must be from {self.minval} to {self.maxval} in steps of {self.step}, got {value!r}"))
        return float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """base ** e with an exponent e uniform from minval to maxval; with `step`, rounded to a multiple of it."""

    base: float
    minval: float
    maxval: float
    count: int | None = None  # number of points on a grid
    step: float | None = None

    @property
    def bounds(self) -> tuple[float, float]:
        """The smallest and the largest value."""
        ends = float(self.base**self.minval), float(self.base**self.maxval)
        return min(ends), max(ends)

    def sample(self, rng: Random) -> object:
        return self.nearest(self.base ** rng.uniform(self.minval, self.maxval))

    def nearest(self, value: float) -> float:
        if self.step is None:
            return float(value)
        low, high = self.bounds
        step = Fraction(str(self.step))
        inside = min(
            max(round(Fraction(value) / step), math.ceil(low / step - _TOLERANCE)), math.floor(high / step + _TOLERANCE)
        )
        return float(inside * step)

    def grid(self, path: str, faults: Faults) -> list[object]:
        count = self.count if self.count is not None else _missing(path, faults)
        if _is_too_large(count, path, faults):
            return []
        exponents = _even(Fraction(str(self.minval)), Fraction(str(self.maxval)), count)
        return list(dict.fromkeys(self.nearest(float(self.base ** float(exponent))) for exponent in exponents))

    def check(self, value: object, path: str, faults: Faults) -> object:
        low, high = self.bounds
        if not is_number(value) or not low * (1 - _TOLERANCE) <= value <= high * (1 + _TOLERANCE):
            faults.append((path, f"must be a number from {low:g} to {high:g}, got {value!r}"))
            return value
        if self.step is not None and abs(self.nearest(value) - value) > _TOLERANCE * self.step:
            faults.append((path, f"must be a multiple of {self.step}, got {value!r}"))
        return float(value)


def is_number(value: object) -> TypeGuard[float]:
    """Whether the value is a finite number within the range of floats; 10 ** 400 could be neither ranked nor shown."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _is_too_large(count: int, path: str, faults: Faults) -> bool:
    if count > MAX_GRID:
        faults.append(
            (path, f"must have at most {MAX_GRID} points on a grid, got {count}; use fewer, or random search")
        )
    return count > MAX_GRID


def _missing(path: str, faults: Faults) -> int:
    faults.append((f"{path}.count", "is required for a grid: the number of points"))
    return 1


def _even(low: Fraction | int, high: Fraction | int, count: int) -> list[Fraction]:
    """Return `count` exact, evenly spaced numbers including both ends, or the midpoint if count is 1."""
    if count == 1:
        return [Fraction(low + high) / 2]
    return [low + Fraction(high - low) * i / (count - 1) for i in range(count)]


def _rounded(value: Fraction) -> int:
    """Round to the nearest integer, halves away from zero."""
    whole = math.floor(abs(value) + Fraction(1, 2))
    return whole if value >= 0 else -whole
