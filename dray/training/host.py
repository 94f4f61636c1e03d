"""Where a training run happens, as the loop sees it: who stores, who listens, who says stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from dray.storage.manifest import Listed
from dray.training.units import TrainUnit

Reached = Literal["nothing", "rung", "end"]
"""What a validation is to a search that counts by one of its metrics: nothing, a rung where it decides, the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was measured since the last report, and the checkpoint that was made with it.

    Args:
        batches: trained in all, per slot.
        epochs: batches in epochs, None if the data has no length.
        training: metrics averaged over the batches since the last report and over ranks; None if nothing was trained.
        validation: metrics of a validation at `batches`; None if there was none.
        decides: the loop waits here for a search's decision (a rung, or the end).
        final: nothing comes after it.
        interrupted: the run was asked to stop, and ends here to be gone on with.
        checkpoint: the id that `Host.commit` gave; None if nothing was saved, or it is yet to be committed.
        system: what was taken of time and of the machine, as `dray.training.usage` has it, now and then.
        groups: further metrics of a program with a loop of its own, by the names of its groups.
        length: how long the trial is in the search's own unit, where a program says so; None: found from the others.
        compared: whether a search may compare this validation.
    """

    batches: int
    epochs: float | None = None
    training: Mapping[str, object] | None = None
    validation: Mapping[str, object] | None = None
    decides: bool = False
    final: bool = False
    interrupted: bool = False
    checkpoint: str | None = field(default=None)
    system: Mapping[str, float] | None = None
    groups: Mapping[str, Mapping[str, object]] | None = None
    length: float | None = None
    compared: bool = True


class Host(Protocol):
    """A laptop, a group of torchrun processes, a Ray worker.

    Methods are called on the chief only, but for `open_checkpoint` and `asked_to_stop`. `commit` may be called from
    another thread than the others, one checkpoint after another; its report is then published meanwhile, and further
    ones too.

    Attributes must be the same on every rank of a trial, but for the trial seed, of which the chief's counts.
    """

    #: Name this run in logs and results.
    experiment_id: int
    trial_id: int
    #: Seeds python, numpy, torch and the order of shuffled data.
    trial_seed: int
    #: What `get_cluster_info().latest_checkpoint` says, for `fit(latest_checkpoint=...)`: an id or a path.
    latest_checkpoint: str | None
    #: Where event files go. Need not exist.
    tensorboard_path: Path
    #: What the trainer copies into `code/` of each checkpoint; None for nothing.
    code_dir: Path | None
    #: Texts that are not to be in it there, beside those of the trial's own config; see `dray.masking`.
    secrets: Sequence[str]
    #: A trial that has no checkpoint of its own begins with the state of this one, at its own first batch; or None.
    source_checkpoint: str | None
    #: The length that a search wants; None leaves it to `fit(max_length=...)`.
    max_length: TrainUnit | None
    #: Absolute lengths at which the search decides.
    rungs: Sequence[TrainUnit]
    #: When to validate and to save where `fit()` says nothing of it; None: only where the search or the end asks.
    validation_period: TrainUnit | None
    checkpoint_period: TrainUnit | None
    #: The validation metric that the search compares; None if there is no search.
    metric: str | None
    #: Whether `checkpoint_policy="best"` can be served: the best of an experiment is known to an experiment only.
    best_supported: bool
    #: Whether committing a checkpoint takes as long as a network does.
    is_remote: bool

    def worth_saving(self, validation: Mapping[str, object]) -> bool:
        """Whether this validation is the best of the experiment. Asked with `checkpoint_policy="best"` only."""
        ...

    def reached(self, validation: Mapping[str, object]) -> Reached:
        """Where a search that counts by a metric of this validation has the trial now. Asked at every validation.

        Raises:
            SearcherMetricError: the metric is not there, or it is no length.
        """
        ...

    def watch(self, progress: Callable[[], tuple[int, int]]) -> None:
        """Take what tells how far this rank is, from any thread: batches trained, and those of the latest validation.

        Called on every rank.
        """
        ...

    def new_checkpoint(self, batches: int) -> Path:
        """An empty directory to write a checkpoint into, of what is trained and was published so far."""
        ...

    def commit(self, staging: Path, report: Report, digests: Mapping[str, str]) -> str:
        """Make what is in `staging` the checkpoint at `report.batches`, all or nothing; return its id.

        `digests` are the SHA-256 of files there, by their names, as far as they are known.
        """
        ...

    def open_checkpoint(self, checkpoint: str) -> Path:
        """The directory of a checkpoint, verified. Called on every rank.

        Raises:
            FileNotFoundError, CheckpointError: there is none of this name, or it is damaged.
        """
        ...

    def asked_to_stop(self) -> bool:
        """Whether training is to stop soon, to be gone on with: at a batch that all ranks agree on, with a checkpoint.

        Called again and again, on every rank, in a thread beside the training. One rank's request is that of all.
        """
        ...

    def publish(self, report: Report) -> bool:
        """Pass on what was measured; return whether training should stop here."""
        ...


@runtime_checkable
class ProgramHost(Host, Protocol):
    """A host that can also run programs with a loop of their own: what `dray.core` asks of it beside.

    Called on the chief only, but for `interrupted`; and on a machine that has a part of a checkpoint, on its first
    rank, `new_checkpoint` and `add_to_checkpoint`.
    """

    #: Lengths that the search is yet to have a report of: where it decides, and the last one, ascending, in its own
    #: unit; () if it counts none.
    lengths: Sequence[float]

    def report(self, report: Report) -> bool:
        """Pass on what was measured; return whether the program should save what it needs, and return.

        As `publish`, but the host finds out from the report whether the search decides on it.

        Raises:
            SearcherMetricError: the report does not say how long the trial is in the search's unit.
            TrialEnded: the program was told to end before, and goes on.
        """
        ...

    def interrupted(self) -> None:
        """The program has heard that it is asked to stop, and ends soon, to be gone on with."""
        ...

    def checkpoint_id(self, batches: int) -> str:
        """The id of what `commit` makes at so many batches."""
        ...

    def add_to_checkpoint(self, staging: Path, batches: int) -> dict[str, Listed]:
        """Store a part of a checkpoint that another machine's chief commits, where the store is a network away; return
        its files, for `commit`."""
        ...

    def commit(
        self,
        staging: Path,
        report: Report,
        digests: Mapping[str, str],
        others: Mapping[str, Listed] | None = None,
    ) -> str:
        """As of `Host`; with what `add_to_checkpoint` has returned on other machines."""
        ...

    def delete_checkpoint(self, checkpoint: str) -> None:
        """Remove a checkpoint of this trial.

        Raises:
            ValueError: it is another one's.
        """
        ...

    def best_validation(self) -> float | None:
        """The best value of the search's metric that any trial has reported; None if there is none, or no search."""
        ...
