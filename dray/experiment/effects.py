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
    """Write a record to the journal.

    Attributes:
        record: without its time.
        wait: whether it must be on the disk before what follows; otherwise a crash may lose it.
    """

    record: Mapping[str, Any]
    wait: bool = True


@dataclass(frozen=True, slots=True)
class ToDesk:
    """Call this method of the desk, as this client of it."""

    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bind:
    """Give a lease its parameters.

    Attributes:
        lease: its number.
        trial, seed, hparams: what to train.
        last_step: the greatest length that the search has a report of, in its unit; None if it has none.
        was_completed: the trial had completed, and continues because the search was extended.
    """

    lease: int
    trial: int
    seed: int
    hparams: Mapping[str, Any]
    last_step: float | None
    was_completed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """An existing checkpoint.

    Attributes:
        trial, batches: its trial, and after how many batches it was saved.
        checkpoint: its id.
        value: the searcher's metric at that batch; None if the trial was not validated at that batch.
    """

    trial: int
    batches: int
    checkpoint: str
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
    """Show that a trial failed.

    Attributes:
        ended: why it is not restarted; "" if it is.
        kept: how it had ended before its extension, if it was the extension that failed for good.
    """

    trial: int
    error: str
    ended: str = ""
    kept: str = ""


@dataclass(frozen=True, slots=True)
class Fail:
    """End the run with this error."""

    error: Exception


Effect = Append | ToDesk | Bind | Prune | Examine | Say | ShowFailure | Fail | Reply | ReportReceived | CheckpointSaved
