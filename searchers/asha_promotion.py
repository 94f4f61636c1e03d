"""The promotion variant of ASHA: a trial pauses at each rung, and is promoted if it is one of the best.

The source is Li et al., "A System for Massively Parallel Hyperparameter Tuning" (arXiv 1810.05934), algorithm 2. A free
slot goes to the best paused trial that is among the best floor(n / divisor) of its rung, in the highest rung that has
such a trial; the trial then trains to the next rung. If there is none, a new trial starts. The paper leaves some points
open:

* rungs have the same absolute lengths as in `ASHA` (Determined's promotion summed them, past `max_length`);
* among equal values, that of the lower trial number is better;
* a trial with a non-finite value is never promoted, but stopped at the rung;
* a report that passes several rungs is ranked only at the highest of them, as in `ASHA`;
* a rung that no more trials can reach is closed. Its best trial is then promoted even among fewer than `divisor`, so
  that a small search also trains a trial to the end; paused trials that can no longer be promoted are stopped.

The life of a trial, and of its record in `PromotionASHA`:

    Create ──▶ running ──── reaches a rung ───▶ paused ──── closed rung ───▶ stopped ── Exited ──▶ ended
                  ▲                               │ ▲                                                │
                  └─────────── promoted ──────────┘ └────────────────── extension ───────────────────┘

Invariants:

* Every live trial has a record. A trial that has ended has one only if an extension may promote it.
* A trial is running iff it holds a slot, paused iff its last rung lists it as paused; it is never both.
* A record's `last` is set iff the trial is paused, or was stopped only because its rung was closed.
* The trial is ranked at the rung before its record's `next`, and at none from there on; paused trials have finite
  values.
* A rung's `num_approaching` is the number of running trials whose `next` is that rung. A rung is closed only while
  neither a new trial nor one from a lower rung can reach it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple, cast

from searchers.asha import SuccessiveHalving
from searchers.events import REPLACED, Action, Create, Done, Exited, Losses, Pause, Resume, Stop
from searchers.pareto import ParetoOrder
from searchers.rung import Rung


class _Report(NamedTuple):
    step: float
    value: float | Losses
    lowest: int = 0  # index of the lowest rung at which it may be ranked


@dataclass(slots=True)
class _Trial:
    next: int = 0  # index of the next rung; len(rungs) after the top one
    last: _Report | None = None  # the report by which it is ranked
    finishing: bool = False  # ran past the top rung before its pause, and was resumed only to complete


class _Stage:
    """A rung, the running trials on their way to it, and the trials that are paused at it."""

    def __init__(self, rung: Rung) -> None:
        self.rung, self.num_approaching = rung, 0
        self._paused: set[int] = set()
        self._heap: list[tuple[float, int]] = []  # (value, trial); entries not in `_paused` are dropped on top

    def pause(self, trial: int) -> None:
        self._paused.add(trial)
        if not isinstance(self.rung.order, ParetoOrder):
            heappush(self._heap, (cast("float", self.rung.values[trial]), trial))

    def unpause(self, trial: int) -> bool:
        """Remove the trial from the paused ones, and return whether it was one of them."""
        was_paused = trial in self._paused
        self._paused.discard(trial)
        return was_paused

    def unpause_all(self) -> list[int]:
        trials = sorted(self._paused)
        self._paused.clear()
        return trials

    def promotable(self) -> int | None:
        """Return the best paused trial, if it is among the best 1/divisor of all trials at this rung."""
        if not self._paused:
            return None
        if isinstance(self.rung.order, ParetoOrder):  # the order of paused trials depends on all the others
            return next((trial for trial in self.rung.best() if trial in self._paused), None)
        while (best := self._heap[0][1]) not in self._paused:
            heappop(self._heap)
        return best if self.rung.is_best(best) else None


class PromotionASHA(SuccessiveHalving):
    """Asynchronous successive halving, promoting.

    A paused trial holds no slot, so `max_concurrent_trials` limits only running trials. When the search is extended,
    trials that were stopped because their rung was closed can be promoted again, from their checkpoints.

    Args:
        max_trials, max_length, num_rungs, divisor, max_concurrent_trials, skip_uninformative_rungs, pareto: As in
            `ASHA`.

    Raises:
        MethodError: At least one argument is invalid; the message names each.

    >>> from searchers import Reported
    >>> asha = PromotionASHA(max_trials=4, max_length=4, num_rungs=2, divisor=2, max_concurrent_trials=1)
    >>> asha.start(), asha.on(Reported(trial=0, step=2, value=0.5))
    ([Create(trial=0)], [Pause(trial=0), Create(trial=1)])
    >>> asha.on(Reported(trial=1, step=2, value=0.6))
    [Pause(trial=1), Resume(trial=0)]
    """

    _min_best = 0

    def _set_up(self) -> None:
        self._trials: dict[int, _Trial] = {}
        self._stages: list[_Stage] = []

    def _add_rungs(self, lengths: Sequence[int]) -> None:
        super()._add_rungs(lengths)
        self._stages += [_Stage(rung) for rung in self._rungs[len(self._stages) :]]

    def _fill(self) -> list[Action]:
        """Promote or create trials for free slots, stop trials at closed rungs, or return `Done`."""
        slots = self._slots
        actions: list[Action] = []
        while True:
            if not slots.may_create:
                actions += self._close_rungs()
            if slots.is_full:
                break
            if (trial := self._promotable()) is not None:
                actions += self._promote(trial)
            elif slots.may_create:
                actions.append(self._create())
            else:
                break
        return actions + slots.finish()

    def _create(self) -> Create:
        created = self._slots.create()
        self._trials[created.trial] = _Trial()
        self._stages[0].num_approaching += 1
        return created

    def _begin_at(self, trial: int, rung: int) -> None:
        self._trials[trial] = _Trial(next=rung)
        self._stages[rung].num_approaching += 1
        self._reopen_rungs()

    def _promotable(self) -> int | None:
        for stage in self._stages[-2::-1]:  # no trial is paused at the top
            if (trial := stage.promotable()) is not None:
                return trial
        return None

    def _promote(self, number: int) -> list[Action]:
        trial = self._trials[number]
        self._stages[trial.next - 1].unpause(number)
        assert trial.last is not None
        if trial.last.step >= self._rungs[trial.next].length:  # it had already trained this far before its pause
            return self._arrive(number, trial)
        self._stages[trial.next].num_approaching += 1
        trial.last = None
        return [self._slots.resume(number)]

    def _arrive(self, number: int, trial: _Trial) -> list[Action]:
        """Rank a trial without a slot at its next rung, by its last report; pause it there unless it ends."""
        assert trial.last is not None
        value = trial.last.value
        if trial.next < trial.last.lowest:
            self._unranked += trial.next == 0
            trial.next = trial.last.lowest
        stage = self._stages[trial.next]
        self._rank(number, trial.next, value)
        trial.next += 1
        if trial.next == len(self._rungs):
            trial.last, trial.finishing = None, True
            return [self._slots.resume(number)]
        if value != math.inf:
            stage.pause(number)
            return []
        trial.last = None
        if self._slots.is_live(number):
            return [Stop(trial=number)]
        del self._trials[number]
        return []

    def _close_rungs(self) -> list[Action]:
        """Close the rungs that no more trials can reach, from the lowest up, and stop trials that can't be promoted.

        Called only while no trial may be created.
        """
        stops: list[Action] = []
        for stage in self._stages:
            if stage.num_approaching:
                break
            stage.rung.min_best = 1
            if stage.promotable() is not None:  # that trial will reach the next rung
                break
            stops += [Stop(trial=trial) for trial in stage.unpause_all() if self._slots.is_live(trial)]
        return stops

    def _reopen_rungs(self) -> None:
        for rung in self._rungs:
            rung.min_best = 0

    def _report(self, number: int, step: float, value: float | Losses, lowest: int) -> list[Action]:
        """Rank the trial if it reached its next rung; it pauses there unless it is promoted at once."""
        trial = self._trials[number]
        if not self._slots.has_slot(number):
            if trial.last is not None and step > trial.last.step:  # it trained further before its pause
                trial.last = _Report(step, value, lowest)
            return []
        if trial.next == len(self._rungs) or step < self._rungs[trial.next].length:
            return []
        self._stages[trial.next].num_approaching -= 1
        top = len(self._rungs) - 1
        if trial.next == top or lowest == top:
            self._unranked += trial.next == 0 < top
            self._rank(number, top, value)
            trial.next = len(self._rungs)
            return []
        self._slots.release(number)
        trial.last = _Report(step, value, lowest)
        actions = self._arrive(number, trial)
        actions += self._fill()
        _pause_unless_resumed(number, actions)
        return actions

    def _exit(self, exited: Exited) -> None:
        number = exited.trial
        trial = self._trials.pop(number)
        if self._slots.has_slot(number) and trial.next < len(self._rungs):
            self._stages[trial.next].num_approaching -= 1
        was_paused = trial.next > 0 and self._stages[trial.next - 1].unpause(number)
        if exited.reason == "stopped" and trial.last is not None and not was_paused:
            self._trials[number] = trial  # an extension may promote it
        self._rank_exit(exited, next_rung=trial.next)
        if exited.reason in REPLACED:
            self._reopen_rungs()
        self._slots.end(number, exited.reason)

    def extend_to(self, max_trials: int, max_length: int) -> list[Action]:
        stops: list[Action] = []
        running: list[int] = []
        if max_length > self._rungs[-1].length:
            stops, running = self._continue_above(max_length)
        for number, trial in self._trials.items():
            if not self._slots.is_live(number):
                self._stages[trial.next - 1].pause(number)
        self._reopen_rungs()
        self._slots.extend(max_trials=max_trials, max_concurrent=self._max_concurrent())
        actions = self._fill()
        for number in running:
            _pause_unless_resumed(number, actions)
        return [*stops, *actions]

    def _continue_above(self, max_length: int) -> tuple[list[Action], list[int]]:
        """Add rungs on top. Trials that passed the old top rung, completed or still running, are now paused there.

        Returns:
            `Stop`s for running trials with a non-finite value, and the other running trials.
        """
        old_top, num_old = self._rungs[-1], len(self._rungs)
        self._lengthen(max_length)
        stops: list[Action] = []
        running: list[int] = []
        for number, trial in sorted(self._trials.items()):
            if trial.finishing:  # it continues to the new rung
                trial.finishing = False
                self._stages[num_old].num_approaching += 1
            elif trial.next == num_old and self._slots.has_slot(number):
                self._slots.release(number)
                if old_top.values[number] != math.inf:
                    running.append(number)
                else:
                    stops.append(Stop(trial=number))
        completed = [n for n in sorted(self._slots.completed) if old_top.values.get(n, math.inf) != math.inf]
        for number in (*running, *completed):
            self._trials[number] = _Trial(next=num_old, last=_Report(old_top.length, old_top.values[number]))
            self._stages[num_old - 1].pause(number)
        return stops, running


def _pause_unless_resumed(trial: int, actions: list[Action]) -> None:
    """Insert a `Pause` of the running trial unless the actions stop it; if they resume it, only drop the `Resume`."""
    for place, action in enumerate(actions):
        if not isinstance(action, Done) and action.trial == trial:
            if isinstance(action, Resume):
                del actions[place]
            return
    actions.insert(0, Pause(trial=trial))
