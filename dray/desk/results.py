"""Results that wait for the search's decision: the Tune handle collects them, and they are kept until answered."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from searchers.events import Decision, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """A report for the search to decide on, or the end of a trial, or both: a `searchers.answers.TrialResult`."""

    number: int
    trial: int
    step: float | None = None
    value: float | None = None
    metrics: tuple[float | None, ...] = ()
    outcome: Reason | None = None
    """Set when the trial ends with this result."""


class PendingResults:
    """Hands over one result per trial at a time; later ones wait until it is answered.

    Args:
        wake: called when there may be results to hand over, or the handle has changed.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._handle = -1  # its process id
        self._of: dict[int, deque[TrialResult]] = {}
        self._numbers = itertools.count(1)
        self._due: list[TrialResult] = []  # not yet handed over, in order

    def add(
        self,
        trial: int,
        *,
        step: float | None = None,
        value: float | None = None,
        metrics: Sequence[float | None] = (),
        outcome: Reason | None = None,
    ) -> int:
        """Add a result of a trial. Returns its number."""
        result = TrialResult(
            number=next(self._numbers), trial=trial, step=step, value=value, metrics=tuple(metrics), outcome=outcome
        )
        of_trial = self._of.setdefault(trial, deque())
        of_trial.append(result)
        if len(of_trial) == 1:
            self._due.append(result)
            self._wake()
        return result.number

    def answer(self, trial: int, number: int, decision: Decision) -> None:
        """The search has decided on a result. Later results of a stopped trial are dropped."""
        of_trial = self._of.get(trial, deque())
        while of_trial and of_trial[0].number <= number:
            of_trial.popleft()
        if decision == "stop" or not of_trial:
            self._of.pop(trial, None)
        else:
            self._due.append(of_trial[0])
            self._wake()

    def is_current(self, process: int) -> bool:
        """Whether this is the newest process of the handle; an earlier one has died, but its call lives on."""
        return process == self._handle

    def attach(self, process: int) -> bool:
        """A process of the handle asks. Returns whether it is new; it then gets all unanswered results again."""
        if self.is_current(process):
            return False
        self._handle = process
        self._due = sorted((waiting[0] for waiting in self._of.values() if waiting), key=lambda each: each.number)
        self._wake()
        return True

    def take(self) -> list[TrialResult]:
        """All results that are due, each once."""
        due, self._due = self._due, []
        return due
