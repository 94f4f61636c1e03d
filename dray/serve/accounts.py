"""The accounts of tokens: what their experiments have spent, and what is reserved for those that may still spend.

Pure. The queue's journal has each experiment's owner, its budget, and what it had spent when its process last ended,
also of experiments that were deleted since; so nothing is forgotten when the server dies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dray.serve.queue import Item, Queue
from dray.serve.quota import OVERRUN, UNITS, Quota, Use, check_prices, check_room


class Accounts:
    """The accounts.

    Args:
        queue: all experiments.
        quota_of: the quota of an owner.
        is_live: whether an experiment is queued or running, or its trials have yet to leave: it may spend its budget.
    """

    def __init__(self, queue: Queue, quota_of: Callable[[str], Quota], is_live: Callable[[Item], bool]) -> None:
        self._queue, self.quota_of, self._is_live = queue, quota_of, is_live
        self._spent: dict[str, Mapping[str, float]] = {}  # of live experiments, as last heard

    def spends(self, name: str, spent: Mapping[str, float]) -> None:
        """Note what a live experiment has spent so far."""
        self._spent[name] = spent

    def settle(self, name: str) -> None:
        """Record what an experiment has spent, as its process and its trials have ended."""
        if (spent := self._spent[name]) != self._queue.item(name).spent:
            self._queue.spent(name, spent)
        del self._spent[name]

    def spent(self, item: Item) -> Mapping[str, float]:
        """What an experiment has spent; it never decreases."""
        now = self._spent.get(item.name, {})
        return {unit: max(now.get(unit, 0.0), item.spent.get(unit, 0.0)) for unit in UNITS}

    def use(self, owner: str, *, but: str = "", slots: float = 0.0) -> Use:
        """What an owner's experiments use, without the one that is named `but`."""
        used = {unit: self._queue.deleted_spent.get(owner, {}).get(unit, 0.0) for unit in UNITS}
        reserved, experiments = dict.fromkeys(UNITS, 0.0), 0
        for item in self._queue.items():
            if item.owner != owner or item.name == but:
                continue
            is_live = self._is_live(item)
            experiments += is_live
            for unit, spent in self.spent(item).items():
                used[unit] += spent
                reserved[unit] += max(item.budget.get(unit, 0.0) - spent, 0.0) if is_live else 0.0
        return Use(used=used, reserved=reserved, experiments=experiments, slots=slots)

    def admit(self, item: Item, budget: Mapping[str, float] | None = None, *, prices: object = None) -> None:
        """Check that an experiment may be queued, with another budget and prices if they are given; else `OverQuota`,
        or a `ConfigError`."""
        if item.owner:
            quota, others = self.quota_of(item.owner), self.use(item.owner, but=item.name)
            check_prices(item.owner, quota, prices)
            check_room(item.owner, quota, others, item.budget if budget is None else budget, self.spent(item))

    def overrun(self) -> list[tuple[Item, str]]:
        """Live experiments that have exceeded their budgets so far that their owner's quota is exceeded, and why each
        must end at once."""
        found = []
        for name, spent in self._spent.items():
            item = self._queue.item(name)
            for unit, limit in self.quota_of(item.owner).spendable.items() if item.owner else ():
                if spent.get(unit, 0.0) <= item.budget.get(unit, 0.0):
                    continue
                use = self.use(item.owner)
                if use.used[unit] + use.reserved[unit] > limit * (1 + OVERRUN):
                    used = f"token {item.owner} has used {use.used[unit]:.6g} of {limit:.6g} {UNITS[unit]}"
                    found.append((item, f"ended at once, without saving: {used}, and this experiment its whole budget"))
                    break
        return found
