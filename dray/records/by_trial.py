"""A number of each trial, in eight bytes: trials are numbered from 0, without gaps."""

from __future__ import annotations

from array import array
from typing import Generic, TypeVar

Number = TypeVar("Number", int, float)


class ByTrial(Generic[Number]):
    """A number of each trial, or ``missing``.

    Args:
        missing: what trials have that were given no number; its type is that of all numbers.

    >>> times = ByTrial(-1.0)
    >>> times[2] = 7.5
    >>> times[2], times[0], times[1000]
    (7.5, -1.0, -1.0)
    """

    def __init__(self, missing: Number) -> None:
        self._missing: Number = missing
        self._numbers: array[Number] = array({int: "q", float: "d"}[type(missing)])

    def __getitem__(self, trial: int) -> Number:
        return self._numbers[trial] if trial < len(self._numbers) else self._missing

    def __setitem__(self, trial: int, number: Number) -> None:
        if trial >= len(self._numbers):
            self._numbers.extend([self._missing] * (trial + 1 - len(self._numbers)))
        self._numbers[trial] = number
