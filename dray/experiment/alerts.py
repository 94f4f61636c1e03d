"""Decides what people are told about an experiment while it runs: trials that fail, no gain, a budget nearly spent. The
text about its end is here too; `dray.experiment.notify` sends both.

Pure, without a clock: it follows from the journal, and from the limits that the driver keeps anyway. An alert is a
record of the journal, written together with its cause, and another record says that it was sent. So another driver
neither forgets an alert nor repeats it, except one that the first driver was sending when it was killed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from dray.config.notify import AlertKind, Outcome, Watched
from dray.experiment.limits import Limits
from dray.records.logs import kind_of, short_error, where
from dray.records.overview import Overview
from dray.text import counted, one_line

_Due: TypeAlias = tuple[AlertKind, float | None, Any, str]
"""What is due: its kind, its level, what distinguishes it from others of that kind, and its text."""


class Alerts:
    """The alerts of an experiment.

    Args:
        watched: what its receivers want to know.
        limits: its limits, which know of its gains and its budget; they have taken each record before this object.
        records: the journal's records so far.

    Attributes:
        pending: alerts that were not sent, by id.
    """

    def __init__(self, watched: Watched, limits: Limits, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self._watched, self._limits = watched, limits
        self.pending: dict[int, Mapping[str, Any]] = {}
        self._count = 0
        self._raised: set[str] = set()
        self._failures: dict[str, Mapping[str, Any]] = {}  # by key, those that are not told
        for record in records:
            self._take(record)

    def due(self, records: Iterable[Mapping[str, Any]] = ()) -> list[Mapping[str, Any]]:
        """The alerts to record after these new records of the journal, which are not alerts themselves."""
        for record in records:
            self._take(record)
        found: list[Mapping[str, Any]] = []
        for each in [*self._of_failures(), *self._of_gains(), *self._of_budget()]:
            if (key := json.dumps(each[:-1])) not in self._raised:
                kind, level, _, text = each
                named = {"event": "alert", "id": self._count, "kind": kind, "level": level, "key": key, "text": text}
                found.append(named)
                self._take(named)
        return found

    def _take(self, record: Mapping[str, Any]) -> None:
        match record.get("event"):
            case "alert":
                self._count = max(self._count, record["id"] + 1)
                self._raised.add(record["key"])
                self.pending[record["id"]] = record
            case "told":
                self.pending.pop(record["id"], None)
            case "gave_up" if self._watched.failed_trials:
                self._failures.setdefault(kind_of(record), record)

    def _of_failures(self) -> Iterator[_Due]:
        """Trials that have failed for good, once for each line of the user's code."""
        for kind, record in self._failures.items():
            place = where(record)
            error = short_error(record.get("error"))[0] + (f" ({place})" if place else "")
            yield "trial_failed", None, kind, f"trial {record['trial']} failed for good: {error}"
        self._failures.clear()

    def _of_gains(self) -> Iterator[_Due]:
        """Too many trials without a better one, once for each best one."""
        limits = self._limits
        for trials in self._watched.no_gain:
            if limits.without_gain >= trials:
                best = "no trial has a finite one"
                if limits.best is not None:
                    best = f"the best is {limits.best[1]:.5g} of trial {limits.best[0]}"
                yield "no_gain", trials, limits.best, f"no better {limits.metric} in {counted(trials, 'trial')}; {best}"

    def _of_budget(self) -> Iterator[_Due]:
        """A budget that is nearly spent, once for each budget."""
        limits = self._limits
        for share in self._watched.budget:
            if share <= limits.share < 1:
                text = f"{limits.share:.0%} of the budget is spent: {limits.usage}"
                yield "budget", share, sorted(limits.totals.items()), text


def end_text(seen: Overview, state: Outcome, error: str = "") -> str:
    parts = [state, seen.reason, one_line(error)]
    if seen.best_metric is not None:
        by = "" if seen.best_by == "one seed" else f", {seen.best_by}"
        parts.append(f"best {seen.metric} {seen.best_metric:.5g} (trial {seen.best_trial}{by})")
    if seen.lowest_metric is not None:
        which = "lowest" if seen.smaller_is_better else "highest"
        parts.append(f"{which} {seen.lowest_metric:.5g} (trial {seen.lowest_trial})")
    if seen.failed:
        parts.append(f"{seen.failed} of {counted(seen.trials, 'trial')} failed")
    return "; ".join(filter(None, parts))
