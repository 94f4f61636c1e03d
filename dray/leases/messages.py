"""Messages from workers, and from the desk to its clients: one class per event."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dray.leases.failure import Failure
from dray.masking import hidden_text
from dray.rpc.wire import wire
from dray.text import is_encodable

Row = dict[str, Any]  # a metric: batches, epochs, kind, name, value, time


def is_row(row: Any) -> bool:
    """Whether a received value is a valid row."""
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
"""The reply to a trial's report: the search's decision; "interrupt": save and leave, to be resumed later; "fenced":
drop everything, because the lease is over."""
LeaseOutcome = Literal[
    "completed", "stopped", "diverged", "paused", "interrupted", "errored", "invalid_hp", "unloaded", "writing",
    "yielded",
]  # fmt: skip
"""How a trial has left its lease. "unloaded": its code can't be imported in this process, which had other code.
"writing": its group can train another trial while its last checkpoint is written; it leaves a second time, with its
outcome, once that is done. "yielded": it did so at a rung, and the search lets it go on."""


@wire
@dataclass(frozen=True, slots=True, kw_only=True)
class DeskReport:
    """A report of a trial."""

    rows: Sequence[Row] = ()  # its metrics
    step: float | None = None  # the length that the search compares at; None: nothing to compare
    value: float | None = None  # the metric that the search compares
    metrics: Sequence[float | None] = ()  # with several metrics, all of them in the search's order; None: missing
    final: bool = False  # the trial has completed
    read: Sequence[str] | None = None  # the hyperparameters that the trial has read, or may have; None: it does not say

    @property
    def is_valid(self) -> bool:
        """Whether its rows are metrics, and its step is a length."""
        return all(map(is_row, self.rows)) and 0 <= (self.step or 0) < math.inf


@wire
@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A rank's departure from its lease."""

    outcome: LeaseOutcome
    error: str = ""  # a traceback, or a message for the user; if diverged, the loss that is NaN
    fatal: bool = False  # no restart and no other trial could succeed, as with an error in the config
    # The error's kind and place; None if it is fatal. An error in a collective counts only if its cause is not reported
    # by the rank that failed first or, if its process died, by Ray.
    failure: Failure | None = None
    alone: bool = False  # only this rank leaves; the others don't know, and may wait for it forever
    stale: str = ""  # the reason why this rank's process should not serve another trial; "" if it can
    reused: bool = False  # it failed before it trained, in a process that had run other trials or code

    @property
    def is_failure(self) -> bool:
        return self.outcome in ("errored", "invalid_hp")

    def masked(self, secrets: Sequence[str]) -> Departure:
        """This departure with the secrets masked."""
        failure = self.failure and replace(self.failure, where=hidden_text(self.failure.where, secrets))
        return replace(self, error=hidden_text(self.error, secrets), failure=failure)


@wire
@dataclass(frozen=True, slots=True, kw_only=True)
class Unfit:
    """The reason why a process can't run any trial, for the user."""

    message: str = ""  # the error, if there are no faults
    faults: Sequence[tuple[str, str]] = ()  # faults of the experiment file or the model directory, with their paths
    source: str = "The experiment config"  # the origin of the faults, as in `dray.errors.ConfigError`
    resumable: bool = False  # the experiment can be resumed after the cause is fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    time: float = field(default_factory=lambda: time.time())  # Unix time in s; a simulation replaces the clock


# ---------------------------------------------------------------------------------------------------------- clients
@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLeft(_Event):
    """A client that is being removed has no leases any more, and is forgotten."""

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
    reason: str  # "": they are fine, but a trial needs new ones


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEnded(_Event):
    """A group's processes have ended, are about to, or could not start."""

    group: str
    start: int  # number of the group's start, unique in a run
    dead: Mapping[int, str] = field(default_factory=dict)
    """The ranks whose processes died, with the cause if Ray or the kernel knows it, else ""."""
    nodes: Mapping[int, str] = field(default_factory=dict)  # Ray's ids of the dead ranks' nodes
    error: str = ""  # why the processes could not serve trials; "" if they could

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
    gpu_type: str = ""  # Ray's name of the GPU type of the group's nodes, used or not; "" if unknown
    slot_type: str = ""  # see `dray.cluster.view.slot_type`


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportReceived(_Event):
    """Rank 0 of a lease has reported."""

    lease: int
    trial: int
    rows: Sequence[Row]
    step: float | None


@wire
@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLeft(Departure):
    """A trial has left its group, or failed there, by this departure."""

    lease: int
    group: str
    trial: int
    dead: Sequence[int] = ()  # ranks whose processes died, as far as Ray knows
    nodes: Sequence[str] = ()  # their nodes, by Ray's ids; "" where unknown
    no_restart: str = ""  # the log policy that forbids a restart; added by the driver's shell
    time: float = field(default_factory=lambda: time.time())  # as of each event


@wire
@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFailed(_Event):
    """A process of a trial died, and its log says that the GPU of its node, by Ray's id, may be broken."""

    trial: int
    node: str


@wire
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFreed(_Event):
    """A trial's group can train another one, while the trial's last checkpoint is written. Its lease goes on."""

    lease: int
    group: str
    trial: int


@wire
@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOver(_Event):
    """A lease is over: later messages from its processes are fenced off."""

    lease: int
    group: str
    trial: int
    freed: bool = False  # its group was freed before


# ------------------------------------------------------------------------------------------------------ checkpoints
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(_Event):
    """A trial has committed a checkpoint, or has resumed from it."""

    trial: int
    checkpoint: str
    batches: int
    value: float | None  # the searcher's metric at the checkpoint
    seconds: float | None = None  # time to write and commit it; None if it existed before


Message = (
    WorkerArrived
    | WorkerUnfit
    | GroupReady
    | GroupRetired
    | GroupEnded
    | LeaseGranted
    | ReportReceived
    | TrialLeft
    | GpuFailed
    | GroupFreed
    | LeaseOver
    | CheckpointSaved
)
