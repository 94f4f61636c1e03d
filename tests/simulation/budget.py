"""A simulated experiment's timeline, its user's budget, and an account of the time that it really ran."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dray.records.spending import ALIVE_S, ALIVE_SHARE, Spending, Usage
from tests.simulation.setup import in_config
from tests.simulation.world import TICK_S, Failed, World

GROWTH = 3
"""The factor by which the user extends a budget that is spent."""


class Account:
    """The parts that outlive the experiment's processes.

    Attributes:
        budget: its totals, the time in s.
        ends: number of times that the budget was spent.
    """

    def __init__(self, world: World, budget: Mapping[str, float]) -> None:
        self._world, self.budget, self.ends = world, dict(budget), 0
        self._timeline: list[dict[str, Any]] = []
        self._ran_s, self._began, self._kills = 0.0, 0.0, 0
        self._peak: dict[str, float] = {}  # the greatest rates
        self._told = 0.0, 0.0  # share and time of the last event "alive"
        self.spending = Spending()

    def open(self) -> None:
        """A process reads the timeline."""
        self.spending = Spending()
        for event in self._timeline:
            self.spending.add(event)

    def begin(self, *, lent: bool) -> None:
        """The process records its run."""
        self._began = self._world.now
        self.note("opened", lent=lent)

    def note(self, event: str, **fields: Any) -> None:
        record = {"event": event, "time": self._world.now, **fields}
        self._timeline.append(record)
        self.spending.add(record)
        rates = self.spending.usage.per_s
        self._peak = {name: max(rate, self._peak.get(name, 0.0)) for name, rate in rates.items()}

    def usage(self, share: float) -> Usage:
        """What has been spent, with the share of the budget at the last call."""
        if self.budget and (share - self._told[0] >= ALIVE_SHARE or self._world.now - self._told[1] >= ALIVE_S):
            self._told = share, self._world.now
            self.note("alive")
        return self.spending.at(self._world.now)

    def end(self, *, killed: bool) -> None:
        """The process has ended."""
        self._kills += killed
        self._ran_s += self._world.now - self._began

    def spent(self, share: float, *, own: bool) -> None:
        """Check the decision to end: at most 1% too late, and by an account of all time that was spent, except for the
        last seconds of killed processes."""
        self.ends += 1
        usage = self.spending.usage
        known = usage.spent["time"]
        for name, total in self.budget.items():
            if usage.spent[name] > 1.01 * total + 2 * TICK_S * self._peak[name]:
                raise Failed(f"{share:.1%} of the budget are spent: {self.budget}, {usage.spent}")
        really = self._ran_s + self._world.now - self._began
        lost = self._kills * min(ALIVE_S, ALIVE_SHARE * self.budget.get("time", 1e9) + TICK_S)
        # On a server, only time with slots counts.
        if known > really + TICK_S or (own and known < really - lost - TICK_S):
            raise Failed(f"it ran for {really:.1f} s, with {self._kills} kills, but knows of {known:.1f} s")

    def extended(self) -> tuple[tuple[str, Any], ...]:
        """The user's extension."""
        self.budget = {name: GROWTH * total for name, total in self.budget.items()}
        return (("budget", in_config(self.budget)),)
