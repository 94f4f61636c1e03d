"""A compact map from trials to integers."""

from __future__ import annotations

from array import array


class ByTrial:
    """An integer for each trial, in eight bytes; -1 by default. Trials are numbered from 0, without gaps.

    >>> batches = ByTrial()
    >>> batches[2] = 7
    >>> batches[2], batches[0], batches[1000]
    (7, -1, -1)
    """

    def __init__(self) -> None:
        self._numbers = array("q")

    def __getitem__(self, trial: int) -> int:
        return self._numbers[trial] if trial < len(self._numbers) else -1

    def __setitem__(self, trial: int, number: int) -> None:
        self._numbers.extend([-1] * (trial + 1 - len(self._numbers)))
        self._numbers[trial] = number
