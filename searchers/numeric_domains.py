"""Domains of numbers: integers, floats, and powers of a base."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from typing import TypeGuard

from searchers.errors import Faults
from searchers.grids import Points

_TOLERANCE = 1e-9  # relative, since base ** exponent and sums of steps are inexact in the last digit


@dataclass(frozen=True, slots=True, kw_only=True)
class Int:
    """An integer from minval to maxval, both included, in steps of `step`.

    >>> list(Int(minval=1, maxval=9, count=3).grid())
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

    def grid_size(self, path: str, faults: Faults) -> int:
        if self.count is None and self.step == 1:
            return _missing(path, faults)
        size = (self.maxval - self.minval) // self.step + 1
        return size if self.count is None else min(self.count, size)

    def grid(self) -> Points:
        size = (self.maxval - self.minval) // self.step + 1
        if self.count is None or self.count >= size:
            return Points(size, lambda n: self.minval + self.step * n)
        count = self.count
        return Points(count, lambda n: self.nearest(_rounded(_even(self.minval, self.maxval, count, n))))

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

    def grid_size(self, path: str, faults: Faults) -> int:
        if self.step is None:
            return self.count or _missing(path, faults)
        return self._steps() + 1 if self.count is None else min(self.count, self._steps() + 1)

    def grid(self) -> Points:
        low, high, count = Fraction(str(self.minval)), Fraction(str(self.maxval)), self.count
        if self.step is None:
            return Points(count or 1, lambda n: float(_even(low, high, count or 1, n)))
        if count is None or count > self._steps() + 1:
            return Points(self._steps() + 1, self._nth)
        nearest = (self.nearest(float(_even(low, high, count, n))) for n in range(count))
        return Points.of(list(dict.fromkeys(nearest)))

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

    def grid_size(self, path: str, faults: Faults) -> int:
        return self.count or _missing(path, faults)

    def grid(self) -> Points:
        low, high, count = Fraction(str(self.minval)), Fraction(str(self.maxval)), self.count or 1
        exponents = (float(_even(low, high, count, n)) for n in range(count))
        return Points.of(list(dict.fromkeys(self.nearest(float(self.base**exponent)) for exponent in exponents)))

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


def _missing(path: str, faults: Faults) -> int:
    faults.append((f"{path}.count", "is required for a grid: the number of points"))
    return 1


def _even(low: Fraction | int, high: Fraction | int, count: int, n: int) -> Fraction:
    """Return one of `count` exact, evenly spaced numbers including both ends, or the midpoint if count is 1."""
    return Fraction(low + high) / 2 if count == 1 else low + Fraction(high - low) * n / (count - 1)


def _rounded(value: Fraction) -> int:
    """Round to the nearest integer, halves away from zero."""
    whole = math.floor(abs(value) + Fraction(1, 2))
    return whole if value >= 0 else -whole
