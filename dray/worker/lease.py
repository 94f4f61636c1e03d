"""The data of a leased trial: the settings shared by all trials of the experiment, and the lease itself."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dray.storage import CheckpointStore
from dray.training.units import Batch, TrainUnit
from searchers.objectives import loss_of

if TYPE_CHECKING:
    from dray.config.schema import ExperimentConfig
    from dray.environment import Device
    from searchers.events import Measured
    from searchers.objectives import Objectives

REPORT_FILE = "report.json"
"""A file in a checkpoint with the measurements since the previous checkpoint, in case the driver never got them."""
SEND_EVERY_S = 0.25
"""Training metrics are not urgent, so they are batched into one message per this interval: a message costs over a
millisecond of CPU time."""


class LeaseLost(RuntimeError):
    """The trial now runs on other workers: this process must drop its results."""


class DriverLost(LeaseLost):
    """The trial's driver has ended, or can't be reached from this process; in the latter case the trial goes on
    elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSettings:
    """The settings that all trials of an experiment share. Fields not listed here are as in the config.

    Args:
        config: the experiment's config as plain data, without its secrets.
        secrets: texts to hide in logs and errors; see `dray.masking`.
        data: the config's `data` section, with secrets. Left out of the repr, which Ray's dashboard shows.
        metric: the validation metric that the search compares, or the first objective.
        objectives: the search's objectives, if it has several metrics.
        max_length: the maximum length of a trial; its unit is the searcher's unit (batches if None).
        rungs: absolute lengths at which the search decides, in the searcher's unit.
        source_checkpoint: the checkpoint that every trial starts from, or None.
        time_metric: a validation metric that measures length instead of batches, or None.
        time_rungs: with `time_metric`, the lengths at which the search decides, ascending; a trial ends at the last.
        validation_period, checkpoint_period: the longest allowed interval, or None.
        is_single: whether the searcher is `single`, whose program may end without a report.
        environment: environment variables of trials; None unsets a variable.
        is_sandboxed: whether each trial runs in a sandbox; see `dray.worker.sandbox`.
        readable: other files and directories that a trial in a sandbox may read.
    """

    config: Mapping[str, Any]
    metric: str
    smaller_is_better: bool
    max_length: TrainUnit | None
    rungs: Sequence[TrainUnit]
    validation_period: TrainUnit | None
    checkpoint_period: TrainUnit | None
    objectives: Objectives | None = None
    is_single: bool = False
    stops_on_nan: bool = False
    deterministic: bool = False
    hang_timeout_s: float | None = None
    collective_timeout_s: float = 600
    reuse_workers: bool = True
    is_sandboxed: bool = False
    readable: Sequence[str] = ()
    source_checkpoint: str | None = None
    time_metric: str | None = None
    time_rungs: Sequence[float] = ()
    data: Mapping[str, Any] = field(default_factory=dict, repr=False)
    environment: Mapping[str, str | None] = field(default_factory=dict, repr=False)
    secrets: Sequence[str] = field(default=(), repr=False)

    @classmethod
    def of(cls, config: ExperimentConfig, rungs: Sequence[float], device: Device) -> SharedSettings:
        """The settings of an experiment whose search decides at these absolute lengths, in its method's unit."""
        searcher = config.searcher
        length, validation, saving = (
            None if each is None else each.to_unit()
            for each in (searcher.counted_length, config.min_validation_period, config.min_checkpoint_period)
        )
        unit = Batch if length is None else type(length)
        by_time = searcher.counted_by is not None
        return cls(
            config=config.for_code(),
            data=config.data,
            environment=config.environment.variables(device),
            secrets=config.secrets,
            metric=searcher.first_metric,
            smaller_is_better=searcher.sign == 1,
            objectives=searcher.objectives,
            max_length=length,
            rungs=() if by_time else tuple(unit(int(rung)) for rung in rungs),
            source_checkpoint=searcher.source_checkpoint_uuid,
            time_metric=searcher.counted_by,
            time_rungs=rungs if by_time else (),
            validation_period=validation,
            checkpoint_period=saving,
            is_single=searcher.name == "single",
            stops_on_nan=config.stop_on_nan,
            deterministic=config.reproducibility.deterministic,
            hang_timeout_s=config.hang_timeout_s or None,
            collective_timeout_s=config.collective_timeout_s,
            reuse_workers=config.resources.reuse_workers,
            is_sandboxed=config.isolation.is_sandbox,
            readable=config.isolation.read,
        )

    def config_for_code(self) -> dict[str, Any]:
        """The config for a trial's code, copied because the next trial in this process gets it too."""
        return {**copy.deepcopy(dict(self.config)), "data": copy.deepcopy(dict(self.data))}

    @property
    def lengths(self) -> list[float]:
        """The lengths at which the search decides, in the searcher's unit, ascending."""
        lengths = self.time_rungs if self.time_metric is not None else [rung.value for rung in self.rungs]
        return sorted({length for length in lengths if isinstance(length, (int, float))})

    @property
    def compared(self) -> Sequence[str]:
        """The metrics of the search, the first objective first."""
        names = () if self.objectives is None else self.objectives.names
        return list(dict.fromkeys((self.metric, *names)))

    def metrics_of(self, validation: Mapping[str, object]) -> Measured:
        """All metrics of a search with several, in its order; () for a single metric."""
        return () if self.objectives is None else self.objectives.measured(validation)

    def metric_of(self, validation: Mapping[str, object]) -> float | None:
        """The search's metric, or the first objective, in a validation. None if it is missing, which is allowed with
        `single` and in a program, or if a constraint is not kept."""
        if self.objectives is not None and not self.objectives.are_kept(self.metrics_of(validation)):
            return None
        value = validation.get(self.metric)
        return float(value) if isinstance(value, (int, float)) else None

    def score(self, value: float | None) -> float:
        """A metric's score for ranking: smaller is better; missing and nonfinite values rank last."""
        return loss_of(value, smaller_is_better=self.smaller_is_better)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLease:
    """A lease of a trial to a worker group.

    Args:
        number: the lease's number; a later lease of the same trial ends it.
        client: the name of the experiment's run.
        trial_dir: the trial's directory, for everything but checkpoints.
        last_step: the greatest length reported to the search, in the searcher's unit; None without reports.
        source: the id of another trial's checkpoint that it begins from, while it has none of its own; or None.
        is_changed: whether its hyperparameters differ from that trial's.
        code: the variant of the code that it runs; None: the experiment's own.
        was_completed: whether the trial had completed and continues because the search was extended: a final report in
            its checkpoint may no longer be final.
        send_every_s: as `SEND_EVERY_S`; longer if many trials report to one driver.
    """

    number: int
    client: str
    trial_id: int
    trial_seed: int
    hparams: Mapping[str, Any]
    trial_dir: Path
    store: CheckpointStore
    last_step: float | None
    was_completed: bool = False
    source: str | None = None
    is_changed: bool = False
    code: str | None = None
    send_every_s: float = SEND_EVERY_S

    @property
    def batch_size(self) -> int:
        """Records per batch, over all slots."""
        return int(self.hparams.get("global_batch_size", 1))
