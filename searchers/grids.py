"""The points of a grid, each made when it is asked for: a product of a million points takes no memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any


@dataclass(frozen=True, slots=True)
class Points:
    """`size` points, numbered from 0."""

    size: int
    nth: Callable[[int], object]

    def __iter__(self) -> Iterator[Any]:
        return map(self.nth, range(self.size))

    @classmethod
    def of(cls, values: Sequence[object]) -> Points:
        return cls(len(values), values.__getitem__)


def chained(parts: Sequence[Points]) -> Points:
    """The points of all parts, one part after the other.

    >>> list(chained([Points.of("ab"), Points.of("c")]))
    ['a', 'b', 'c']
    """
    ends = list(accumulate(part.size for part in parts))

    def nth(number: int) -> object:
        part = bisect_right(ends, number)
        return parts[part].nth(number - (ends[part] - parts[part].size))

    return Points(ends[-1] if ends else 0, nth)


def crossed(names: Sequence[str], axes: Sequence[Points]) -> Points:
    """Mappings of the names to each combination of the axes' points; the first one changes slowest.

    >>> crossed(["x", "y"], [Points.of([1, 2]), Points.of("ab")]).nth(2)
    {'x': 2, 'y': 'a'}
    """

    def nth(number: int) -> object:
        found = []
        for axis in reversed(axes):
            number, place = divmod(number, axis.size)
            found.append(axis.nth(place))
        return dict(zip(names, reversed(found), strict=True))

    return Points(prod(axis.size for axis in axes), nth)
