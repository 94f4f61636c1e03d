"""A literal implementation of promotion: no heaps, no counters; everything is sorted and counted at every event."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction

from searchers import Action, Create, Done, Event, Exited, Pause, Reported, Resume, Stop
from searchers.events import REPLACED


@dataclass
class Trial:
    state: str = "running"  # or "paused", "stopped", "ended"
    live: bool = True
    reason: str = ""
    values: dict[int, float] = field(default_factory=dict)  # by rung
    last: tuple[float, float] = (0, math.inf)  # step and value

    @property
    def next(self) -> int:
        return max(self.values, default=-1) + 1


class NaivePromotion:
    """The same decisions as `PromotionASHA`, without extensions of the length.

    Args:
        rungs: Lengths of the rungs.
        max_trials, divisor, max_concurrent_trials: As in `PromotionASHA`.
    """

    def __init__(self, *, rungs: tuple[int, ...], max_trials: int, divisor: float, max_concurrent_trials: int) -> None:
        self.rungs, self.max_trials, self.divisor = rungs, max_trials, Fraction(str(divisor))
        self.max_concurrent_trials, self.max_replaced = max_concurrent_trials, max(16, 4 * max_trials)
        self.trials: list[Trial] = []
        self.closed: set[int] = set()
        self.done = False

    def start(self) -> list[Action]:
        return self.fill()

    def may_create(self) -> bool:
        replaced = sum(trial.reason in REPLACED for trial in self.trials)
        return replaced <= self.max_replaced and len(self.trials) - replaced < self.max_trials

    def in_state(self, state: str, rung: int | None = None) -> list[int]:
        """Return the trials in this state whose next rung is `rung`."""
        return [i for i, t in enumerate(self.trials) if t.state == state and rung in (None, t.next)]

    def promotable(self, rung: int) -> int | None:
        """Return the best paused trial of the rung, if it is among the best there."""
        ranked = sorted((t.values[rung], i) for i, t in enumerate(self.trials) if rung in t.values)
        k = max(math.floor(len(ranked) / self.divisor), int(rung in self.closed and bool(ranked)))
        paused = self.in_state("paused", rung + 1)
        best = min(((self.trials[i].values[rung], i) for i in paused), default=None)
        return best[1] if best in ranked[:k] and best is not None else None

    def fill(self) -> list[Action]:
        actions = self.close()
        while len(self.in_state("running")) < self.max_concurrent_trials:
            found = [i for rung in reversed(range(len(self.rungs) - 1)) if (i := self.promotable(rung)) is not None]
            if found and self.trials[found[0]].last[0] >= self.rungs[self.trials[found[0]].next]:
                actions += self.arrive(found[0])
            elif found:
                self.trials[found[0]].state = "running"
                actions.append(Resume(trial=found[0]))
            elif self.may_create():
                actions.append(Create(trial=len(self.trials)))
                self.trials.append(Trial())
            else:
                break
            actions += self.close()
        if not self.done and not any(trial.live for trial in self.trials):
            self.done = True
            reasons = [trial.reason for trial in self.trials]
            good = any(reason in ("completed", "stopped", "diverged") for reason in reasons)
            rest = next((r for r in ("errored", "canceled", "invalid_hp") if r in reasons), "completed")
            replaced = Counter(reason for reason in reasons if reason in REPLACED)
            if replaced.total() > self.max_replaced:
                good, rest = False, replaced.most_common(1)[0][0]
            actions.append(Done(reason="completed" if good else rest))  # type: ignore[arg-type]
        return actions

    def close(self) -> list[Action]:
        """Once no more trials are created, close each rung that none can reach, up to one that still promotes."""
        actions: list[Action] = []
        for rung in range(len(self.rungs) - 1) if not self.may_create() else ():
            if self.in_state("running", rung):
                break
            self.closed.add(rung)
            if self.promotable(rung) is not None:
                break
            for i in self.in_state("paused", rung + 1):
                self.trials[i].state = "stopped"
                actions += [Stop(trial=i)] if self.trials[i].live else []
        return actions

    def lowest(self, step: float) -> int:
        """Return the first rung that has the length of the highest one that was reached."""
        reached = [length for length in self.rungs if length <= step]
        return self.rungs.index(reached[-1]) if reached else 0

    def arrive(self, i: int) -> list[Action]:
        trial = self.trials[i]
        rung, value = max(trial.next, self.lowest(trial.last[0])), trial.last[1]
        trial.values[rung] = value
        if rung == len(self.rungs) - 1:
            trial.state = "running"
            return [Resume(trial=i)]
        trial.state = "paused" if value < math.inf else "lost"
        return [] if value < math.inf else [Stop(trial=i)]

    def on(self, event: Event) -> list[Action]:
        trial = self.trials[event.trial]
        if not trial.live:
            return []
        if isinstance(event, Exited):
            going = trial.state == "running" and trial.next < len(self.rungs)
            trial.live, trial.reason = False, event.reason
            if event.reason in ("errored", "diverged", "canceled") and going:
                trial.values[trial.next] = math.inf
            elif event.reason in REPLACED:
                trial.values.clear()
                self.closed.clear()
            trial.state = "ended"
            return self.fill()
        if not isinstance(event, Reported):
            return []
        value = math.inf if event.value is None or math.isnan(event.value) else event.value
        if trial.state in ("paused", "stopped") and event.step > trial.last[0]:
            trial.last = (event.step, value)
        if trial.state != "running" or trial.next == len(self.rungs) or event.step < self.rungs[trial.next]:
            return []
        trial.last = (event.step, value)
        top = len(self.rungs) - 1
        if max(trial.next, self.lowest(event.step)) == top:
            trial.values[top] = value
            return []
        actions = self.arrive(event.trial) + self.fill()
        mine = [action for action in actions if not isinstance(action, Done) and action.trial == event.trial]
        if mine and isinstance(mine[0], Resume):
            actions.remove(mine[0])
        return actions if mine else [Pause(trial=event.trial), *actions]
