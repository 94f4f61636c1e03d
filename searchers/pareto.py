"""An order of trials with several objectives: non-dominated sorting, with crowding distances to break ties.

One trial dominates another if it is no worse in any objective and better in one. The first front are the trials that
none dominates; the second front those that only the first dominates; and so on. The order, best first:

1. Trials that keep every constraint, before those that do not.
2. Among those that do not, by the total violation (`Losses.violation`), the smallest first.
3. Among those that do, by the number of the front.
4. Within a front by crowding distance, the largest first: where a front has to be cut, what is left is spread out. The
   ends of a front, the best in one objective, come before all others.
5. Trials with equal distances, or equal violations, by number: the earlier one first.

A trial without finite losses comes last.

Sources: Deb et al., "A Fast and Elitist Multiobjective Genetic Algorithm: NSGA-II" (IEEE Trans. Evol. Comput. 6(2),
2002), for the fronts, the crowding distance and the constraints; Li et al., "Efficient Nondomination Level Update
Method for Steady-State Evolutionary Multiobjective Optimization" (IEEE Trans. Cybern. 47(9), 2017), for adding one
point at a time; Schmucker et al., "Multi-objective Asynchronous Successive Halving" (arXiv 2106.12639), for both in
ASHA.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence

from searchers.objectives import Losses

Vector = tuple[float, ...]


def dominates(point: Vector, other: Vector) -> bool:
    """Whether the first is no worse anywhere and better somewhere; smaller is better.

    >>> dominates((1, 2), (1, 3)), dominates((1, 2), (1, 2)), dominates((1, 2), (0, 3))
    (True, False, False)
    """
    return point != other and all(mine <= its for mine, its in zip(point, other, strict=True))


def crowding_distances(points: Sequence[Vector]) -> list[float]:
    """How far apart each point's neighbours are, summed over the objectives, each in units of the points' range.

    The best and the worst in an objective have no neighbour on one side: their distance is infinite. Of equal points
    only one does; the order of the points decides.

    >>> crowding_distances([(0, 4), (1, 2), (3, 1), (4, 0)])
    [inf, 1.5, 1.25, inf]
    """
    distances = [0.0] * len(points)
    for axis in range(len(points[0]) if points else 0):
        order = sorted(range(len(points)), key=lambda place: points[place][axis])
        low, high = points[order[0]][axis], points[order[-1]][axis]
        if high > low:
            distances[order[0]] = distances[order[-1]] = math.inf
            for before, place, after in zip(order, order[1:], order[2:], strict=False):
                # Two differences: their sum could overflow where each does not.
                distances[place] += (points[after][axis] - points[before][axis]) / (high - low)
    return distances


class ParetoOrder:
    """Trials in the order above; one is added in O(log n) for each front that changes, with two objectives.

    Always true: each front is sorted by its points, no trial in it dominates another, and each of its trials is
    dominated by one of the front before.

    >>> order = ParetoOrder()
    >>> for trial, point in enumerate([(3, 3), (1, 4), (4, 1), (2, 2)]):
    ...     order.add(trial, Losses(point))
    >>> order.add(4, Losses((0, 0), excesses=(0.5,)))
    >>> list(order), order.front
    ([1, 2, 3, 0, 4], [1, 2, 3])
    """

    def __init__(self) -> None:
        self._losses: dict[int, Losses | None] = {}
        self._fronts: list[list[tuple[Vector, int]]] = []  # each sorted
        self._ordered: list[list[int] | None] = []  # for each front its trials, best first; None: not known
        self._level: dict[int, int] = {}  # the front of each feasible trial
        self._infeasible: list[tuple[float, int]] = []  # sorted; the violation may be inf

    def add(self, trial: int, losses: Losses | None) -> None:
        """Add a trial; None: its losses are not finite."""
        self._losses[trial] = losses
        if losses is None or losses.violation:
            insort(self._infeasible, (_violation(losses), trial))
        else:
            self._add(losses.values, trial)

    def remove(self, trial: int) -> None:
        """Remove a trial, which is rare: O(n log n) if it is feasible."""
        losses = self._losses.pop(trial)
        if losses is None or losses.violation:
            self._infeasible.remove((_violation(losses), trial))
            return
        self._fronts, self._ordered, self._level = [], [], {}
        # In the order of the points, each only has to find its front.
        kept = ((its.values, other) for other, its in self._losses.items() if its is not None and not its.violation)
        for point, other in sorted(kept):
            self._add(point, other)

    def is_among(self, trial: int, count: int) -> bool:
        level = self._level.get(trial)
        if level is None:
            place = bisect_left(self._infeasible, (_violation(self._losses[trial]), trial))
            return len(self._level) + place < count
        before = sum(map(len, self._fronts[:level]))
        left = count - before
        return left >= len(self._fronts[level]) or (left > 0 and trial in self._in_order(level)[:left])

    def __iter__(self) -> Iterator[int]:
        for level in range(len(self._fronts)):
            yield from self._in_order(level)
        yield from (trial for _, trial in self._infeasible)

    def last(self) -> int:
        if self._infeasible:
            return self._infeasible[-1][1]
        return self._in_order(len(self._fronts) - 1)[-1]

    @property
    def front(self) -> list[int]:
        """The trials of the first front, best first; [] if no trial keeps the constraints."""
        return list(self._in_order(0)) if self._fronts else []

    def front_of(self, trial: int) -> int | None:
        """The number of the trial's front, from 1; None if it does not keep the constraints."""
        level = self._level.get(trial)
        return None if level is None else level + 1

    def _in_order(self, level: int) -> list[int]:
        known = self._ordered[level]
        if known is None:
            members = sorted(self._fronts[level], key=lambda member: member[1])
            distances = crowding_distances([point for point, _ in members])
            ranks = sorted(range(len(members)), key=lambda place: -distances[place])  # stable: then by number
            known = self._ordered[level] = [members[place][1] for place in ranks]
        return known

    def _add(self, point: Vector, trial: int) -> None:
        """Put a feasible trial in its front. Those that it dominates there move to the next one, and so on."""
        level = bisect_left(self._fronts, 1, key=lambda front: not _dominated_in(front, point))
        moving = [(point, trial)]
        while moving:
            if level == len(self._fronts):
                self._fronts.append([])
                self._ordered.append(None)
            front = self._fronts[level]
            self._ordered[level] = None
            displaced: list[tuple[Vector, int]] = []
            for member in moving:
                displaced += _take_dominated(front, member[0])
            for member in moving:
                insort(front, member)
                self._level[member[1]] = level
            moving = displaced
            level += 1


def _violation(losses: Losses | None) -> float:
    return math.inf if losses is None else losses.violation


def _dominated_in(front: Sequence[tuple[Vector, int]], point: Vector) -> bool:
    """Whether a member of the sorted front dominates the point."""
    before = bisect_left(front, (point,))
    if len(point) == 2:  # of those before it, the last has the least second coordinate
        return before > 0 and front[before - 1][0][1] <= point[1]
    return any(dominates(front[place][0], point) for place in range(before))


def _take_dominated(front: list[tuple[Vector, int]], point: Vector) -> list[tuple[Vector, int]]:
    """Remove and return the members of the sorted front that the point dominates."""
    begin = bisect_left(front, (point,))
    if len(point) == 2:  # they follow each other
        end = begin
        while end < len(front) and front[end][0][1] >= point[1]:
            end += 1
        taken = [member for member in front[begin:end] if member[0] != point]
        front[begin:end] = [member for member in front[begin:end] if member[0] == point]
        return taken
    taken = [member for member in front[begin:] if dominates(point, member[0])]
    if taken:
        front[begin:] = [member for member in front[begin:] if not dominates(point, member[0])]
    return taken


def ordered(losses: Mapping[int, Losses | None]) -> ParetoOrder:
    order = ParetoOrder()
    for trial, its in losses.items():
        order.add(trial, its)
    return order
