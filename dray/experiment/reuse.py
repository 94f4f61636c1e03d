"""Finds code that fails only in processes that have run other trials: what it does can be done only once in a process.

A trial that fails there before it trains is tried again in new processes, before anybody hears of the failure. If it
gets further there, all later trials with its code get new processes. If it fails there too, both failures count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dray.desk.effects import Say
from dray.desk.failure import Failure
from dray.desk.messages import TrialLeft
from dray.experiment.effects import Append, Effect
from dray.text import cut

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
