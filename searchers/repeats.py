"""Repeats: the best trials of a search are trained again with other seeds, before one of them is called the best.

The best value among many trials is partly luck: its trial was chosen because the value is good, so that another run of
it is likely to be worse (the winner's curse). The search therefore only selects the finalists. They are compared by
new runs, all with the same seeds, so that differences between seeds cancel out.

    search ── Done ──▶ the best `top` trials ──▶ Create(repeat=...) for each seed and each of them ──▶ Done

Repeats are neither ranked nor stopped. For the method they are requested trials, which report nothing and end.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from searchers.errors import MethodError
from searchers.events import Action, Create, Done, Event, Exited, Reason, Repeat, Reported, Requested, Resume
from searchers.method import Fields, Method
from searchers.slots import num_slots

_SELECTED: tuple[Reason, ...] = ("completed", "stopped")  # a trial that failed, diverged or was canceled is no finalist


class Repeats:
    """A search method, followed by repeats of its best trials.

    Finalists are the trials that trained to the end, then those that came closest to it, by rungs; among equals, those
    with the lowest value. A trial that began from a checkpoint is never a finalist, because its training can't be
    repeated from the beginning. Repeats that exist are not run again after an extension, unless it increases the
    length.

    Args:
        method: A new method, which must be able to create requested trials.
        seeds: Number of repeats of each finalist, >= 1.
        top: Number of finalists, >= 1.
        max_concurrent_trials: Maximum number of repeats that run at the same time; 0 = no limit.

    Raises:
        MethodError: At least one argument is invalid; the message names each.

    >>> from searchers import RandomSearch
    >>> search = Repeats(RandomSearch(max_trials=2), seeds=2, top=1)
    >>> search.start(), search.on(Reported(trial=0, step=1, value=0.5)), search.on(Reported(trial=1, step=1, value=0.4))
    ([Create(trial=0), Create(trial=1)], [], [])
    >>> search.on(Exited(trial=0, reason="completed"))
    []
    >>> for action in search.on(Exited(trial=1, reason="completed")):
    ...     print(action)
    Create(trial=2, repeat=Repeat(trial=1, seed=1))
    Create(trial=3, repeat=Repeat(trial=1, seed=2))
    """

    def __init__(self, method: Method, *, seeds: int, top: int, max_concurrent_trials: int = 0) -> None:
        check = Fields()
        check.integers(1, seeds=seeds, top=top)
        check.integers(0, max_concurrent_trials=max_concurrent_trials)
        check.raise_faults()
        if not hasattr(method, "requested"):
            what = f"needs a method that can create trials on request; {type(method).__name__} has no requested()"
            raise MethodError([("repeat", what)])
        self.method, self.seeds, self.top = method, seeds, top
        self._max_concurrent = num_slots(max_concurrent_trials)
        self._live: set[int] = set()  # all live trials
        self._values: dict[int, float] = {}  # the best value of each trial of the search
        self._steps: dict[int, float] = {}  # the length that each has trained; infinite if it has completed
        self._repeats: dict[int, Repeat] = {}
        self._forks: set[int] = set()
        self._made: set[Repeat] = set()  # repeats of the present length
        self._to_create: deque[Repeat] = deque()

    @property
    def rungs(self) -> tuple[float, ...]:
        """The rungs of the method."""
        return self.method.rungs

    @property
    def pareto(self) -> bool:
        """Whether the method ranks several objectives."""
        return bool(getattr(self.method, "pareto", False))

    @property
    def limit_points(self) -> Callable[[int], None] | None:
        """The method's own `limit_points`, if it has one."""
        return getattr(self.method, "limit_points", None)

    @property
    def max_trials(self) -> int:
        """The number of trials of the search itself."""
        return int(getattr(self.method, "max_trials", 0))

    def is_repeat(self, trial: int) -> bool:
        """Whether the trial is a repeat of another one."""
        return trial in self._repeats

    def start(self) -> list[Action]:
        """Return the first actions of the method."""
        return self._follow(self.method.start())

    def on(self, event: Event) -> list[Action]:
        """Return the actions of the method, or after its end those of the repeats."""
        trial = event.trial
        if trial not in self._live:
            return self.method.on(event)  # it is late, or illegal
        if trial in self._repeats:
            if not isinstance(event, Exited):
                return []
            self._live.remove(trial)
            # Any other reason could be ranked, or be counted as a failure of the search.
            return self._follow(self.method.on(replace(event, reason=_ended(event.reason))))
        actions = self.method.on(event)
        match event:
            case Reported(step=step, value=value):
                self._steps[trial] = max(step, self._steps.get(trial, 0))
                if value is not None and value < self._values.get(trial, math.inf):
                    self._values[trial] = value
            case Exited(reason=reason):
                self._live.remove(trial)
                if reason == "completed":
                    self._steps[trial] = math.inf
                elif reason not in _SELECTED:
                    self._values.pop(trial, None)
        return self._follow(actions)

    def requested(self, request: Requested) -> list[Action]:
        """Pass a request on to the method."""
        self._to_create.clear()  # there may be other finalists
        return self._follow(cast("Any", self.method).requested(request))

    def progress(self, trained: Mapping[int, float]) -> float:
        """Return the progress of the method, which is done only after the repeats."""
        return self.method.progress(trained)

    def extend(self, *, max_trials: int | None = None, max_length: int | None = None) -> list[Action]:
        """Extend the search. Finalists are then chosen again; repeats that trained for another length don't count."""
        rungs = self.rungs
        actions = self.method.extend(max_trials=max_trials, max_length=max_length)
        self._to_create.clear()
        if self.rungs != rungs:
            self._made.clear()
        return self._follow(actions)

    def _follow(self, actions: list[Action]) -> list[Action]:
        """Note the method's actions, and put the repeats in place of its `Done`."""
        for action in actions:
            match action:
                case Create(trial=trial, source=source):
                    self._live.add(trial)
                    if source is not None:
                        self._forks.add(trial)
                case Resume(trial=trial):
                    self._live.add(trial)
                    self._steps.pop(trial, None)
                    if trial in self._repeats:
                        self._made.add(self._repeats[trial])
        is_done = bool(actions) and isinstance(actions[-1], Done)
        if is_done:
            self._to_create = deque(self._missing())
        repeats = self._create()
        return [*actions[: -1 if is_done and repeats else None], *repeats]

    def _missing(self) -> list[Repeat]:
        """Return the repeats that finalists lack, by seed: if the search is ended early, they can be compared."""
        lengths = {
            trial: bisect_right(self.rungs, step) if step < math.inf else len(self.rungs) + 1
            for trial, step in self._steps.items()
            if trial in self._values and trial not in self._forks
        }
        finalists = heapq.nsmallest(self.top, lengths, key=lambda trial: (-lengths[trial], self._values[trial], trial))
        repeats = [Repeat(trial=trial, seed=seed) for seed in range(1, self.seeds + 1) for trial in finalists]
        return [repeat for repeat in repeats if repeat not in self._made]

    def _create(self) -> list[Action]:
        """Create as many repeats as may run."""
        created: list[Action] = []
        if not self._to_create:
            return created
        running = sum(trial in self._repeats for trial in self._live)
        while self._to_create and running + len(created) < self._max_concurrent:
            repeat = self._to_create.popleft()
            (new,) = cast("Any", self.method).requested(Requested())
            self._made.add(repeat)
            self._repeats[new.trial] = repeat
            self._live.add(new.trial)
            created.append(Create(trial=new.trial, repeat=repeat))
        return created


def _ended(reason: Reason) -> Reason:
    return "completed" if reason == "completed" else "stopped"
