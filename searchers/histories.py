"""Random histories of a search, for the checks of `searchers.testing`.

Trials start, report (in order, late, out of order, not finite), stop or complete before they could, pause at once or
one report later, fail (also while paused), are invalid, are canceled; the search is extended while it runs and when it
is done.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from searchers.errors import MethodError
from searchers.events import Action, Create, Done, Event, Exited, Pause, Reason, Reported, Resume, Started, Stop
from searchers.method import Method
from searchers.objectives import Measured, Metric, Objectives
from searchers.search import Search

OBJECTIVES = Objectives((Metric(name="loss"), Metric(name="size"), Metric(name="time", at_most=0.8)))
"""Of a search with several metrics; it needs a method that ranks by losses."""
_REASONS: tuple[Reason, ...] = ("completed", "stopped", "diverged", "errored", "invalid_hp", "canceled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """A call of `extend`, among the events of a history."""

    max_trials: int | None = None
    max_length: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The first actions of a method, then every event with the actions that followed."""

    first: list[Action]
    steps: list[tuple[Event | Extension, list[Action]]]

    def actions(self) -> list[Action]:
        return [*self.first, *(action for _, actions in self.steps for action in actions)]


class Driven(Protocol):
    """A `Method` or a `Search`."""

    def start(self) -> list[Action]: ...
    def on(self, event: Event) -> list[Action]: ...
    def extend(self, *, max_trials: int | None = None, max_length: int | None = None) -> list[Action]: ...


def send(subject: Driven, event: Event | Extension) -> list[Action]:
    """Send a step of a history to a method or search; returns the actions that follow."""
    if isinstance(event, Extension):
        return subject.extend(max_trials=event.max_trials, max_length=event.max_length)
    return subject.on(event)


def play(
    subject: Driven,
    seed: int,
    *,
    length: float,
    normalised: bool = True,
    always: Reason | None = None,
    extensions: Iterable[Extension] = (),
) -> History:
    """Drive a method or a search through a random history until it is done.

    Args:
        subject: A new one; it is started here.
        seed: The same seed and the same answers give the same history.
        length: Length at which trials end by themselves. An extension may change it.
        normalised: Report values as a method gets them; else also NaN, None and infinities, as a search does.
        always: Every trial ends this way, without a report.
        extensions: Requested in this order at random moments, at the latest when the search is done. Refused ones are
            not in the history.
    """
    player = _Player(subject, Random(seed), length, normalised, always, list(extensions))
    first = subject.start()
    player.carry_out(first)
    while not player.done or player.extensions:
        assert len(player.steps) < 100_000, f"seed {seed}: the search did not end within 100,000 events"
        player.step()
    for trial in sorted(player.ended)[-3:]:  # late reports, after the end
        player.send(player.report(trial, length))
    return History(first=first, steps=player.steps)


@dataclass(slots=True)
class _Player:
    subject: Driven
    rng: Random
    length: float
    normalised: bool
    always: Reason | None
    extensions: list[Extension]
    pending: list[int] = field(default_factory=list)
    running: dict[int, float] = field(default_factory=dict)  # trial: step it has reached
    paused: set[int] = field(default_factory=set)
    stopping: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    reached: dict[int, float] = field(default_factory=dict)  # steps of those that are paused or have ended
    steps: list[tuple[Event | Extension, list[Action]]] = field(default_factory=list)
    done: bool = False

    def step(self) -> None:
        rng = self.rng
        if self.extensions and (self.done or rng.random() < 0.02):
            self.extend(self.extensions.pop(0))
            return
        if self.paused and rng.random() < 0.05:
            self.step_paused(rng.choice(sorted(self.paused)))
            return
        if self.pending and (not self.running or (len(self.running) < 4 and rng.random() < 0.4)):
            trial = self.pending.pop(rng.randrange(len(self.pending)))
            self.running[trial] = self.reached.get(trial, 0)
            self.send(Started(trial=trial))
            return
        assert self.running, f"no trial is pending or running, {len(self.paused)} are paused, but Done did not come"
        trial = rng.choice(list(self.running))
        chance = rng.random()
        if self.always is not None:
            self.exit(trial, self.always)
        elif self.ended and chance < 0.05:
            self.send(self.report(rng.choice(sorted(self.ended)), self.length))
        elif chance < 0.1:
            self.exit(trial, rng.choice(_REASONS))
        elif chance < 0.15:  # restarted from an earlier checkpoint
            self.running[trial] *= rng.random()
            self.send(Started(trial=trial))
        elif chance < 0.18:  # out of order
            self.send(self.report(trial, self.running[trial] * rng.random()))
        elif trial in self.stopping and chance < 0.7:
            self.exit(trial, "stopped")
        elif self.running[trial] >= self.length:
            self.exit(trial, "completed")
        else:
            self.running[trial] = self.further(self.running[trial])
            self.send(self.report(trial, self.running[trial]))

    def step_paused(self, trial: int) -> None:
        """A paused trial fails, is canceled, or reports once more before its workers leave."""
        if self.rng.random() < 0.3:
            self.exit(trial, self.rng.choice(("errored", "canceled", "invalid_hp")))
        else:
            self.reached[trial] = self.further(self.reached[trial])
            self.send(self.report(trial, self.reached[trial]))

    def further(self, step: float) -> float:
        return min(step + max(1, round(self.rng.random() ** 3 * self.length)), self.length)

    def report(self, trial: int, step: float) -> Reported:
        """A report of one metric, and of two and a constraint, which follow from it."""
        value = self.value()
        if value is None or not math.isfinite(value):
            several: Measured = (value, 0.5, 0.5)
        else:
            several = (value, round((7919 * value) % 1, 1), round((104729 * value) % 1, 2))
        if self.normalised:
            return Reported(trial=trial, step=step, value=value, losses=OBJECTIVES.normalised(several))
        objectives = self.subject.objectives if isinstance(self.subject, Search) else None
        return Reported(trial=trial, step=step, value=value, metrics=several if objectives is not None else ())

    def value(self) -> float | None:
        odd = self.rng.random()
        if odd < 0.15:
            return math.inf if self.normalised else self.rng.choice([math.nan, math.inf, -math.inf, None])
        return round(self.rng.random(), 1 if odd < 0.5 else 6)  # one decimal: many ties

    def exit(self, trial: int, reason: Reason) -> None:
        self.reached[trial] = self.running.pop(trial, self.reached.get(trial, 0))
        self.paused.discard(trial)
        self.stopping.discard(trial)
        self.ended.add(trial)
        self.send(Exited(trial=trial, reason=reason))

    def extend(self, extension: Extension) -> None:
        method = self.subject.method if isinstance(self.subject, Search) else self.subject
        assert isinstance(method, Method)
        try:
            actions = send(self.subject, extension)
        except MethodError:
            return
        if method.rungs:
            self.length = method.rungs[-1]
        self.done = False
        self.steps.append((extension, actions))
        self.carry_out(actions)

    def send(self, event: Event) -> None:
        actions = self.subject.on(event)
        self.steps.append((event, actions))
        self.carry_out(actions)

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Create(trial=trial):
                    self.pending.append(trial)
                case Stop(trial=trial):
                    self.stopping.add(trial)
                    if trial in self.paused:
                        self.paused.remove(trial)
                        self.running[trial] = self.reached[trial]
                case Pause(trial=trial):
                    self.reached[trial] = self.running.pop(trial)
                    self.paused.add(trial)
                case Resume(trial=trial):
                    self.paused.discard(trial)
                    self.ended.discard(trial)
                    self.pending.append(trial)
                case Done():
                    self.done = True
