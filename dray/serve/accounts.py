"""The accounts of tokens: what their experiments have spent, and what is reserved for those that may still spend.

Pure. The queue's journal has each experiment's owner, its budget, and what it had spent when its process last ended,
also of experiments that were deleted since; so nothing is forgotten when the server dies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from dray.records.directory import ExperimentDirectory
from dray.records.spending import Spending
from dray.serve.queue import Item, Queue
from dray.serve.quota import OVERRUN, UNITS, Quota, Use, check_prices, check_room
from dray.serve.tokens import Tokens


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


class Meters:
    """One meter for each experiment that may spend, with the prices of its owner's quota."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._meters: dict[str, Spending] = {}

    def read(self, items: Iterable[Item], soon: float) -> dict[str, Mapping[str, float]]:
        """What each of these experiments will have spent by a time (Unix time in s)."""
        return {item.name: _by_unit(self._meter(item).by(soon)) for item in items}

    def close(self, item: Item, ended: float | None = None) -> dict[str, float]:
        """What an experiment has spent whose process and trials have ended; if they were killed, its timeline does not
        say when. `ended`: when its last trial left (Unix time in s); None: the server was killed too."""
        meter = self._meter(item)
        with suppress(OSError):
            last = meter.last_alive(item.budget) if ended is None else ended
            meter.close(ExperimentDirectory(item.path).metrics, last)
        del self._meters[item.name]
        return _by_unit(meter.usage.spent)

    def _meter(self, item: Item) -> Spending:
        meter = self._meters.setdefault(item.name, Spending(self._tokens.quota(item.owner).prices))
        with suppress(OSError, ValueError, LookupError, TypeError):  # deleted, or changed by the trials' code
            meter.read(ExperimentDirectory(item.path).metrics)
        return meter


def _by_unit(spent: Mapping[str, float]) -> dict[str, float]:
    return {unit: spent[unit] for unit in UNITS}
