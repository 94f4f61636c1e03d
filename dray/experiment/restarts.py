"""Decides whether a failed trial restarts, in the same processes or in new ones.

Some code fails only in processes that have run other trials: what it does can be done only once in a process. A trial
that fails there before it trains is tried again in new processes, before anybody hears of the failure. If it gets
further there, all later trials with its code get new processes. If it fails there too, both failures count.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dray.experiment.effects import Append, Effect, ShowFailure
from dray.leases.effects import Say
from dray.leases.failure import Failure, FailureKind
from dray.leases.messages import TrialLeft
from dray.records.trial_record import ByTrial
from dray.text import counted, cut
from searchers.events import Reason

MAX_IN_VAIN = 3
"""Number of different errors of the same code that are tried again in new processes and occur there too. After these,
its failures count at once: new processes take seconds to start."""
_MAX_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Withheld:
    """A failure in used processes that does not count yet. `furthest`: the batches that the trial had trained before,
    in any process."""

    error: str
    failure: Failure
    furthest: int


class Reuse:
    """What is known about an experiment's code in processes that have run other trials.

    Args:
        records: the journal's records so far.
        code_of: returns the variant of the code that a trial runs; None: the experiment's own.
        emit: called with each effect.
    """

    def __init__(
        self,
        records: Sequence[Mapping[str, Any]],
        *,
        code_of: Callable[[int], str | None],
        emit: Callable[[Effect], None],
    ) -> None:
        self._code_of, self._emit = code_of, emit
        self._needs_new: set[str | None] = set()  # codes
        self._withheld: dict[int, Withheld] = {}
        self._in_vain: defaultdict[str | None, set[str]] = defaultdict(set)  # places of errors by code
        for each in records:
            match each.get("event"):
                case "withheld":
                    failure = Failure(kind="error", where=each["where"], batches=each["batches"])
                    self._withheld[each["trial"]] = Withheld(each["error"], failure, each["furthest"])
                case "new_processes":
                    self._needs_new.add(each.get("code"))
                    self._withheld.pop(each["trial"], None)
                case "restarted" | "gave_up" | "exited":
                    self._withheld.pop(each["trial"], None)

    def needs_new(self, trial: int) -> bool:
        """Whether a trial must run in processes that have run no other trial."""
        return trial in self._withheld or self._code_of(trial) in self._needs_new

    def withhold(self, left: TrialLeft, failure: Failure, furthest: int) -> bool:
        """Whether a failure does not count yet, because the trial is tried again in new processes."""
        in_vain = self._in_vain[self._code_of(left.trial)]
        known = failure.where in in_vain or len(in_vain) >= MAX_IN_VAIN
        if not left.reused or failure.kind != "error" or known:
            return False
        self._withheld[left.trial] = Withheld(left.error, failure, furthest)
        fields = {"where": failure.where, "batches": failure.batches, "furthest": furthest}
        self._emit(Append({"event": "withheld", "trial": left.trial, "error": left.error, **fields}))
        return True

    def failed_again(self, trial: int) -> Withheld | None:
        """The failure that was withheld, of a trial that has failed in new processes too."""
        if (withheld := self._withheld.pop(trial, None)) is not None:
            self._in_vain[self._code_of(trial)].add(withheld.failure.where)
        return withheld

    def reached(self, trial: int, batches: int) -> bool:
        """Note how far a trial has trained. Returns whether its code is now known to need new processes."""
        withheld = self._withheld.get(trial)
        return withheld is not None and batches > withheld.furthest and self.succeeded(trial)

    def succeeded(self, trial: int) -> bool:
        """Note that a trial has left its processes without a failure. Returns as `reached`."""
        if (withheld := self._withheld.pop(trial, None)) is None:
            return False
        if (code := self._code_of(trial)) in self._needs_new:
            return False
        self._needs_new.add(code)
        error = cut(withheld.error.strip().partition("\n")[0], _MAX_SHOWN)
        line = _line(code, trial, error)
        self._emit(Append({"event": "new_processes", "trial": trial, "code": code, "text": line}))
        self._emit(Say(line))
        return True


def _line(code: str | None, trial: int, error: str) -> str:
    """The line for users about code that needs new processes."""
    whose = "the trials" if code is None else f"trials with code {code}"
    return (
        f"{whose} get new processes from now on, as with resources.reuse_workers: false, because their code works "
        f"only once in a process: trial {trial} failed after another trial there, and not in a new process ({error})"
    )


DEATHS = 3  # deaths in a row without progress after which a trial is given up
_CERTAIN = ("RuntimeError: the slots train different models: ", " of the checkpoint does not fit the trial's: ")
"""Parts of dray's own errors that a restart would only repeat: the code averages no gradients, or a fork's
hyperparameters change its model's size."""
_OUT_OF_MEMORY = ("oom", "host_oom")


class Restarts:
    """The failures of an experiment's trials.

    Args:
        records: the journal's records so far.
        max_restarts: most restarts of a trial.
        code_of: returns the variant of the code that a trial runs; None: the experiment's own.
        emit: called with each effect.

    Attributes:
        reuse: which trials need new processes.
        counted: number of restarts of each trial, including earlier runs of the experiment.
        ended_before: how trials ended before this run. A trial that an extension resumes keeps that end if it fails.
        given_up: trials that an earlier run gave up, but died before it ended them, and how they end.
    """

    def __init__(
        self,
        records: Sequence[Mapping[str, Any]],
        *,
        max_restarts: int,
        code_of: Callable[[int], str | None],
        emit: Callable[[Effect], None],
    ) -> None:
        self._max_restarts, self._emit = max_restarts, emit
        self.reuse = Reuse(records, code_of=code_of, emit=emit)
        self._failures: dict[int, list[Failure]] = {}
        self.given_up: dict[int, Reason] = {}
        self.ended_before: dict[int, Reason] = {}
        for each in records:
            match each.get("event"):
                case "restarted":
                    failure = Failure(kind=each["kind"], where=each["where"], batches=each["batches"])
                    self._failures.setdefault(each["trial"], []).append(failure)
                case "gave_up":
                    self.given_up[each["trial"]] = each.get("kept") or _end_after(each["kind"])
                case "exited":
                    self.ended_before[each["trial"]] = each["reason"]
                    self.given_up.pop(each["trial"], None)
        self.counted = Counter({trial: len(failures) for trial, failures in self._failures.items()})
        self._saved, self._furthest = ByTrial(), ByTrial()
        for trial, failures in self._failures.items():
            self.reached(trial, max(failure.batches for failure in failures))

    def saved(self, trial: int, batches: int) -> None:
        """Note that a trial has saved a checkpoint after this many batches, or resumed from it."""
        self._saved[trial] = batches
        self.reached(trial, batches)

    def reached(self, trial: int, batches: int) -> bool:
        """Note the number of batches that a trial has trained. Returns as `Reuse.reached`."""
        self._furthest[trial] = max(self._furthest[trial], batches)
        return self.reuse.reached(trial, batches)

    def end_of(self, left: TrialLeft) -> Reason | None:
        """Record a trial's failure ("errored", "diverged" or "invalid_hp"). Returns how it ends; None: it restarts."""
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
        elif failure.kind == "died" or left.dead:  # its batch is unknown; the furthest known one counts
            self.reached(trial, failure.batches)
            failure = replace(failure, batches=self._furthest[trial])
        if self.reuse.withhold(left, failure, max(failure.batches, self._furthest[trial])):
            return None
        failures = self._failures.setdefault(trial, [])
        earlier = self.reuse.failed_again(trial) if failure.kind == "error" else None
        if earlier is not None and not why_given_up([*failures, earlier.failure], self._max_restarts):
            failures.append(earlier.failure)
            self._restart(trial, earlier.error, earlier.failure)
        failures.append(failure)
        why = why_given_up(failures, self._max_restarts) or left.no_restart
        if any(each in error for each in _CERTAIN):
            why = why or "a restart would not change that"
        if why:
            self._give_up(trial, error, why, failure)
            return kept or _end_after(failure.kind)
        self._restart(trial, error, failure)
        return None

    def _restart(self, trial: int, error: str, failure: Failure) -> None:
        self._emit(ShowFailure(trial=trial, error=error))
        self._emit(Append({"event": "restarted", "trial": trial, "error": error, **failure_fields(failure)}))
        self.counted[trial] += 1

    def _give_up(self, trial: int, error: str, why: str, failure: Failure) -> None:
        kept = self.ended_before.get(trial, "")
        self._emit(ShowFailure(trial=trial, error=error, ended=why, kept=kept))
        record = {"event": "gave_up", "why": why, "trial": trial, "error": error, **failure_fields(failure)}
        self._emit(Append({**record, "kept": kept} if kept else record))


def _end_after(kind: FailureKind) -> Reason:
    """How a trial ends that does not restart after such a failure. Other processes on its machine may have caused a
    lack of host memory, so only a GPU's says that its hyperparameters need too much."""
    return "out_of_memory" if kind == "oom" else "errored"


def why_given_up(failures: Sequence[Failure], max_restarts: int) -> str:
    """The reason why a trial does not restart after the last of its failures; "" if it does.

    Args:
        failures: all failures of the trial, in order; at least one.
        max_restarts: most restarts of a trial.
    """
    last, before = failures[-1], failures[-2] if len(failures) > 1 else None
    if (number := len(list(_counting(failures)))) > max_restarts:
        return f"{counted(number, 'failure')}, max_restarts is {max_restarts}"
    if last.kind in _OUT_OF_MEMORY and sum(failure.kind in _OUT_OF_MEMORY for failure in failures) > 1:
        # The second attempt ran in new processes, so memory held by the first ones is not the cause.
        return "out of memory twice"
    if last.kind in ("error", "device") and last == before and not last.node:
        # It would fail again: a restart failed at the same batch in the same way, and not on a suspect GPU.
        return f"the same error twice, after {counted(last.batches, 'batch')}: {last.where}"
    if last.kind == "died" and failures[-DEATHS:] == [last] * DEATHS:
        # Two deaths could have an outside cause. The loss of a node is a different kind of failure.
        since = f"since batch {last.batches}" if last.batches > 0 else "before its first report"
        return f"its processes died {DEATHS} times without progress {since}"
    return ""


def _counting(failures: Iterable[Failure]) -> Iterator[Failure]:
    """The failures that count for ``max_restarts``. As in Determined, the loss of a node does not count, unless the
    trial has saved no checkpoint since the last such loss: it may be the cause."""
    furthest = -2  # a failure before any checkpoint has -1
    for failure in failures:
        if failure.kind != "node" or failure.batches <= furthest:
            yield failure
        else:
            furthest = failure.batches


def failure_fields(failure: Failure) -> dict[str, Any]:
    """A failure's fields in the journal."""
    return {"kind": failure.kind, "where": failure.where, "batches": failure.batches}
