"""Decisions of an experiment's driver, as values that the shell around it carries out.

Journal records come first, then the others in order: a decision is in the journal before anything acts on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dray.leases.effects import Reply, Say
from dray.leases.messages import CheckpointSaved, ReportReceived
from searchers.events import Source


@dataclass(frozen=True, slots=True)
class Append:
    """Write a record to the journal."""

    record: Mapping[str, Any]  # without its time
    wait: bool = True  # whether it must reach the disk before the following effects; otherwise a crash may lose it

    @property
    def is_alert(self) -> bool:
        return self.record.get("event") == "alert"


@dataclass(frozen=True, slots=True)
class ToDesk:
    """Call a method of the desk for this run."""

    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """Remove the request with this id: its answer is in the journal."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bind:
    """Give a lease its parameters."""

    lease: int  # the lease's number
    trial: int
    seed: int
    hparams: Mapping[str, Any]
    last_step: float | None  # the greatest length reported to the search, in the searcher's unit; None without reports
    was_completed: bool  # the trial had completed, and continues because the search was extended
    source: Source | None = None  # the other trial's checkpoint that it begins from
    is_changed: bool = False  # its hyperparameters differ from its source's
    code: str | None = None  # the variant of the code that it runs; None: the experiment's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """An existing checkpoint."""

    trial: int
    batches: int  # batches trained when it was saved
    checkpoint: str  # its id
    value: float | None = None  # the searcher's metric at that batch; None without a validation


@dataclass(frozen=True, slots=True)
class Prune:
    """Delete checkpoints after their replacements are known to survive a power failure."""

    keep: Sequence[Saved]
    delete: Sequence[Saved]


@dataclass(frozen=True, slots=True)
class Examine:
    """List the checkpoints in a trial's store that are not known."""

    trial: int
    known: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowFailure:
    """Show that a trial failed."""

    trial: int
    error: str
    ended: str = ""  # the reason why it is not restarted; "" if it is
    kept: str = ""  # its state before its extension, if the extension failed for good


@dataclass(frozen=True, slots=True)
class Send:
    """Send an alert, which is a record of the journal, to its receivers."""

    alert: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EndRun:
    """End the run: its trials have been told to save and leave."""


@dataclass(frozen=True, slots=True)
class Fail:
    """End the run with this error."""

    error: Exception


Effect = (
    Append
    | Answered
    | ToDesk
    | Bind
    | Prune
    | Examine
    | Say
    | ShowFailure
    | Send
    | EndRun
    | Fail
    | Reply
    | ReportReceived
    | CheckpointSaved
)
