"""The vocabulary of a search: events go into a method, actions come out. Both are values; `records` has their JSON.

Trials are numbered 0, 1, 2, ... in the order of creation.

    driver                      method
      │  start() ───────────────▶ │
      │ ◀──── Create(0) Create(1) │
      │  Started(0) ─────────────▶│        the trial has workers; its hyperparameters are drawn now
      │  Reported(0, step, value)▶│        a validation
      │ ◀─── Stop(0) Create(2)    │
      │  Exited(0, "stopped") ───▶│        exactly one per trial; repeats are ignored
      │            ...            │
      │ ◀─────── Done("completed")│        once, when every created trial has ended
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, NoReturn, get_args

Decision = Literal["continue", "stop", "pause"]
"""The decision on a trial that has reported. "pause": the trial frees its workers until the search resumes it."""
Reason = Literal["completed", "stopped", "diverged", "errored", "invalid_hp", "out_of_memory", "canceled"]
"""Why a trial has ended."""
Replaced = Literal["invalid_hp", "out_of_memory"]
"""A trial that ends for one of these reasons is withdrawn from its rungs, and most methods replace it."""
REPLACED: tuple[Replaced, ...] = get_args(Replaced)
FAILURES: tuple[Reason, ...] = ("errored", "diverged", "invalid_hp")  # samplers count such a trial as one of the worst
DoneReason = Literal["completed", "errored", "invalid_hp", "out_of_memory", "canceled"]
"""Why a search has ended."""


Measured = tuple[float | None, ...]
"""A trial's metrics as measured, in the order of `Objectives.metrics`; None if missing."""


class Losses(NamedTuple):
    """A trial's normalised metrics, all finite.

    >>> Losses((0.3, 12.0), (0.5, -0.1)).violation
    0.5
    """

    values: tuple[float, ...]  # one per objective; smaller is better
    excesses: tuple[float, ...] = ()  # one per limit, relative to it; positive if the constraint is violated

    @property
    def violation(self) -> float:
        """The sum of the positive excesses; 0 if all constraints are kept."""
        return sum([excess for excess in self.excesses if excess > 0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The trial has workers. Sent again when a paused or restarted trial gets new ones."""

    trial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """The trial has validated.

    A driver sends the measured metrics to `Search`, which normalises them for the method: smaller is better, and a
    value that was missing, NaN or infinite becomes +inf.

    In a search with several metrics (`Search(objectives=...)`) the driver sends `metrics`. The method gets `losses`
    and, as `value`, the first objective: +inf if there are no losses or if a constraint is violated.
    """

    trial: int
    step: float  # length trained since the trial's beginning, in the unit of `max_length`
    value: float | None = None  # the searcher's metric
    metrics: Measured = ()  # in the order of `Objectives.metrics`
    losses: Losses | None = None  # None if a metric was missing or not finite
    batches: int | None = None  # batches trained, which name the checkpoint in dray's store
    # Whether the trial is ranked only at the highest rung of those that it has passed since its last report. False in
    # the journals of earlier versions, which ranked it at all of them by this one value
    skips: bool = field(default=True, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """The trial has ended.

    "stopped": because of a `Stop`. "completed": by itself, at any length. "diverged": because its loss was NaN.
    "out_of_memory": its hyperparameters need more memory than there is.
    """

    trial: int
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The checkpoint of another trial that a new trial begins from."""

    trial: int
    step: float  # length trained when it was saved, in the unit of `max_length`
    batches: int | None = None  # batches trained then, which name the checkpoint in dray's store


@dataclass(frozen=True, slots=True, kw_only=True)
class Requested:
    """A person, or a program, requests a new trial, or the end of one. Sent to `Search`.

    Methods rank a requested trial as any other, but neither its training nor its slot counts for their budget.
    """

    id: str = ""  # chosen by the sender, to find the answer
    trial: int | None = None  # the trial to end; None: a new trial is requested
    source: Source | None = None  # begin from this checkpoint, with its trial's hyperparameters
    hparams: Mapping[str, object] | None = None  # replace these; without a source, the others are drawn at random
    code: str | None = (
        None  # name of the code that it runs, opaque to a search; None: the experiment's, or the source's
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """Another run of a trial from its beginning, with its hyperparameters and another seed."""

    trial: int  # the trial that is run again
    seed: int  # from 1; repeats of different trials with the same number have the same seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Create:
    """Create this trial, and run it as soon as workers are free. Its hyperparameters are drawn when it starts.

    A trial with `hparams` has these instead, and the others from its source's trial or, without one, at random from the
    space. With a source and no `hparams`, the sampler derives them from those of the source's trial.

    A trial with `code` gets the others from a sampler that learns only from trials with this code. A trial with a
    source has its source's code. A repeat has the hyperparameters and the code of the trial that it runs again.
    """

    trial: int
    source: Source | None = None  # begin from this checkpoint, at its step
    hparams: Mapping[str, object] | None = None
    code: str | None = None  # as in `Requested`; methods leave it to the search
    repeat: Repeat | None = None

    def __repr__(self) -> str:
        fields: dict[str, object] = {"trial": self.trial, "source": self.source, "hparams": self.hparams}
        fields |= {"code": self.code, "repeat": self.repeat}
        return f"Create({', '.join(f'{name}={value!r}' for name, value in fields.items() if value is not None)})"


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
    """Continue this paused trial from its latest checkpoint; after an extension, possibly one that has ended."""

    trial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The search is over: all trials have ended, and no action follows.

    The reason is "invalid_hp" or "out_of_memory" if the search ended early because too many trials were replaced, most
    of them for this reason. Otherwise it is "completed" if any trial completed, diverged or was stopped, else "errored"
    if any errored or ran out of memory, else "canceled".
    """

    reason: DoneReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """A trial's report, its end, or both, as the drivers on Ray Tune pass them to the search."""

    number: int  # increases with each result of a trial
    trial: int
    step: float | None = None
    value: float | None = None
    metrics: tuple[float | None, ...] = ()
    outcome: Reason | None = None  # set if the trial ends with this result
    batches: int | None = None  # batches trained at the report


Event = Started | Reported | Exited
"""What a driver tells a method."""
Action = Create | Stop | Pause | Resume | Done
"""What a method tells a driver to do."""


def assert_never(value: NoReturn) -> NoReturn:
    """`typing.assert_never`, which Python 3.10 lacks."""
    raise AssertionError(f"unexpected {value!r}")
