"""Division of slots among experiments: strict priorities, and fair shares by weight within a priority.

Pure: no clock. Slots beyond an experiment's share are returned when a trial ends; for a higher priority, at once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dray.config import defaults

QUANTUM = 60.0
"""Slot-seconds by weight that one experiment may be ahead of another before they take turns. Groups of different sizes
need different processes, so each turn costs a start of some seconds."""

TINY = 1e-9
"""Fractions of slots are sums of floats."""


@dataclass(slots=True, kw_only=True)
class Claim:
    """An experiment's claim to slots: the size of its groups, its priority and share, and its limits."""

    name: str  # unique
    # Slots of one of its groups; 1/n if n groups share a slot. A slot is a GPU, or without GPUs a CPU.
    size: float = 1
    priority: int = defaults.PRIORITY  # 1 to 99; smaller numbers go first, as in Determined
    weight: float = 1.0  # its share relative to others with the same priority, > 0
    max_slots: float | None = None  # most slots at a time; None: no limit
    shape: str = ""  # its groups' shape: equal groups have equal shapes
    kind: str = "cpu"  # its slots' kind, "gpu" or "cpu"
    unit: float = 1.0  # GPUs or CPUs of a slot
    account: str = ""  # experiments of one account share a limit; "": it has none
    account_slots: float | None = None  # most slots of all its experiments at a time; None: no limit


@dataclass(slots=True, kw_only=True)
class Demand(Claim):
    """An experiment's demand for groups, and the groups that it has, at one time."""

    groups: int  # number of worker groups that it could use now
    has: int = 0  # number of groups that it has

    @property
    def most(self) -> int:
        """The most groups that it may have."""
        return most_groups(self.groups, self.size, self.max_slots)


def most_groups(groups: int, size: float, max_slots: float | None) -> int:
    """The number of groups of this size, out of `groups`, that `max_slots` allow."""
    return groups if max_slots is None or math.isinf(max_slots) else min(groups, math.floor(max_slots / size))


def fits_account(demand: Demand, held: float) -> bool:
    """Whether an account that holds this many slots may have another group of a demand."""
    return demand.account_slots is None or held + demand.size / demand.unit <= demand.account_slots + TINY


class Shares:
    """Divides slots, and remembers each experiment's past slots, so that those that don't fit side by side take turns.

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
        """Note the slots that each experiment has held for this time."""
        for name, slots in held.items():
            if name in self._had:
                self._had[name] += seconds * slots / weights[name]

    def divide(self, demands: Iterable[Demand], slots: float) -> dict[str, int]:
        """The number of groups that each experiment should have.

        Within a priority, the next group goes to the experiment with the fewest slots by weight; among equals, to the
        one with the fewest slot-seconds so far. If its groups are too large for the remaining slots, smaller ones fill
        the rest: it gets its turn once it is behind by more than `QUANTUM`.

        Args:
            demands: the demands of all experiments. A new one starts with the least slot-seconds of the others.
            slots: the number of slots.
        """
        demands = list(demands)
        least = min((self._had[demand.name] for demand in demands if demand.name in self._had), default=0.0)
        self._had = {demand.name: self._had.get(demand.name, least) for demand in demands}
        given = {demand.name: 0 for demand in demands}
        held: defaultdict[str, float] = defaultdict(float)  # slots by account
        for priority in sorted({demand.priority for demand in demands}):
            open_ = [demand for demand in demands if demand.priority == priority]
            while open_ := [
                each
                for each in open_
                if given[each.name] < each.most and each.size <= slots and fits_account(each, held[each.account])
            ]:
                # min() keeps the order of equal demands: first come, first served.
                chosen = min(open_, key=lambda each: (given[each.name] * each.size / each.weight, self._turn(each)))
                given[chosen.name] += 1
                slots -= chosen.size
                held[chosen.account] += chosen.size / chosen.unit
        return given

    def _turn(self, demand: Demand) -> int:
        return math.floor(self._had[demand.name] / QUANTUM)
