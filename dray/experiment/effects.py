"""What the driver of an experiment decides, as values: the shell around it carries them out.

Journal records first, then the others in their order: a decision is in the journal before anything acts on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dray.desk.effects import Reply, Say
from dray.desk.messages import CheckpointSaved, ReportReceived


@dataclass(frozen=True, slots=True)
class Append:
    """Write a record to the journal."""

    record: Mapping[str, Any]  # without its time
    wait: bool = True  # whether it must be on the disk before what follows; otherwise a crash may lose it


@dataclass(frozen=True, slots=True)
class ToDesk:
    """Call this method of the desk, as this client of it."""

    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bind:
    """Give a lease its parameters."""

    lease: int  # its number
    trial: int  # trial, seed, hparams: what to train
    seed: int
    hparams: Mapping[str, Any]
    last_step: float | None  # the greatest length that the search has a report of, in its unit; None if it has none
    was_completed: bool  # the trial had completed, and continues because the search was extended


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """An existing checkpoint."""

    trial: int  # trial, batches: its trial, and after how many batches it was saved
    batches: int
    checkpoint: str  # its id
    # The searcher's metric at that batch; None if the trial was not validated at that batch
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Prune:
    """Delete checkpoints, once those that take their place are known to survive a power failure."""

    keep: Sequence[Saved]
    delete: Sequence[Saved]


@dataclass(frozen=True, slots=True)
class Examine:
    """List the checkpoints in a trial's store that are not these."""

    trial: int
    known: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowFailure:
    """Show that a trial failed."""

    trial: int
    error: str
    ended: str = ""  # why it is not restarted; "" if it is
    kept: str = ""  # how it had ended before its extension, if it was the extension that failed for good


@dataclass(frozen=True, slots=True)
class Fail:
    """End the run with this error."""

    error: Exception


Effect = Append | ToDesk | Bind | Prune | Examine | Say | ShowFailure | Fail | Reply | ReportReceived | CheckpointSaved
