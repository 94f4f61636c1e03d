"""Failures grouped by their cause: what failed, where in the user's code, which trials, and what followed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dray.records.logs import grouped_failures, short_error
from dray.text import cut

MOST_TRIALS = 200
"""Most trials that a group names."""
MOST_TRACEBACK = 64 << 10
"""Most letters of a traceback."""
_PLACE = re.compile(r"\s*(.+):(\d+), in (.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureGroup:
    """Failures with the same cause.

    Attributes:
        error: the error in one line, of the last failure.
        file, line, function, code: the line of the user's code that raised it; None if none did, or it is not known.
        count: the number of failures.
        restarted: how many led to a restart.
        given_up: how many led to the trial's end.
        trials: the trials, each with its number of failures, those with the most first; at most `MOST_TRIALS`.
        num_trials: the number of trials.
        first, last: the times of the first and the last failure; None if they are not known.
        why: why the last trial was given up; None if all were restarted, or the error says it.
        kept: the states that trials kept although their extension failed.
        batches: after how many batches the last trial failed; None if it is not known.
        traceback: the whole error of the last failure.
    """

    error: str
    file: str | None
    line: int | None
    function: str | None
    code: str | None
    count: int
    restarted: int
    given_up: int
    trials: list[tuple[int, int]]
    num_trials: int
    first: float | None
    last: float | None
    why: str | None
    kept: list[str]
    batches: int | None
    traceback: str


def failure_groups(records: Iterable[Mapping[str, Any]]) -> list[FailureGroup]:
    """The journal's records of failures by cause, the largest group first."""
    return [_group(each) for each in grouped_failures(records)]


def _group(records: list[Mapping[str, Any]]) -> FailureGroup:
    last = records[-1]
    error, *place = short_error(last.get("error"))
    found = _PLACE.fullmatch(place[0]) if place else None
    trials = Counter(each["trial"] for each in records)
    times = [each["time"] for each in records if each.get("time") is not None]
    given_up = [each for each in records if each["event"] == "gave_up"]
    batches = last.get("batches")
    return FailureGroup(
        error=error,
        file=found and found[1],
        line=found and int(found[2]),
        function=found and found[3],
        code=place[1].strip() if found and len(place) > 1 else None,
        count=len(records),
        restarted=len(records) - len(given_up),
        given_up=len(given_up),
        trials=trials.most_common(MOST_TRIALS),
        num_trials=len(trials),
        first=min(times, default=None),
        last=max(times, default=None),
        why=(given_up[-1].get("why") or None) if given_up else None,
        kept=sorted({each["kept"] for each in records if each.get("kept")}),
        batches=None if batches is None or batches < 0 else batches,
        traceback=cut(str(last.get("error") or ""), MOST_TRACEBACK),
    )
