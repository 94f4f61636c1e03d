"""ASHA, the stopping variant: a trial that reaches a rung continues only if it is among the best 1/divisor there.

Source: Li et al., "A System for Massively Parallel Hyperparameter Tuning" (arXiv 1810.05934); stopping instead of
promoting is Determined's `async_halving`. Deliberate differences from Determined, besides those in `halving`:

* every trial that ends is followed by a new one, even if it ended by itself below the top rung;
* a trial that reports at the top rung gets no `Stop`: it trains to `max_length` and completes.
"""

from __future__ import annotations

import math

from searchers.events import Action, Exited, Stop
from searchers.halving import SuccessiveHalving
from searchers.objectives import Losses
from searchers.rung import longer_rungs


class ASHA(SuccessiveHalving):
    """Asynchronous successive halving, stopping.

    Args:
        max_trials: Trials to create, >= 1. Trials with invalid hyperparameters are replaced and don't count.
        max_length: Length of a trial that is never stopped, >= 1.
        num_rungs: Lengths at which trials are compared, the last being max_length, >= 1.
        divisor: Ratio of lengths between rungs, and of trials to those that continue; > 1, may be fractional.
        max_concurrent_trials: Most trials at a time that were created and have neither been stopped nor ended.
            0 = `divisor ** (num_rungs - 1)`, so that one of the first trials is expected to reach the top rung.
        skip_uninformative_rungs: Let more trials continue at a rung that ranks them otherwise than the next one does,
            and all of them where it says nothing: see `rung_correlation`.
        pareto: Rank trials by several objectives and constraints (`searchers.pareto`), which a `Search` with
            `objectives` reports as losses.

    Attributes:
        rungs: Lengths of the rungs, ascending.
        divisor, pareto: As given.

    Raises:
        MethodError: A field is invalid; all are named.

    >>> from searchers import Reported
    >>> asha = ASHA(max_trials=8, max_length=16, num_rungs=3, divisor=4, max_concurrent_trials=2)
    >>> asha.rungs
    (1, 4, 16)
    >>> asha.start()
    [Create(trial=0), Create(trial=1)]
    >>> asha.on(Reported(trial=0, step=1, value=0.5)), asha.on(Reported(trial=1, step=1, value=0.6))
    ([], [Stop(trial=1), Create(trial=2)])
    """

    def _set_up(self) -> None:
        self._next: dict[int, int] = {}  # the next rung of each live trial that was ranked

    def _report(self, trial: int, step: float, value: float | Losses) -> list[Action]:
        """Rank the trial at each rung it has reached, up to the one that stops it."""
        top = len(self._rungs) - 1
        if not self._slots.has_slot(trial):  # a report from a trial that is being stopped
            return []
        while (rung := self._next.get(trial, 0)) <= top and step >= self._rungs[rung].length:
            self._next[trial] = rung + 1
            continues = self._rank(trial, rung, value)
            if rung < top and not (continues and value != math.inf):
                self._slots.release(trial)
                return [Stop(trial=trial), *self._fill()]
        return []

    def _exit(self, exited: Exited) -> None:
        self._rank_exit(exited, next_rung=self._next.pop(exited.trial, 0))
        self._slots.end(exited.trial, exited.reason)

    def extend_to(self, max_trials: int, max_length: int) -> list[Action]:
        stops: list[Action] = []
        to_resume: list[int] = []
        if max_length > self._rungs[-1].length:
            stops, to_resume = self._add_rungs(max_length)
        self._slots.extend(max_trials=max_trials, max_concurrent=self._max_concurrent(), to_resume=to_resume)
        return [*stops, *self._fill()]

    def _add_rungs(self, max_length: int) -> tuple[list[Action], list[int]]:
        """Add rungs on top, for the best trials at the old top rung.

        Returns:
            `Stop`s for the other live trials there, and those of the best that completed and are to be resumed.
        """
        old_top, num_old = self._rungs[-1], len(self._rungs)
        lengths = longer_rungs(self.rungs, max_length=max_length, divisor=self.divisor)
        self._rungs += self._new_rungs(lengths[num_old:])
        best, completed = old_top.best(), self._slots.completed
        to_resume = [trial for trial in best if trial in completed]
        stops: list[Action] = []
        for trial, rung in sorted(self._next.items()):
            if rung == num_old and self._slots.has_slot(trial) and trial not in best:
                self._slots.release(trial)
                stops.append(Stop(trial=trial))
        self._next.update((trial, num_old) for trial in to_resume)
        return stops, to_resume
