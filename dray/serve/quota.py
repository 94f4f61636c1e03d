"""Quotas of tokens: what all experiments of a token may use together.

Slot-hours and money are reserved: an experiment needs a budget for each of them that has a quota, and is accepted if
the quota has room for it. Then the experiment's own budget keeps the quota, whatever dies meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dray.config import defaults
from dray.config.yaml_file import with_values
from dray.errors import ConfigError, Fault
from dray.serve.refusals import OverQuota
from dray.text import counted

UNITS = {"slot_hours": "slot-hours", "usd": "US dollars"}
"""What is reserved, with its unit: fields of a quota, and of a config's budget."""
OVERRUN = 0.01
"""The share of a quota by which trials that are slow to save may exceed it; then they are ended without."""
ORIGIN = "The experiment config"
ROUNDING = 1e-9  # relative; sums of floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limits for all experiments of a token together. None: no limit."""

    slots: int | None = None  # at a time
    slot_hours: float | None = None  # ever
    usd: float | None = None  # ever, by `prices`
    experiments: int | None = None  # queued or running at a time
    priority: int | None = None  # the smallest number that they may have
    prices: Mapping[str, Any] = field(default_factory=dict)  # US dollars per slot-hour, by slot type
    sandbox: bool = False  # their trials run in sandboxes, and their configs reach nothing beyond these

    @property
    def spendable(self) -> dict[str, float]:
        """The limits of what is reserved."""
        return {name: limit for name in UNITS if (limit := getattr(self, name)) is not None}

    def faults(self) -> list[Fault]:
        """What is wrong with the limits."""
        bounds = {"slots": defaults.MAX_SLOTS, "slot_hours": 1e9, "usd": 1e9, "experiments": 1_000_000, "priority": 99}
        found = []
        for name, most in bounds.items():
            value = getattr(self, name)
            if value is not None and not 0 < value <= most:  # also NaN
                found.append(Fault(name, f"must be more than 0, and at most {most:g}, got {value:g}"))
        for kind, price in self.prices.items():
            if not isinstance(price, int | float) or not 0 <= price < math.inf:
                what = f"must be a price >= 0 in US dollars per slot-hour, got {kind}={price!r:.40}"
                found.append(Fault("price", what))
        if (self.usd is None) != (not self.prices):
            given = "prices without usd, which they are for" if self.prices else "usd without prices"
            found.append(Fault("price", f"got {given}; give both, such as --usd 5 --price A100=2.9 --price CPU=0.1"))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What the experiments of a token use. `used`, `reserved`: by names of `UNITS`."""

    used: Mapping[str, float]  # ever
    reserved: Mapping[str, float]  # what queued and running ones may still spend
    experiments: int = 0  # queued or running
    slots: float = 0.0  # in use now

    def left(self, quota: Quota) -> dict[str, float | None]:
        """What is left of each limit; None: there is no limit."""
        now = {name: self.used[name] + self.reserved[name] for name in UNITS}
        now |= {"slots": self.slots, "experiments": self.experiments}
        limits = {name: getattr(quota, name) for name in ("slots", *UNITS, "experiments")}
        return {name: None if limit is None else max(0, limit - now[name]) for name, limit in limits.items()}


NOTHING = Use(used=dict.fromkeys(UNITS, 0.0), reserved=dict.fromkeys(UNITS, 0.0))


def check_room(owner: str, quota: Quota, others: Use, budget: Mapping[str, float], spent: Mapping[str, float]) -> None:
    """Check that an experiment may be queued; `OverQuota` says why it may not.

    Args:
        others: the use of the other experiments of its owner.
        budget: the totals of its budget.
        spent: what it has spent.
    """
    if quota.experiments is not None and others.experiments >= quota.experiments:
        raise OverQuota(
            f"token {owner} may have {counted(quota.experiments, 'experiment')} queued or running, "
            f"and has {others.experiments}; wait until one has ended, or stop one"
        )
    for name, limit in quota.spendable.items():
        left = limit - others.used[name] - others.reserved[name]
        asked = max(budget.get(name, math.inf), spent.get(name, 0.0))
        if asked <= left + ROUNDING * limit and left > 0:
            continue
        asks = f", and this one asks for {asked:.6g}" if 0 < asked < math.inf else ""
        if (has := spent.get(name, 0.0)) and has == asked:
            asks = f", and this one has spent {has:.6g} itself"
        fits = left > spent.get(name, 0.0)
        remedy = f"give a budget.{name} of at most that" if fits else "ask the operator for another token"
        if others.reserved[name]:
            remedy += ", or wait until one has ended, or stop one"
        raise OverQuota(
            f"token {owner} has a quota of {limit:.6g} {UNITS[name]}: other experiments have used "
            f"{others.used[name]:.6g} and reserved {others.reserved[name]:.6g}, so {max(left, 0):.6g} are left{asks}; "
            f"{remedy}"
        )


def check_priority(owner: str, quota: Quota, priority: int, place: str = "priority") -> None:
    """Check an experiment's priority against its token's; a `ConfigError` if it is too small."""
    if quota.priority is not None and priority < quota.priority:
        what = f"must be {quota.priority} or more with token {owner}, got {priority}"
        raise ConfigError([Fault(place, what)], "The request")


def check_prices(owner: str, quota: Quota, prices: object) -> None:
    """Check prices that a user gives: a `ConfigError` if the quota has others."""
    if quota.usd is not None and prices is not None and prices != quota.prices:
        raise ConfigError(
            [Fault("prices", f"are {dict(quota.prices)} with token {owner}; leave them out")], "The request"
        )


def fitted(content: Mapping[Any, Any], quota: Quota, use: Use) -> tuple[dict[Any, Any], dict[str, Any]]:
    """A config with the fields that its owner's quota sets, and these fields, with dots. A `ConfigError` if the config
    names a file of prices."""
    if isinstance(content.get("prices"), str):  # it would be read here, and shown in errors
        raise ConfigError([Fault("prices", "must be prices by slot type with this token, not a file")], ORIGIN)
    fields = _fields(content, quota, use)
    return with_values(content, fields, ORIGIN), fields


def _fields(content: Mapping[Any, Any], quota: Quota, use: Use) -> dict[str, Any]:
    """The fields that a quota sets in a config: limits that the config does not have, or lower ones; and the prices."""
    found: dict[str, Any] = {}
    resources, budget = _section(content, "resources"), _section(content, "budget")
    if quota.priority is not None and resources.get("priority") is None and quota.priority > defaults.PRIORITY:
        found["resources.priority"] = quota.priority
    if quota.slots is not None:
        given = resources.get("max_slots")
        if given is None or (isinstance(given, int) and given > quota.slots):
            found["resources.max_slots"] = quota.slots
    if quota.sandbox and content.get("isolation") is None:
        found["isolation"] = "sandbox"
    left = use.left(quota)
    for name in quota.spendable:
        if budget.get(name) is None:
            found[f"budget.{name}"] = left[name]
    if quota.usd is not None and content.get("prices") != quota.prices:
        found["prices"] = dict(quota.prices)
    return found


def _section(content: Mapping[Any, Any], name: str) -> Mapping[Any, Any]:
    section = content.get(name)
    return section if isinstance(section, Mapping) else {}
