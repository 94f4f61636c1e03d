"""What an experiment has spent of its budget: time, slot-hours and money, from the timeline of its worker groups."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict

from dray.text import seconds_of
from searchers import rows
from searchers.rows import NUMBER, Fields, by_kind

if TYPE_CHECKING:
    from dray.config.schema import ExperimentConfig

FILE = "_timeline.jsonl"
ALIVE_S, ALIVE_SHARE = 10.0, 0.002
"""How often, in seconds and in shares of a budget, the timeline notes that the run goes on; a killed run counts up to
then."""
AFTER_S = 0.5
"""How long after that a run may have been alive, as its driver looks a few times a second, and its workers end last."""
_HOUR_S = 3600.0
_GROUP: Fields = {"group": (str,)}
check = by_kind(
    "event",
    {
        "starts": {**_GROUP, "slots": NUMBER},
        "ends": _GROUP,
        "arrived": _GROUP,
        "joined": _GROUP,
        "granted": {**_GROUP, "trial": (int,), "gpu_type": (str, NoneType), "slot_type": (str, NoneType)},
        "left": {**_GROUP, "trial": (int,)},
    },
    {"time": NUMBER},
)
"""What is wrong with an event of a timeline; "" if it may have been written."""
_NO_PRICES: Mapping[str, float] = MappingProxyType({})


class Spent(TypedDict):
    """What is spent of a total of the budget; the time in seconds."""

    spent: float
    total: float


def totals_of(budget: Mapping[str, Any] | None) -> dict[str, float]:
    """The amounts of a config's budget, by field; the time in seconds."""
    given = {name: total for name, total in (budget or {}).items() if total is not None}
    return {name: seconds_of(total) if name == "time" else total for name, total in given.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What has been spent, by field of the budget (the time in seconds), and how fast it grows now."""

    spent: Mapping[str, float]
    per_s: Mapping[str, float]


@dataclass(slots=True)
class _Group:
    slots: float
    is_up: bool = False  # before that, it may wait for a node
    kind: str = ""  # the type of its slots; "" until its first trial
    slot_s: float = 0.0  # while the type is not known


class Spending:
    """The sum of a timeline's events.

    The driver adds events as they happen; readers add those of the file, with the same result. A run that was killed
    counts up to its last event, so that a driver with a budget records regularly that it is alive.

    Args:
        prices: US dollars per slot-hour, by slot type. Slots of a type that is not known yet have the highest price.
    """

    def __init__(self, prices: Mapping[str, float] = _NO_PRICES) -> None:
        self.prices = prices
        self._groups: dict[str, _Group] = {}
        self._is_open = self._needs_slots = False
        self._now = self._time_s = 0.0
        self._slot_s: defaultdict[str, float] = defaultdict(float)  # by slot type
        self._read = self._lines = 0  # bytes and lines of the file

    def read(self, directory: Path) -> None:
        """Add the events that were written to the timeline in a directory of metrics since the last call."""
        data = rows.read(directory / FILE, self._read, missing=b"")
        data = data[: data.rfind(b"\n") + 1]
        for event in rows.lenient(data, directory / FILE, check, first=self._lines + 1):
            self.add(event)
        self._read += len(data)
        self._lines += data.count(b"\n")

    def add(self, event: Mapping[str, Any]) -> None:
        """Add an event of the timeline."""
        name = event["event"]
        if name == "opened":
            self._end_groups()
            self._now, self._is_open = max(self._now, event["time"]), True
            self._needs_slots = event.get("lent", False)
            return
        self._advance(event["time"])
        if name == "closed":
            self._end_groups()
            self._is_open = False
        if name == "starts":
            self._groups[event["group"]] = _Group(event["slots"])
        if (group := self._groups.get(event.get("group", ""))) is None:
            return
        group.is_up |= name != "starts"
        if kind := event.get("slot_type", ""):
            self._slot_s[kind] += group.slot_s
            group.kind, group.slot_s = kind, 0.0
        if name == "ends":
            self._slot_s[""] += self._groups.pop(event["group"]).slot_s

    def _end_groups(self) -> None:
        self._slot_s[""] += sum(group.slot_s for group in self._groups.values())
        self._groups.clear()

    def _advance(self, now: float) -> None:
        seconds = max(now - self._now, 0.0)
        self._now += seconds
        up = [group for group in self._groups.values() if group.is_up]
        if self._is_open and (up or not self._needs_slots):
            self._time_s += seconds
        for group in up:
            if group.kind:
                self._slot_s[group.kind] += seconds * group.slots
            else:
                group.slot_s += seconds * group.slots

    def at(self, now: float) -> Usage:
        """What has been spent until now (Unix time in s)."""
        self._advance(now)
        return self.usage

    def by(self, now: float) -> dict[str, float]:
        """What will have been spent by a time (Unix time in s) if no further event comes."""
        usage = self.usage
        seconds = max(now - self._now, 0.0) if self._is_open else 0.0
        return {name: spent + seconds * usage.per_s[name] for name, spent in usage.spent.items()}

    def last_alive(self, budget: Mapping[str, float]) -> float:
        """The last time at which a run may have been alive that has noted no further event."""
        rates = self.usage.per_s
        shares = (ALIVE_SHARE * total / rates[name] for name, total in budget.items() if rates[name])
        return self._now + AFTER_S + min((ALIVE_S, *shares))

    def close(self, directory: Path, now: float) -> None:
        """Note the end of a run that was killed, in its place: until now, it held its groups."""
        if not self._is_open:
            return
        event = {"event": "closed", "time": now}
        self.add(event)
        rows.cut_incomplete(directory / FILE)  # it may have been killed while it wrote
        with (directory / FILE).open("ab") as file:
            file.write(json.dumps(event).encode() + b"\n")

    @property
    def usage(self) -> Usage:
        """What has been spent until the last event."""
        slot_s, slots = self._slot_s.copy(), defaultdict[str, float](float)
        for group in self._groups.values():
            slot_s[""] += group.slot_s
            slots[group.kind] += group.slots * group.is_up
        counts = self._is_open and (bool(sum(slots.values())) or not self._needs_slots)
        return Usage(
            spent={"time": self._time_s, "slot_hours": sum(slot_s.values()) / _HOUR_S, "usd": self._usd(slot_s)},
            per_s={"time": float(counts), "slot_hours": sum(slots.values()) / _HOUR_S, "usd": self._usd(slots)},
        )

    def _usd(self, slot_s: Mapping[str, float]) -> float:
        highest = max(self.prices.values(), default=0.0)
        return sum(seconds * self.prices.get(kind, highest) for kind, seconds in slot_s.items()) / _HOUR_S


def spending_of(config: ExperimentConfig, directory: Path) -> Spending:
    """What an experiment has spent, by the timeline in the directory of its metrics; nothing without a budget."""
    found = Spending(config.prices or {})
    if config.budget is not None:
        found.read(directory)
    return found


def spent_of(name: str, spent: float, total: float) -> str:
    """What has been spent of one field of the budget, as text.

    >>> spent_of("time", 4320, 7200), spent_of("slot_hours", 38.16, 40), spent_of("usd", 181.2, 200)
    ('1.2 of 2 h', '38.2 of 40 slot-hours', '$181.20 of $200')
    >>> spent_of("time", 66, 7200)
    '1.1 min of 2 h'
    """
    if name == "usd":
        return f"${spent:.2f} of ${total:g}"
    if name == "slot_hours":
        return f"{spent:.3g} of {total:g} slot-hours"
    (seconds, unit), (own, its) = _unit(total), _unit(spent or total)
    return f"{spent / own:.3g}{'' if its == unit else f' {its}'} of {total / seconds:g} {unit}"


def in_config(name: str, total: float) -> str:
    """A total of the budget as in a config, a time rounded up to its unit: "4h" for 14400.0 seconds."""
    seconds, unit = _unit(total)
    return f"{math.ceil(total / seconds)}{unit[0]}" if name == "time" else f"{total:g}"


def _unit(seconds: float) -> tuple[int, str]:
    return next((each for each in ((3600, "h"), (60, "min")) if seconds >= each[0]), (1, "s"))
