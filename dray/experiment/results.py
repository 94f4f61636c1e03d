"""Results that wait for the search's decision. Tune's handle fetches them, and they are kept until answered."""

from __future__ import annotations

import itertools
from collections import deque

from dray.rpc.wire import wire
from searchers.events import Decision, TrialResult

wire(TrialResult)


class PendingResults:
    """Hands over one result per trial at a time; later results wait until it is answered."""

    def __init__(self) -> None:
        self._of: dict[int, deque[TrialResult]] = {}
        self._numbers = itertools.count(1)
        self._due: list[TrialResult] = []  # not yet handed over, in order

    def add(self, trial: int, **result: object) -> int:
        """Add a result of a trial, with these fields of `TrialResult`. Returns its number."""
        added = TrialResult(number=next(self._numbers), trial=trial, **result)  # type: ignore[arg-type]
        of_trial = self._of.setdefault(trial, deque())
        of_trial.append(added)
        if len(of_trial) == 1:
            self._due.append(added)
        return added.number

    @property
    def is_empty(self) -> bool:
        return not self._of

    def awaits(self, trial: int, number: int) -> bool:
        """Whether this result is the next one of its trial to be answered."""
        return trial in self._of and self._of[trial][0].number == number

    def ends(self, trial: int) -> bool:
        """Whether a waiting result is the end of its trial."""
        return any(result.outcome is not None for result in self._of.get(trial, ()))

    def answer(self, trial: int, decision: Decision) -> None:
        """Note the search's decision on a trial's next result. Later results of a stopped trial are dropped."""
        of_trial = self._of[trial]
        of_trial.popleft()
        if decision == "stop" or not of_trial:
            del self._of[trial]
        else:
            self._due.append(of_trial[0])

    def take(self) -> list[TrialResult]:
        """Return all results that are due, each once."""
        due, self._due = self._due, []
        return due

    def hand_over_again(self) -> None:
        """Make all unanswered results due again, for a new process of the handle."""
        self._due = sorted((waiting[0] for waiting in self._of.values()), key=lambda each: each.number)
