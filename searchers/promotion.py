"""ASHA, the promotion variant: a trial pauses at each rung, and goes on once a place is free and it is among the best.

Source: Li et al., "A System for Massively Parallel Hyperparameter Tuning" (arXiv 1810.05934), algorithm 2: a free place
looks through the rungs from the top for the best trial not yet promoted among the best floor(n / divisor), and trains
it to the next rung; if there is none, it begins a new trial. Where the paper is silent:

* lengths of rungs are those of `ASHA`, absolute (Determined's promotion added them up, past `max_length`);
* of equal values those of trials with lower numbers are the better ones;
* a value that is not finite is never promoted: its trial is stopped at the rung;
* a report that crosses several rungs is filed at the first of them, and at the next once the trial is promoted;
* a rung that no more trials can reach is final: then its best goes on even among fewer than `divisor`, so that a small
  search trains a trial to the end, too; and paused trials that nothing can promote any more are stopped.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from typing import cast

from searchers.asha import ASHA, longer_rungs
from searchers.events import Action, Done, Exited, Pause, Reported, Resume, Stop
from searchers.records import number_from_json, number_to_json
from searchers.rung import Rung


class Waiting:
    """Trials that are paused at one rung, to be promoted or not."""

    def __init__(self) -> None:
        self._values: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []  # with entries of discarded trials, until they come to the top

    def add(self, trial: int, value: float) -> None:
        """The trial waits."""
        self._values[trial] = value
        heappush(self._heap, (value, trial))

    def discard(self, trial: int) -> None:
        """The trial waits no longer."""
        self._values.pop(trial, None)

    def first(self) -> int | None:
        """The best one."""
        heap = self._heap
        while heap and heap[0][1] not in self._values:
            heappop(heap)
        return heap[0][1] if heap else None

    def __contains__(self, trial: int) -> bool:
        return trial in self._values

    def clear(self) -> list[int]:
        """Remove and return all of them, by number."""
        trials = sorted(self._values)
        self._values, self._heap = {}, []
        return trials

    def dump(self) -> list[list[object]]:
        return [[trial, value] for trial, value in sorted(self._values.items())]

    def load(self, state: list[tuple[int, float]]) -> None:
        self._values = dict(state)
        self._heap = [(value, trial) for trial, value in self._values.items()]
        heapify(self._heap)


class PromotionASHA(ASHA):
    """Asynchronous successive halving, promoting.

    A paused trial holds no place, so `max_concurrent_trials` bounds the trials that run. Once no more trials can reach
    a rung, those paused there that nothing can promote any more are stopped, from the first rung upwards. If the search
    is extended, those that are promising again go on from their checkpoints.

    Args:
        max_trials, max_length, num_rungs, divisor, max_concurrent_trials, max_invalid: As in `ASHA`.

    Raises:
        MethodError: A field is invalid; all are named.

    >>> asha = PromotionASHA(max_trials=4, max_length=4, num_rungs=2, divisor=2, max_concurrent_trials=1)
    >>> asha.start(), asha.on(Reported(trial=0, step=2, value=0.5))
    ([Create(trial=0)], [Pause(trial=0), Create(trial=1)])
    >>> asha.on(Reported(trial=1, step=2, value=0.6))
    [Pause(trial=1), Resume(trial=0)]
    """

    _name = "promotion_asha"
    _least = 0

    def _prepare(self) -> None:
        self._waiting = [Waiting() for _ in self.rungs]
        self._pair()
        self._heading = [0 for _ in self.rungs]  # number of trials with a place, by their next rung
        # Step and value of the last report of each trial that is paused or shelved.
        self._reached: dict[int, tuple[float, float]] = {}
        self._shelved: set[int] = set()  # stopped while paused: an extension may resume them
        self._ending: set[int] = set()  # resumed only to end: they had passed the top rung before they paused

    def grow(self, max_trials: int, max_length: int, max_invalid: int) -> list[Action]:
        """`extend` for a search that is a bracket of another."""
        stops: list[Action] = []
        running: list[int] = []
        if max_length > self.rungs[-1]:
            stops, running = self._add_rungs(max_length)
        for trial in sorted(self._shelved):
            rung = self._next[trial] - 1
            self._waiting[rung].add(trial, self._rungs[rung].value_of(trial))
        self._shelved.clear()
        self._reopen()
        self._roster.extend(max_trials=max_trials, width=self._width(max_trials), max_invalid=max_invalid)
        actions = self._settle()
        for trial in running:
            _spare(trial, actions)
        return [*stops, *actions]

    def _add_rungs(self, max_length: int) -> tuple[list[Action], list[int]]:
        """Add rungs on top. Trials that completed at the old top now wait there, as if paused. So do those that still
        run there (the second result), or they are stopped (the first) if their value is not finite."""
        top, length = self._rungs[-1], self.rungs[-1]
        next_rung = len(self.rungs)
        running = sorted(
            trial for trial, rung in self._next.items() if rung == next_rung and self._roster.holds_place(trial)
        )
        self.rungs = longer_rungs(self.rungs, max_length=max_length, divisor=self.divisor)
        for _ in self.rungs[next_rung:]:
            self._rungs.append(Rung(divisor=self.divisor, least=self._least))
            self._waiting.append(Waiting())
            self._heading.append(0)
        self._pair()
        for trial in self._ending:
            running.remove(trial)
            self._heading[next_rung] += 1
        self._ending.clear()
        for trial in running:
            self._roster.free_place(trial)
        for trial in (*running, *sorted(self._roster.completed)):
            if trial in top and top.value_of(trial) < math.inf:
                self._next[trial] = next_rung
                self._reached[trial] = (length, top.value_of(trial))
                self._waiting[next_rung - 1].add(trial, top.value_of(trial))
        lost = [trial for trial in running if trial not in self._reached]
        return [Stop(trial=trial) for trial in lost], [trial for trial in running if trial in self._reached]

    def _pair(self) -> None:
        # Looked through at every event; no trial waits at the top rung.
        self._from_the_top = list(zip(self._rungs, self._waiting, strict=True))[-2::-1]

    def _settle(self) -> list[Action]:
        """Promotions and new trials for free places, `Stop` for trials that can't be promoted any more, or `Done`."""
        roster = self._roster
        actions: list[Action] = [] if roster.may_create else self._close()
        while not roster.is_full:
            if (trial := self._promotable()) is not None:
                actions += self._promote(trial)
            elif roster.may_create:
                actions.append(roster.create())
                self._heading[0] += 1
            else:
                break
            if not roster.may_create:
                actions += self._close()
        actions += roster.finish()
        return actions

    def _promotable(self) -> int | None:
        """A waiting trial among the best 1/divisor of its rung: the best one of the highest rung that has any."""
        for rung, waiting in self._from_the_top:
            trial = waiting.first()
            if trial is not None and rung.is_best(trial):
                return trial
        return None

    def _promote(self, trial: int) -> list[Action]:
        rung = self._next[trial]
        self._waiting[rung - 1].discard(trial)
        if self._reached[trial][0] >= self.rungs[rung]:  # it has passed that rung already
            return self._arrive(trial, rung)
        self._heading[rung] += 1
        del self._reached[trial]
        return [self._roster.take_place(trial)]

    def _arrive(self, trial: int, rung: int) -> list[Action]:
        """File a trial that holds no place at a rung that it has reached."""
        value = self._reached[trial][1]
        self._rungs[rung].offer(trial, value)
        self._next[trial] = rung + 1
        if rung == len(self.rungs) - 1:
            self._ending.add(trial)
            del self._reached[trial]
            return [self._roster.take_place(trial)]
        if value < math.inf:
            self._waiting[rung].add(trial, value)
            return []
        del self._reached[trial]
        return [Stop(trial=trial)] if self._roster.is_live(trial) else []

    def _close(self) -> list[Action]:
        """Make rungs final that no trial can reach any more, from the bottom; stop those that can't be promoted there.

        Called when no trial is created any more.
        """
        stops: list[Action] = []
        for rung, waiting, heading in zip(self._rungs[:-1], self._waiting, self._heading, strict=False):
            if heading:
                break
            rung.set_least(1)
            first = waiting.first()
            if first is not None and rung.is_best(first):  # it will come to the rung above
                break
            for trial in waiting.clear():
                if self._roster.is_live(trial):
                    stops.append(Stop(trial=trial))
                else:
                    self._shelved.add(trial)
        return stops

    def _reopen(self) -> None:
        """Trials may come again to any rung."""
        for rung in self._rungs:
            rung.set_least(0)

    def _report(self, report: Reported) -> list[Action]:
        """File the report at the trial's next rung, if it reached it; there it pauses, unless it goes on at once."""
        trial, step = report.trial, report.step
        value = math.inf if report.value is None or math.isnan(report.value) else report.value
        if not self._roster.holds_place(trial):
            if trial in self._reached and step > self._reached[trial][0]:  # told to pause, and not paused yet
                self._reached[trial] = (step, value)
            return []
        rung = self._next.get(trial, 0)
        if rung == len(self.rungs) or step < self.rungs[rung]:
            return []
        self._heading[rung] -= 1
        if rung == len(self.rungs) - 1:
            self._rungs[rung].offer(trial, value)
            self._next[trial] = rung + 1
            return []
        self._roster.free_place(trial)
        self._reached[trial] = (step, value)
        actions = self._arrive(trial, rung)
        actions += self._settle()
        _spare(trial, actions)
        return actions

    def _leave(self, event: Exited) -> None:
        """The trial ends: an invalid one was never there, one that failed or diverged is the worst of the rung that it
        was to come to."""
        trial, rung = event.trial, self._next.pop(event.trial, 0)
        reached = self._reached.pop(trial, None)
        self._ending.discard(trial)
        is_coming = self._roster.holds_place(trial) and rung < len(self.rungs)
        if is_coming:
            self._heading[rung] -= 1
        was_waiting = rung > 0 and trial in self._waiting[rung - 1]
        if was_waiting:
            self._waiting[rung - 1].discard(trial)
        if event.reason == "invalid_hp":
            for passed in self._rungs[:rung]:
                passed.withdraw(trial)
            self._reopen()
        elif event.reason in ("errored", "diverged", "canceled") and is_coming:
            self._rungs[rung].offer(trial, math.inf)
        elif rung == 0:
            self._unranked += 1
        elif event.reason == "stopped" and reached is not None and not was_waiting:
            self._shelved.add(trial)
            self._next[trial], self._reached[trial] = rung, reached
        self._roster.end(trial, event.reason)

    def dump(self) -> dict[str, object]:
        """The state as JSON."""
        return super().dump() | {
            "waiting": [waiting.dump() for waiting in self._waiting],
            "reached": [[trial, step, number_to_json(value)] for trial, (step, value) in sorted(self._reached.items())],
            "shelved": sorted(self._shelved),
            "ending": sorted(self._ending),
        }

    def load(self, state: dict[str, object]) -> None:
        """Continue from a dump."""
        super().load(state)
        self._waiting = [Waiting() for _ in self.rungs]
        self._pair()
        for waiting, values in zip(self._waiting, cast("list[list[tuple[int, float]]]", state["waiting"]), strict=True):
            waiting.load(values)
        self._reached = {
            trial: (step, cast(float, number_from_json(value)))
            for trial, step, value in cast("list[tuple[int, float, object]]", state["reached"])
        }
        self._shelved = set(cast("list[int]", state["shelved"]))
        self._ending = set(cast("list[int]", state["ending"]))
        self._heading = [0 for _ in self.rungs]
        for trial in self._roster.placed:
            if self._next.get(trial, 0) < len(self.rungs):
                self._heading[self._next.get(trial, 0)] += 1


def _spare(trial: int, actions: list[Action]) -> None:
    """Add a `Pause` of the running trial to these actions, unless they resume it (then it just goes on) or stop it."""
    for place, action in enumerate(actions):
        if not isinstance(action, Done) and action.trial == trial:
            if isinstance(action, Resume):
                del actions[place]
            return
    actions.insert(0, Pause(trial=trial))
