"""Decides whether a failed trial restarts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dray.desk.effects import Say
from dray.desk.failure import Failure
from dray.desk.messages import TrialLeft
from dray.experiment.effects import Append, Effect, ShowFailure
from dray.records.by_trial import ByTrial
from dray.text import counted
from searchers.events import Reason

DEATHS = 3  # how often in a row the processes of a trial may die without progress before it is given up
UNAVERAGED = "RuntimeError: the slots train different models: "
"""Begins an error by which dray ends a trial whose code averages no gradients."""


class Restarts:
    """The failures of an experiment's trials.

    Args:
        records: the journal so far.
        max_restarts: how often a trial may restart.
        emit: called with each effect.

    Attributes:
        counted: how often each trial was restarted, also in earlier runs of the experiment.
        ended_before: how trials had ended before this run. If an extension of the search resumes one and it fails, it
            keeps that end.
        given_up: trials that an earlier run gave up but did not live to end, and how they end.
    """

    def __init__(
        self, records: Sequence[Mapping[str, Any]], *, max_restarts: int, emit: Callable[[Effect], None]
    ) -> None:
        self._max_restarts, self._emit = max_restarts, emit
        self._failures: dict[int, list[Failure]] = {}
        self.given_up: dict[int, Reason] = {}
        self.ended_before: dict[int, Reason] = {}
        for each in records:
            match each.get("event"):
                case "restarted":
                    failure = Failure(kind=each["kind"], where=each["where"], batches=each["batches"])
                    self._failures.setdefault(each["trial"], []).append(failure)
                case "gave_up":
                    self.given_up[each["trial"]] = each.get("kept", "errored")
                case "exited":
                    self.ended_before[each["trial"]] = each["reason"]
                    self.given_up.pop(each["trial"], None)
        self.counted = Counter({trial: len(failures) for trial, failures in self._failures.items()})
        self._saved, self._furthest = ByTrial(), ByTrial()
        for trial, failures in self._failures.items():
            self.reached(trial, max(failure.batches for failure in failures))

    def saved(self, trial: int, batches: int) -> None:
        """A trial has saved a checkpoint after so many batches, or resumed from it."""
        self._saved[trial] = batches
        self.reached(trial, batches)

    def reached(self, trial: int, batches: int) -> None:
        """A trial has trained so many batches."""
        self._furthest[trial] = max(self._furthest[trial], batches)

    def end_of(self, left: TrialLeft) -> Reason | None:
        """Record how a trial failed ("errored", "diverged" or "invalid_hp"). Returns how it ends; None: it restarts."""
        trial, error = left.trial, left.error
        kept = self.ended_before.get(trial)
        if left.outcome == "diverged":
            self._emit(Say(f"trial {trial} is stopped (stop_on_nan): {error}"))
            return "diverged"
        if left.outcome == "invalid_hp":
            if kept is not None:
                self._give_up(trial, error, "it raised InvalidHP", Failure(kind="error", where="InvalidHP"))
            return kept or "invalid_hp"
        failure = left.failure or Failure(kind="error")
        if failure.kind == "node":
            failure = replace(failure, batches=self._saved[trial])
        elif failure.kind == "died":  # it could not say where: only how far the trial ever came is known
            self.reached(trial, failure.batches)
            failure = replace(failure, batches=self._furthest[trial])
        failures = self._failures.setdefault(trial, [])
        failures.append(failure)
        why = why_given_up(failures, self._max_restarts) or left.no_restart
        if UNAVERAGED in error:
            why = why or "a restart would not change that"
        if why:
            self._give_up(trial, error, why, failure)
            return kept or "errored"
        self._emit(ShowFailure(trial=trial, error=error))
        self._emit(Append({"event": "restarted", "trial": trial, "error": error, **failure_fields(failure)}))
        self.counted[trial] += 1
        return None

    def _give_up(self, trial: int, error: str, why: str, failure: Failure) -> None:
        kept = self.ended_before.get(trial, "")
        self._emit(ShowFailure(trial=trial, error=error, ended=why, kept=kept))
        record = {"event": "gave_up", "why": why, "trial": trial, "error": error, **failure_fields(failure)}
        self._emit(Append({**record, "kept": kept} if kept else record))


def why_given_up(failures: Sequence[Failure], max_restarts: int) -> str:
    """Why the trial does not restart after the last of its failures; "" if it does.

    Args:
        failures: all failures of the trial, in order; at least one.
        max_restarts: how often a trial may restart.
    """
    last, before = failures[-1], failures[-2] if len(failures) > 1 else None
    if (number := len(list(_counting(failures)))) > max_restarts:
        return f"{counted(number, 'failure')}, max_restarts is {max_restarts}"
    if last.kind == "oom" and sum(failure.kind == "oom" for failure in failures) > 1:
        # The second try was in new processes, so memory that the first ones had kept is not the cause.
        return "out of memory twice"
    if last.kind in ("error", "device") and last == before and not last.node:
        # It has failed at the same batch in the same way after a restart, so it will do so again; unless it was on a
        # GPU that may be broken.
        return f"the same error twice, after {last.batches} batches: {last.where}"
    if last.kind == "died" and failures[-DEATHS:] == [last] * DEATHS:
        # Not twice: another may have killed them. A node that is lost is of another kind.
        since = f"since batch {last.batches}" if last.batches > 0 else "before its first report"
        return f"its processes died {DEATHS} times without progress {since}"
    return ""


def _counting(failures: Iterable[Failure]) -> Iterator[Failure]:
    """Those that count for ``max_restarts``. As in Determined, the loss of a node does not; unless the trial has saved
    no checkpoint since such a loss before, as one that brings its nodes down."""
    furthest = -2  # before any checkpoint it is -1
    for failure in failures:
        if failure.kind != "node" or failure.batches <= furthest:
            yield failure
        else:
            furthest = failure.batches


def failure_fields(failure: Failure) -> dict[str, Any]:
    """A failure's fields in the journal."""
    return {"kind": failure.kind, "where": failure.where, "batches": failure.batches}
