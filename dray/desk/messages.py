"""What the desk tells the driver, one class per event, and the words that they share."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dray.desk.failure import Failure

Decision = Literal["continue", "stop", "pause"]
"""The search's decision on a trial that has reported; "pause": it leaves its workers until the search resumes it."""
Reply = Literal["continue", "stop", "pause", "interrupt", "fenced"]
"""What a trial is to do after a report: what the search decided; "interrupt": save and leave, to be resumed later;
"fenced": drop everything, as its lease is over."""
LeaseOutcome = Literal["completed", "stopped", "diverged", "paused", "interrupted", "errored", "invalid_hp"]
"""How a rank left its lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    time: float = field(default_factory=time.time)
    """When it happened, in seconds since the epoch."""


# ---------------------------------------------------------------------------------------------------- worker groups
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerArrived(_Event):
    """A process of a group runs; it has not imported torch yet."""

    group: str
    node: str
    """Ray's id of its node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUnfit(_Event):
    """A process of a group can't run any trial, and neither could another one in its place."""

    group: str
    cause: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReady(_Event):
    """All ranks of a new group wait for their first trial."""

    group: str


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
    start: int
    """Number of the group's start, unique in a run."""
    dead: tuple[int, ...] = ()
    """Ranks whose processes died, as far as Ray knows."""
    error: str = ""
    """Why the processes could not serve trials."""

    @property
    def is_lost(self) -> bool:
        """Whether it ended unexpectedly."""
        return bool(self.dead or self.error)


# ----------------------------------------------------------------------------------------------------------- leases
@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGranted(_Event):
    """A trial was matched to a free group, and waits for the driver's parameters."""

    lease: int
    group: str
    trial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportReceived(_Event):
    """Rank 0 of a lease has reported."""

    lease: int
    trial: int
    report: Mapping[str, Any]
    """``rows``: metrics; ``step``, ``value``: what the search compares; ``final``; perhaps ``warning``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLeft(_Event):
    """A trial has left its group, or failed there."""

    lease: int
    group: str
    trial: int
    outcome: LeaseOutcome
    error: str = ""
    fatal: bool = False
    """No restart and no other trial could do better, as with an error in the config."""
    failure: Failure | None = None
    """Set if ``outcome`` is "errored", unless the error is fatal."""
    dead: tuple[int, ...] = ()
    """Ranks whose processes died, as far as Ray knows."""


# ------------------------------------------------------------------------------------------------------ checkpoints
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(_Event):
    """A trial has committed a checkpoint, or has resumed from it."""

    trial: int
    checkpoint: str
    batches: int
    value: float | None
    """The searcher's metric at the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDamaged(_Event):
    """A trial has skipped a damaged checkpoint."""

    trial: int
    checkpoint: str
    error: str


# ------------------------------------------------------------------------------------------------------ Tune's handle
@dataclass(frozen=True, slots=True, kw_only=True)
class HandleStarted(_Event):
    """A process of the Tune handle asks for results for the first time."""

    process: int


Message = (
    WorkerArrived
    | WorkerUnfit
    | GroupReady
    | GroupRetired
    | GroupEnded
    | LeaseGranted
    | ReportReceived
    | TrialLeft
    | CheckpointSaved
    | CheckpointDamaged
    | HandleStarted
)
