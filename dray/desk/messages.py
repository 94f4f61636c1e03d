"""What workers send, and what the desk passes to its clients: one class per event."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dray.desk.failure import Failure
from dray.desk.wire import wire
from dray.masking import hidden_text
from dray.text import is_encodable

Row = dict[str, Any]  # a metric: batches, epochs, kind, name, value, time


def is_row(row: Any) -> bool:
    """Whether what has come is a row that can be kept."""
    match row:
        case {
            "batches": int(at),
            "epochs": int() | float() | None,
            "kind": str(kind),
            "name": str(name),
            "value": int() | float(),
            "time": int() | float(),
            **more,
        }:
            return type(at) is int and 0 <= at < 2**63 and not more and is_encodable(kind) and is_encodable(name)
    return False


Reply = Literal["continue", "stop", "pause", "interrupt", "fenced"]
"""What a trial is to do after a report: what the search decided; "interrupt": save and leave, to be resumed later;
"fenced": drop everything, as its lease is over."""
LeaseOutcome = Literal["completed", "stopped", "diverged", "paused", "interrupted", "errored", "invalid_hp"]
"""How a trial left its lease."""


@wire
@dataclass(frozen=True, slots=True, kw_only=True)
class DeskReport:
    """A report of a trial."""

    rows: Sequence[Row] = ()  # its metrics
    # step, value: the length and the metric that the search compares; None: there is nothing to compare
    step: float | None = None
    value: float | None = None
    # all metrics of a search with several, in its order; None: one that is missing
    metrics: Sequence[float | None] = ()
    final: bool = False  # the trial has completed
    warning: str = ""  # to show to the user; "" if there is none


@wire
@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """How a rank left its lease."""

    outcome: LeaseOutcome
    error: str = ""  # a traceback, or a message for the user; if diverged, which loss is NaN
    fatal: bool = False  # no restart and no other trial could do better, as with an error in the config
    # The error's kind and place; None if it is fatal. An error in a collective counts only if nobody reports its cause:
    # the rank that failed first does, or Ray, if its process died.
    failure: Failure | None = None
    alone: bool = False  # only this rank was made to leave; the others don't know, and may wait for it forever
    stale: str = ""  # why this rank's process should serve no other trial; "" if it can

    @property
    def is_failure(self) -> bool:
        return self.outcome in ("errored", "invalid_hp")

    def masked(self, secrets: Sequence[str]) -> Departure:
        """The same with the secrets masked."""
        failure = self.failure and replace(self.failure, where=hidden_text(self.failure.where, secrets))
        return replace(self, error=hidden_text(self.error, secrets), failure=failure)


@wire
@dataclass(frozen=True, slots=True, kw_only=True)
class Unfit:
    """Why a process can't run any trial, for the user."""

    message: str = ""  # the error, if there are no faults
    # what is wrong in the experiment file or the model's directory, each with its path; () if it is something else
    faults: Sequence[tuple[str, str]] = ()
    source: str = "The experiment config"  # what has the faults, as of `dray.errors.ConfigError`
    resumable: bool = False  # the experiment can be resumed once that is mended


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    time: float = field(default_factory=time.time)  # when it happened, in seconds since the epoch


# ---------------------------------------------------------------------------------------------------------- clients
@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLeft(_Event):
    """A client that was to be removed has no lease any more, and is forgotten."""

    client: str


# ---------------------------------------------------------------------------------------------------- worker groups
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerArrived(_Event):
    """A process of a group runs; it has not imported torch yet."""

    group: str
    start: int  # number of the group's start, unique in a run
    node: str  # Ray's id of its node


@wire
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUnfit(_Event):
    """A process of a group can't run any trial, and neither could another one in its place."""

    group: str
    why: Unfit


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReady(_Event):
    """All ranks of a new group wait for their first trial."""

    group: str
    start: int  # number of the group's start, unique in a run


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRetired(_Event):
    """A group's processes can't be reused after this trial; a new group will take its place."""

    group: str
    trial: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEnded(_Event):
    """A group's processes have ended."""

    group: str
    start: int  # number of the group's start, unique in a run
    dead: tuple[int, ...] = ()  # ranks whose processes died, as far as Ray knows
    error: str = ""  # why the processes could not serve trials

    @property
    def is_lost(self) -> bool:
        """Whether it ended unexpectedly."""
        return bool(self.dead or self.error)


# ----------------------------------------------------------------------------------------------------------- leases
@wire
@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGranted(_Event):
    """A trial was matched to a free group, and waits for the driver's parameters."""

    lease: int
    group: str
    trial: int
    gpu_type: str = ""  # of the GPUs of the group's nodes, by Ray's name, also if it uses none; "" if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportReceived(_Event):
    """Rank 0 of a lease has reported."""

    lease: int
    trial: int
    rows: Sequence[Row]
    step: float | None
    warning: str


@wire
@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLeft(_Event):
    """A trial has left its group, or failed there. For the fields see `Departure`."""

    lease: int
    group: str
    trial: int
    outcome: LeaseOutcome
    error: str = ""
    fatal: bool = False
    failure: Failure | None = None
    dead: Sequence[int] = ()  # ranks whose processes died, as far as Ray knows
    no_restart: str = ""  # why the log policies forbid a restart; the driver's shell adds it


@wire
@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOver(_Event):
    """A lease is over: all that its processes still send is fenced off."""

    lease: int
    group: str
    trial: int


# ------------------------------------------------------------------------------------------------------ checkpoints
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(_Event):
    """A trial has committed a checkpoint, or has resumed from it."""

    trial: int
    checkpoint: str
    batches: int
    value: float | None  # the searcher's metric at the checkpoint
    seconds: float | None = None  # how long it took to write and commit it; None if it existed before


Message = (
    WorkerArrived
    | WorkerUnfit
    | GroupReady
    | GroupRetired
    | GroupEnded
    | LeaseGranted
    | ReportReceived
    | TrialLeft
    | LeaseOver
    | CheckpointSaved
)
