"""The vocabulary of a search: events go into a method, actions come out. Both are values; `records` has their JSON.

A trial is known by its number: 0, 1, 2, ... in the order of creation.

    driver                      method
      │  start() ───────────────▶ │
      │ ◀──── Create(0) Create(1) │
      │  Started(0) ─────────────▶│        workers were found; its hyperparameters are drawn now
      │  Reported(0, step, value)▶│        a validation
      │ ◀─── Stop(0) Create(2)    │
      │  Exited(0, "stopped") ───▶│        exactly one end per trial; repeats are ignored
      │            ...            │
      │ ◀─────── Done("completed")│        once, when every created trial has ended
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NoReturn

Reason = Literal["completed", "stopped", "diverged", "errored", "invalid_hp", "canceled"]
DoneReason = Literal["completed", "errored", "invalid_hp", "canceled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The trial has its workers. Comes again when a paused or restarted trial gets new ones."""

    trial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """A validation of the trial.

    `step` is the length trained since the trial's beginning, in the unit of `max_length`. `value` is the searcher's
    metric: as measured in what a driver tells `Search`, normalised (smaller is better, never NaN) in what `Search`
    tells a method.
    """

    trial: int
    step: float
    value: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """The trial has ended for good. "stopped": it obeyed a `Stop`; "completed": it ended by itself, at any length;
    "diverged": it was ended because its loss was NaN."""

    trial: int
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Create:
    """Make this trial, and run it when there is room. Its hyperparameters are drawn when it starts."""

    trial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End this live trial, for good."""

    trial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Take the workers from this trial; its checkpoint stays."""

    trial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Give this paused trial workers again, from its latest checkpoint."""

    trial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The search is over: all trials have ended and no action follows.

    "invalid_hp": too many trials were invalid, and the search ended early. Otherwise "completed" if any trial
    completed, diverged or was stopped, else "errored" if any errored, else "canceled".
    """

    reason: DoneReason


Event = Started | Reported | Exited
Action = Create | Stop | Pause | Resume | Done


def assert_never(value: NoReturn) -> NoReturn:
    """`typing.assert_never`, which Python 3.10 lacks."""
    raise AssertionError(f"unexpected {value!r}")
