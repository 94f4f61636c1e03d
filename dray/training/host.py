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

#: The point that a validation has reached, for a search that measures length by a metric.
Reached = Literal["nothing", "rung", "end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Measurements since the last report, and the checkpoint made with them."""

    batches: int  # trained in total on each slot
    epochs: float | None = None  # trained in total; None if the data have no length
    training: Mapping[str, object] | None = None  # averaged over the batches since the last report and over ranks
    validation: Mapping[str, object] | None = None
    decides: bool = False  # the loop waits here for the search's decision (at a rung, or the end)
    final: bool = False
    interrupted: bool = False  # the run was asked to stop, and ends here to be resumed later
    checkpoint: str | None = None  # the id from `Host.commit`; None if nothing was saved or it is not committed yet
    system: Mapping[str, float] | None = None  # figures of `dray.training.usage`; only in some reports
    groups: Mapping[str, Mapping[str, object]] | None = None  # further metrics of a program with its own loop
    read: Collection[str] | None = None  # the hyperparameters that the trial's code has read; None: unknown
    length: float | None = None  # in the search's unit, if a program states it; None: derived from batches or epochs
    compared: bool = True  # whether a search may compare this validation


class Behind(Protocol):
    """Lets another trial have the slots of one that leaves, while its last checkpoint is written from a copy."""

    def is_wanted(self, *, returns: bool) -> bool:
        """Whether this trial should leave for another one that waits for these slots. `returns`: this one trains on
        later, unless the search stops it. Called on the chief."""

    def wait(self) -> None:
        """Wait until an earlier trial's copy is no longer needed: called before another one is made, on every rank."""

    def take(self, finish: Callable[[], None], nbytes: int, *, goes_on: bool) -> None:
        """Let this rank leave the trial. `finish` waits until the checkpoint of `nbytes` bytes is committed, and the
        report sent, and raises their errors. `goes_on`: the trial has not asked to stop here."""


class Host(Protocol):
    """Runs a trial: in this process, in torchrun's processes, or in a Ray worker.

    Unless stated otherwise, methods are called on the chief only. `commit` may be called in another thread, for one
    checkpoint after another, while reports are published. A report that the search decides on is published only once
    its checkpoint is committed, and nothing else is published meanwhile. `new_checkpoint` and `add_to_checkpoint` are
    called on the first rank of each machine with a part of a checkpoint. All attributes are the same on every rank of a
    trial, except the trial seed, of which the chief's is used.
    """

    #: They identify this run in logs and results.
    experiment_id: int
    trial_id: int
    #: The seed of Python's, NumPy's and torch's RNGs, and of the order of shuffled data.
    trial_seed: int
    #: The value of `get_cluster_info().latest_checkpoint`, for `fit(latest_checkpoint=...)`: an id or a path.
    latest_checkpoint: str | None
    #: The directory of event files, which need not exist.
    tensorboard_path: Path
    #: The directory of source code to copy into each checkpoint's `code/`; None for nothing.
    code_dir: Path | None
    #: Strings to mask in that copy, besides the secrets in the trial's config; see `dray.masking`.
    secrets: Sequence[str]
    #: The checkpoint from whose state a fresh trial starts, at batch 0; or None.
    source_checkpoint: str | None
    #: The length set by the search; None leaves it to `fit(max_length=...)`.
    max_length: TrainUnit | None
    #: Absolute lengths at which the search decides.
    rungs: Sequence[TrainUnit]
    #: When to validate and save if `fit()` does not specify it; None: only at rungs and at the end.
    validation_period: TrainUnit | None
    checkpoint_period: TrainUnit | None
    #: The validation metrics that the search compares; empty if there is no search.
    metrics: Sequence[str]
    #: Whether `checkpoint_policy="best"` is possible: only an experiment knows its best validation.
    best_supported: bool
    #: Whether a commit goes over a network.
    is_remote: bool

    @property
    def behind(self) -> Behind | None:
        """None if no other trial can have this one's slots before its last checkpoint is committed."""

    @property
    def is_changed_fork(self) -> bool:
        """Whether `latest_checkpoint` is another trial's, with other hyperparameters: optimizers keep this trial's."""

    def is_best(self, validation: Mapping[str, object]) -> bool:
        """Whether this validation is the best of the experiment. Called with `checkpoint_policy="best"`, unless the
        report decides, since then a checkpoint is saved in any case."""

    def reached(self, validation: Mapping[str, object]) -> Reached:
        """The point that this validation has reached, if the search measures length by a metric. Called at every
        validation.

        Raises:
            SearcherMetricError: the metric is missing, or its value is not a length.
        """

    def training(self, plan: Plan, begin: int, peers: DistributedContext) -> AbstractContextManager[None]:
        """The block in which all ranks together perform a plan, from batch `begin` on.

        Raises:
            KeyboardInterrupt: on every rank at the end of the block, if the user has interrupted any of them.
        """

    def watch(self, progress: Callable[[], tuple[int, int]]) -> None:
        """Use this function, on every rank and from any thread, to poll (batches trained, batches validated)."""

    def new_checkpoint(self, batches: int) -> Path:
        """Make an empty directory for the files of a checkpoint at this number of batches."""

    def commit(self, staging: Path, report: Report, known: Mapping[str, Listed]) -> str:
        """Commit the files in `staging` as the checkpoint at `report.batches`, all or nothing, and return its id.
        `known` has the files whose checksums are known, including those from `add_to_checkpoint` on other machines."""

    def add_to_checkpoint(self, staging: Path, batches: int, known: Mapping[str, Listed]) -> dict[str, Listed]:
        """Upload this machine's part of a checkpoint to a remote store, and return its files, with which the chief on
        another machine calls `commit`. `known` has the files whose checksums are known."""

    def open_checkpoint(self, checkpoint: str) -> Path:
        """Verify a checkpoint, and return its directory. Called on the first rank of each machine, or on every rank.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            CheckpointError: the checkpoint is damaged.
        """

    def last_checkpoint(self) -> str | None:
        """The id for `fit(latest_checkpoint="last")`; None if there is no checkpoint, so training begins at batch 0."""

    def stop_requested(self) -> bool:
        """Whether training should save and stop, at a batch that all ranks agree on, to be resumed later.

        Called repeatedly on every rank, in a thread other than the training's. One rank's request stops all.
        """

    def publish(self, report: Report) -> bool:
        """Pass on a report, and return whether training should stop here."""


@runtime_checkable
class ProgramHost(Host, Protocol):
    """A host that can also run programs with their own loop, for `dray.core`.

    Called on the chief only, except `opened` and `interrupted`.
    """

    #: The remaining lengths at which the search decides, ascending and including the last, in the search's unit; empty
    #: if it sets no length.
    lengths: Sequence[float]
    #: The location for files other than checkpoints, next to the trial's checkpoints.
    outputs: Location

    def open_checkpoint(self, checkpoint: str, *, only: Collection[str] = ()) -> Path:
        """Like `Host.open_checkpoint`. With `only`, just these files are verified, on any rank and at any time."""

    def opened(self) -> None:
        """Called on every rank when the program has called `core.init()`."""

    def report(self, report: Report) -> bool:
        """Pass on a report, and return whether the program should save its state and return. Unlike with `publish`, the
        host derives from the report whether the search decides here.

        Raises:
            SearcherMetricError: the first validation lacks the metric that the search compares; or the report lacks the
                trial's length in the search's unit.
            TrialEnded: the program kept reporting after it was asked to stop.
        """

    def interrupted(self) -> None:
        """Called when the program has acknowledged a request to stop: it ends soon, and is resumed later."""

    def checkpoint_id(self, batches: int) -> str:
        """The id of the checkpoint that `commit` makes at this number of batches."""

    def delete_checkpoint(self, checkpoint: str) -> None:
        """Delete a checkpoint of this trial.

        Raises:
            ValueError: the checkpoint is another trial's.
        """

    def best_validation(self) -> float | None:
        """The best value of the search's metric that a trial has reported; None if there is none, or no search."""
