"""How many slots each experiment should have: strict priorities, and fair shares by weight within one.

Pure: no clock. Who holds slots beyond a share gives them back when a trial ends; for a higher priority, at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dray.config import defaults

QUANTUM = 60.0
"""Slot-seconds, by weight, that one experiment may be ahead of another before they take turns: groups of other sizes
need other processes, so each turn costs a start of some seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What an experiment asks for, what it may have, and what it has."""

    name: str  # unique
    groups: int  # how many worker groups it could use now
    has: int = 0  # how many it has
    # Slots of one of its groups; 1/n if n groups share a slot. A slot is a GPU, or without GPUs a CPU.
    size: float = 1
    priority: int = defaults.PRIORITY  # 1 to 99; smaller numbers go first, as in Determined
    weight: float = 1.0  # of its share among those with the same priority, > 0
    max_slots: float | None = None  # the most that it may have; None: no limit
    shape: str = ""  # of its groups: equal groups have equal shapes
    kind: str = "cpu"  # of its slots, "gpu" or "cpu"
    unit: float = 1.0  # GPUs of a slot, or CPUs

    @property
    def most(self) -> int:
        """How many groups it may have."""
        return most_groups(self.groups, self.size, self.max_slots)


def most_groups(groups: int, size: float, max_slots: float | None) -> int:
    """How many of so many groups of this size may be had within these slots."""
    return groups if max_slots is None or math.isinf(max_slots) else min(groups, math.floor(max_slots / size))


class Shares:
    """Divides slots, and remembers who had how many, so that those who don't fit side by side take turns.

    >>> shares = Shares()
    >>> shares.divide([Demand(name="a", groups=9), Demand(name="b", groups=9, weight=3)], slots=8)
    {'a': 2, 'b': 6}
    """

    def __init__(self) -> None:
        self._had: dict[str, float] = {}

    @property
    def had(self) -> Mapping[str, float]:
        """Slot-seconds by weight, of each experiment that asks for slots."""
        return self._had

    def passed(self, seconds: float, held: Mapping[str, float], weights: Mapping[str, float]) -> None:
        """For so long, each experiment had so many slots."""
        for name, slots in held.items():
            if name in self._had:
                self._had[name] += seconds * slots / weights[name]

    def divide(self, demands: Iterable[Demand], slots: float) -> dict[str, int]:
        """The number of groups that each experiment should have.

        Within a priority, the next group goes to the experiment with the fewest slots by weight; among equals, to the
        one that has had the fewest so far. If that one's groups are too large for what is left, smaller ones fill the
        rest: it gets its turn once it is behind by more than `QUANTUM`.

        Args:
            demands: of all experiments. One that is new begins with as much as the one that has had the fewest.
            slots: how many there are.
        """
        demands = list(demands)
        least = min((self._had[demand.name] for demand in demands if demand.name in self._had), default=0.0)
        self._had = {demand.name: self._had.get(demand.name, least) for demand in demands}
        given = {demand.name: 0 for demand in demands}
        for priority in sorted({demand.priority for demand in demands}):
            open_ = [demand for demand in demands if demand.priority == priority]
            while open_ := [each for each in open_ if given[each.name] < each.most and each.size <= slots]:
                # min() keeps the order of demands that are equal: who came first goes first.
                chosen = min(open_, key=lambda each: (given[each.name] * each.size / each.weight, self._turn(each)))
                given[chosen.name] += 1
                slots -= chosen.size
        return given

    def _turn(self, demand: Demand) -> int:
        return math.floor(self._had[demand.name] / QUANTUM)
