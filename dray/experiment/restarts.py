"""Decides when a failed trial is given up: pure functions of its failures, in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dray.cluster.failure import Failure


def why_given_up(failures: Sequence[Failure], max_restarts: int) -> str:
    """Why the trial is not started again after the last of its failures; "" if it is.

    Args:
        failures: all failures of the trial, in order; at least one.
        max_restarts: how often a trial may be started again.
    """
    last, before = failures[-1], failures[-2] if len(failures) > 1 else None
    if len(failures) > max_restarts:
        return f"{len(failures)} failure{'s' * (len(failures) != 1)}, max_restarts is {max_restarts}"
    if last.kind == "oom" and sum(failure.kind == "oom" for failure in failures) > 1:
        # The second try was in new processes, so memory that the first ones had kept is not the cause.
        return "out of memory twice"
    if last.kind in ("error", "device") and last == before:
        # It has failed at the same batch in the same way after a restart, so it will do so again.
        return f"the same error twice, after {last.batches} batches: {last.where}"
    return ""


def record(failure: Failure) -> dict[str, Any]:
    """A failure's fields in the journal."""
    return {"kind": failure.kind, "where": failure.where, "batches": failure.batches}


def recorded(records: Iterable[Mapping[str, Any]]) -> dict[int, list[Failure]]:
    """The journal's failures of each trial that was started again."""
    found: dict[int, list[Failure]] = {}
    for each in records:
        if each.get("event") == "restarted":
            # Journals of older versions have only the error.
            failure = Failure(
                kind=each.get("kind", "died"), where=each.get("where", ""), batches=each.get("batches", -1)
            )
            found.setdefault(each["trial"], []).append(failure)
    return found
