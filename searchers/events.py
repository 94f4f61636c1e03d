"""The vocabulary of a search: events go into a method, actions come out. Both are values; `records` has their JSON.

A trial is known by its number: 0, 1, 2, ... in the order of creation.

    driver                      method
      │  start() ───────────────▶ │
      │ ◀──── Create(0) Create(1) │
      │  Started(0) ─────────────▶│        it has workers; its hyperparameters are drawn now
      │  Reported(0, step, value)▶│        a validation
      │ ◀─── Stop(0) Create(2)    │
      │  Exited(0, "stopped") ───▶│        exactly one exit per trial; repeats are ignored
      │            ...            │
      │ ◀─────── Done("completed")│        once, when every created trial has ended
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn

if TYPE_CHECKING:
    from searchers.objectives import Losses, Measured

Decision = Literal["continue", "stop", "pause"]
"""On a trial that has reported; "pause": it leaves its workers until the search resumes it."""
Reason = Literal["completed", "stopped", "diverged", "errored", "invalid_hp", "canceled"]
DoneReason = Literal["completed", "errored", "invalid_hp", "canceled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The trial has its workers. Sent again when a paused or restarted trial gets new ones."""

    trial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """A validation of the trial.

    `step` is the length trained since the trial's beginning, in the unit of `max_length`. `value` is the searcher's
    metric. A driver gives it to `Search` as measured; `Search` gives it to the method normalised: smaller is better,
    and +inf if it was missing, NaN or infinite.

    In a search with several metrics (`Search(objectives=...)`) a driver gives `metrics`, as measured, in the order of
    `Objectives.metrics`. The method gets `losses`, or None if a metric was missing or not finite; and as `value` the
    first objective, +inf without losses or if a constraint is not kept.
    """

    trial: int
    step: float
    value: float | None = None
    metrics: Measured = ()
    losses: Losses | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """The trial has ended. "stopped": because of a `Stop`; "completed": by itself, at any length; "diverged": because
    its loss was NaN."""

    trial: int
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Create:
    """Create this trial, and run it as soon as there are workers. Its hyperparameters are drawn when it starts."""

    trial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End this live trial."""

    trial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Release the workers of this running trial, and keep its checkpoint."""

    trial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Continue this paused trial from its latest checkpoint. After an extension, also one that has ended."""

    trial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The search is over: all trials have ended, and no action follows.

    "invalid_hp": too many trials were invalid, and the search ended early. Otherwise "completed" if any trial
    completed, diverged or was stopped, else "errored" if any errored, else "canceled".
    """

    reason: DoneReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """A trial's report for the search to decide on, its end, or both, as the drivers on Ray Tune pass it on."""

    number: int  # increases from result to result of a trial
    trial: int
    step: float | None = None
    value: float | None = None
    metrics: tuple[float | None, ...] = ()
    outcome: Reason | None = None  # the trial ends with this result


Event = Started | Reported | Exited
Action = Create | Stop | Pause | Resume | Done


def assert_never(value: NoReturn) -> NoReturn:
    """`typing.assert_never`, which Python 3.10 lacks."""
    raise AssertionError(f"unexpected {value!r}")
