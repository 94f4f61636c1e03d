"""Decides when an experiment ends before its search does: at its budget, its target, or the end of its patience.

The end is that of a run: for the search, the experiment is interrupted, so that it goes on with the same decisions once
its limits are raised.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dray.config.schema import ExperimentConfig
from dray.records.spending import Usage, in_config, spent_of, totals_of
from dray.text import counted
from searchers.records import number_from_json, repeats_in

NEARLY_SPENT = 0.9
"""The share of the budget from which on no trial begins that would not reach its next rung."""
RECENT = 64
"""The number of measured speeds whose median is that of a trial that has not been measured."""


@dataclass(slots=True)
class _Pace:
    """A running trial's training, in the searcher's unit of length."""

    first: tuple[float, float]  # step and time of its first report in this lease
    last: tuple[float, float]

    @property
    def s_per_unit(self) -> float | None:
        steps = self.last[0] - self.first[0]
        return (self.last[1] - self.first[1]) / steps if steps > 0 else None


class Limits:
    """The limits of an experiment. Times are in seconds, from any clock.

    Args:
        config: the experiment's config, as extended.
        records: the journal's records so far.

    Attributes:
        reason: why the experiment ends, in words; "" while it goes on.
        remedy: the options of ``dray experiment extend`` with which it would go on.
        is_recorded: whether the journal has the reason.
        usage: the budget and what is spent of it, in words; "" without a budget.
        share: the share of the budget that is spent.
        metric: the metric whose gains count: the searcher's, or the first objective.
        totals: the amounts of the budget, by field.
        without_gain: how many trials in a row have ended without a better first metric.
    """

    def __init__(self, config: ExperimentConfig, records: Iterable[Mapping[str, Any]] = ()) -> None:
        searcher = config.searcher
        self.totals = totals_of(None if config.budget is None else config.budget.model_dump())
        self._until, self._patience = config.until or {}, config.patience
        self.metric, self._sign, self._objectives = searcher.first_metric, searcher.sign, searcher.objectives
        self._names = (self.metric,) if self._objectives is None else self._objectives.names
        self._signs = {self.metric: self._sign}
        for each in () if self._objectives is None else self._objectives.metrics:
            larger = each.at_least is not None if each.is_constraint else not each.smaller_is_better
            self._signs.setdefault(each.name, -1 if larger else 1)
        self.reason = self.usage = self.remedy = ""
        self.share = 0.0
        self.is_recorded = False
        self._best: tuple[float, int] | None = None  # smaller is better; and its trial
        self.without_gain = 0
        self._repeats: set[int] = set()  # patience is about the search, which has ended before them
        self._left_s, self._limit = math.inf, ""
        self._paces: dict[int, _Pace] = {}
        self._recent: deque[float] = deque(maxlen=RECENT)
        for record in records:
            self.record(record)

    # ------------------------------------------------------------------ target and patience
    def record(self, record: Mapping[str, Any]) -> None:
        """Take a record of the search's journal."""
        trial = record.get("trial", -1)
        self._repeats.update(repeats_in(record))
        match record.get("event"):
            case "ended" | "limits" | "extended" | "requested" as event:
                self.is_recorded = event == "ended"
            case "reported":
                values = [record.get("value")] if self._objectives is None else record.get("metrics", ())
                values = [*map(number_from_json, values)]
                self._validated(trial, dict(zip(self._names, values, strict=False)))  # a trial may report none
                score = self._score(values)
                if score is not None and (self._best is None or score < self._best[0]):
                    self._best, self.without_gain = (score, trial), 0
            case "exited" if record["reason"] in ("completed", "stopped") and trial not in self._repeats:
                self.without_gain += self._best is None or self._best[1] != trial
                if self._patience is not None and self.without_gain >= self._patience:
                    reason = f"no better {self.metric} in {counted(self.without_gain, 'trial')}"
                    self._end(reason, f"--patience {2 * self._patience}")

    @property
    def best(self) -> tuple[int, float] | None:
        """The trial with the best validation so far, and its value of the first metric."""
        return None if self._best is None else (self._best[1], self._signs[self.metric] * self._best[0])

    def _score(self, values: Sequence[float | None]) -> float | None:
        """What a validation is compared by, smaller is better; None if it can't be the best."""
        if self._objectives is not None:
            losses = self._objectives.normalised(tuple(values)) if values else None
            return None if losses is None or losses.violation else losses.values[0]
        return None if (value := values[0]) is None or not math.isfinite(value) else self._sign * value

    def _validated(self, trial: int, values: Mapping[str, float | None]) -> None:
        reached = []
        for name, target in self._until.items():
            value, sign = values.get(name), self._signs[name]
            if value is None or not sign * value <= sign * target:
                return
            reached.append(f"{name} {value:.4g} of trial {trial} reaches {target:g}")
        if reached:
            self._end("; ".join(reached), " ".join(f"--until {name}=VALUE" for name in self._until))

    def _end(self, reason: str, remedy: str) -> None:
        if not self.reason:
            self.reason, self.remedy = reason, remedy

    # ------------------------------------------------------------------ the budget
    def spend(self, usage: Usage) -> None:
        """Note what has been spent."""
        if not self.totals:
            return
        shares = {name: usage.spent[name] / total for name, total in self.totals.items()}
        self._limit = max(shares, key=lambda name: shares[name])
        self.share = shares[self._limit]
        self.usage = ", ".join(spent_of(name, usage.spent[name], total) for name, total in self.totals.items())
        rates = {name: usage.per_s[name] for name in self.totals if usage.per_s[name]}
        left = ((self.totals[name] - usage.spent[name]) / rate for name, rate in rates.items())
        self._left_s = min(left, default=math.inf)
        if self.share >= 1:
            self._end_budget(f"budget.{self._limit} is spent")
        elif self.is_recorded:
            self.give_up_rest()

    @property
    def is_nearly_spent(self) -> bool:
        return self.share >= NEARLY_SPENT

    def give_up_rest(self) -> None:
        """End with a rest of the budget in which no trial would reach its next rung."""
        self._end_budget(f"the rest of budget.{self._limit} takes no trial to its next rung")

    def _end_budget(self, what: str) -> None:
        more = in_config(self._limit, self.totals[self._limit] * max(2, math.floor(self.share + 1)))
        self._end(what, f"--budget {self._limit}={more}")

    # ------------------------------------------------------------------ trials
    def begins(self, trial: int) -> None:
        """A trial begins to run, or continues."""
        self._paces.pop(trial, None)

    def trained(self, trial: int, step: float, now: float) -> None:
        """A trial has trained up to a step."""
        if (pace := self._paces.get(trial)) is None:
            self._paces[trial] = _Pace((step, now), (step, now))
        elif step > pace.last[0]:
            pace.last = step, now

    def step(self, trial: int) -> float:
        """The last step of a running trial; 0 if it has not reported."""
        pace = self._paces.get(trial)
        return 0.0 if pace is None else pace.last[0]

    def leaves(self, trial: int) -> None:
        """A trial has left its workers."""
        if (pace := self._paces.pop(trial, None)) is not None and (measured := pace.s_per_unit) is not None:
            self._recent.append(measured)

    def may_begin(self, length: float) -> bool:
        """Whether a trial should get workers, with this length to train until its next rung."""
        if not self.is_nearly_spent:
            return True
        measured = [pace for each in self._paces.values() if (pace := each.s_per_unit) is not None] + [*self._recent]
        return not measured or length * median(measured) <= self._left_s

    def late(self, goals: Mapping[int, float], groups: int, now: float) -> list[int]:
        """The running trials that should leave, so that others reach their next rung with the rest of the budget.

        If time is what is nearly spent, nothing is gained, so they train on to the end, and then save.

        Args:
            goals: the next rung of each running trial that has not been asked to leave.
            groups: the number of groups with a trial.
        """
        if not self.is_nearly_spent or self._limit == "time":
            return []
        needs = {trial: need for trial, goal in goals.items() if (need := self._need_s(trial, goal, now)) is not None}
        late: list[int] = []
        for trial in sorted(needs, key=lambda trial: -needs[trial]):
            # When those before have left, the rest lasts longer.
            if needs[trial] <= self._left_s * groups / (len(goals) - len(late)):
                return late
            late.append(trial)
        return late if len(late) < len(goals) else []

    def _need_s(self, trial: int, goal: float, now: float) -> float | None:
        pace = self._paces.get(trial)
        if pace is None or (s_per_unit := pace.s_per_unit) is None:
            return None
        return pace.last[1] + (goal - pace.last[0]) * s_per_unit - now
