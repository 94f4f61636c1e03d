"""The host of a training run: stores its checkpoints, receives its reports, and asks it to stop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from dray.storage.location import Location
from dray.storage.manifest import Listed
from dray.training.parallel.distributed import DistributedContext
from dray.training.plan import Plan
from dray.training.units import TrainUnit

#: What a validation has reached, for a search that measures length by a metric.
Reached = Literal["nothing", "rung", "end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was measured since the last report, and the checkpoint that was made with it."""

    batches: int  # trained in total, per slot
    epochs: float | None = None  # the same in epochs; None if the data has no length
    training: Mapping[str, object] | None = None  # averaged over the batches since the last report and over ranks
    validation: Mapping[str, object] | None = None
    decides: bool = False  # the loop waits here for the search's decision (at a rung, or the end)
    final: bool = False
    interrupted: bool = False  # the run was asked to stop, and ends here to be resumed later
    checkpoint: str | None = None  # what `Host.commit` returned; None if nothing was saved, or it is not committed yet
    system: Mapping[str, float] | None = None  # figures of `dray.training.usage`; only in some reports
    groups: Mapping[str, Mapping[str, object]] | None = None  # further metrics of a program with its own loop
    length: float | None = None  # in the search's unit, if a program states it; None: derived from the others
    compared: bool = True  # whether a search may compare this validation


class Host(Protocol):
    """Where a trial runs: this process, processes of torchrun, or a Ray worker.

    Methods are called on the chief only, unless stated otherwise. `commit` may be called in another thread, one
    checkpoint after another, and reports be published meanwhile; but one that the search decides on only once its
    checkpoint is committed, and nothing else meanwhile. `new_checkpoint` and `add_to_checkpoint` are called on the
    first rank of each machine that has a part of a checkpoint. Attributes are the same on every rank of a trial, except
    the trial seed: the chief's counts.
    """

    #: Identify this run in logs and results.
    experiment_id: int
    trial_id: int
    #: Seeds Python's, NumPy's and torch's RNGs, and the order of shuffled data.
    trial_seed: int
    #: The value of `get_cluster_info().latest_checkpoint`, for `fit(latest_checkpoint=...)`: an id or a path.
    latest_checkpoint: str | None
    #: The directory of event files. Need not exist.
    tensorboard_path: Path
    #: The directory of source code that is copied into `code/` of each checkpoint; None for nothing.
    code_dir: Path | None
    #: Texts to mask in that copy, besides the secrets of the trial's config; see `dray.masking`.
    secrets: Sequence[str]
    #: A checkpoint whose state a fresh trial starts from, at batch 0; or None.
    source_checkpoint: str | None
    #: The length set by the search; None leaves it to `fit(max_length=...)`.
    max_length: TrainUnit | None
    #: Absolute lengths at which the search decides.
    rungs: Sequence[TrainUnit]
    #: When to validate and save if `fit()` does not say; None: only at rungs and at the end.
    validation_period: TrainUnit | None
    checkpoint_period: TrainUnit | None
    #: The validation metrics that the search compares; none if there is no search, or it compares nothing.
    metrics: Sequence[str]
    #: Whether `checkpoint_policy="best"` is possible: only in an experiment is its best validation known.
    best_supported: bool
    #: Whether a commit goes over a network.
    is_remote: bool

    def is_best(self, validation: Mapping[str, object]) -> bool:
        """Whether this validation is the best of the experiment. Called with `checkpoint_policy="best"`, unless a
        checkpoint is saved in any case, because the report decides."""

    def reached(self, validation: Mapping[str, object]) -> Reached:
        """What this validation has reached, if the search measures length by a metric. Called at every validation; a
        SearcherMetricError if the metric is missing, or its value is not a length."""

    def training(self, plan: Plan, begin: int, peers: DistributedContext) -> AbstractContextManager[None]:
        """The block in which a plan is performed, from batch `begin` on, by every rank together; ends with a
        KeyboardInterrupt on every rank if the user has interrupted the training of any."""

    def watch(self, progress: Callable[[], tuple[int, int]]) -> None:
        """Poll this function, in any thread, on every rank, for its (batches trained, batches validated)."""

    def new_checkpoint(self, batches: int) -> Path:
        """An empty directory to write a checkpoint into, at this many batches."""

    def commit(self, staging: Path, report: Report, known: Mapping[str, Listed]) -> str:
        """Commit the files in `staging` as the checkpoint at `report.batches`, all or nothing; returns its id. `known`
        are files whose checksums are known, with all that `add_to_checkpoint` returned on other machines."""

    def add_to_checkpoint(self, staging: Path, batches: int) -> dict[str, Listed]:
        """Upload a part of a checkpoint that the chief on another machine commits, to a remote store; returns its
        files, for `commit`."""

    def open_checkpoint(self, checkpoint: str) -> Path:
        """The directory of a checkpoint, verified. Called on the first rank of each machine, or on every rank; a
        FileNotFoundError or CheckpointError if there is none, or it is damaged."""

    def last_checkpoint(self) -> str | None:
        """The id that `fit(latest_checkpoint="last")` stands for; None: there is none, training begins at batch 0."""

    def stop_requested(self) -> bool:
        """Whether training is to stop soon, to be resumed later: at a batch that all ranks agree on, with a checkpoint.

        Called repeatedly on every rank, not in the training's thread. One rank's request stops all.
        """

    def publish(self, report: Report) -> bool:
        """Pass on a report; returns whether training should stop here."""


@runtime_checkable
class ProgramHost(Host, Protocol):
    """A host that can also run programs with their own loop: what `dray.core` needs in addition.

    Called on the chief only, except `opened` and `interrupted`.
    """

    #: The remaining lengths at which the search decides, and the last one; ascending, in its own unit. () if the search
    #: sets no length.
    lengths: Sequence[float]
    #: Where files that are no checkpoints are kept, next to the trial's checkpoints.
    outputs: Location

    def open_checkpoint(self, checkpoint: str, *, only: Collection[str] = ()) -> Path:
        """As `Host.open_checkpoint`; with `only`, just these files are verified, in any rank and at any time."""

    def opened(self) -> None:
        """The program has called `core.init()`. On every rank."""

    def report(self, report: Report) -> bool:
        """Pass on a report; returns whether the program should save what it needs and return. As `publish`, but the
        host finds out from the report whether the search decides here.

        Raises:
            SearcherMetricError: the first validation lacks the metric that the search compares; or the report does not
                have the trial's length in the search's unit.
            TrialEnded: the program was asked to stop before, and kept reporting.
        """

    def interrupted(self) -> None:
        """The program knows that it is asked to stop, and ends soon, to be resumed later."""

    def checkpoint_id(self, batches: int) -> str:
        """The id of the checkpoint that `commit` makes at this many batches."""

    def delete_checkpoint(self, checkpoint: str) -> None:
        """Delete a checkpoint of this trial; a ValueError if it is another trial's."""

    def best_validation(self) -> float | None:
        """The best value of the search's metric reported by any trial; None if there is none, or no search."""
