"""Reports of a program with its own training loop: metrics, progress, status and metadata."""

from __future__ import annotations

import enum
import json
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dray.training.errors import InvalidHP
from dray.training.host import ProgramHost, Report
from dray.training.metrics.checks import OtherMetrics
from dray.training.metrics.tensorboard import TensorBoard
from dray.training.metrics.values import jsonable
from dray.training.parallel.distributed import DistributedContext
from dray.training.usage import Usage
from searchers.rows import document

log = logging.getLogger(__name__)


class Program:
    """A program with its own loop on one rank, and its host; shared by the contexts of the core API."""

    def __init__(self, host: ProgramHost, peers: DistributedContext) -> None:
        self.host, self.peers = host, peers
        self.is_chief = peers.rank == 0
        self.stop_requested = False  # by the answer to a report
        self.steps_completed: int | None = None  # at the last report
        self.uses_operations = False  # the search compares the metrics of operations, not reported validations
        self._calls = 0
        host.watch(lambda: (self.steps_completed or 0, self._calls))

    def publish(self, report: Report) -> None:
        """Pass a report on to the host. On the chief only."""
        self.pulse()
        self.steps_completed = report.batches
        self.stop_requested = self.host.report(report) or self.stop_requested

    def pulse(self) -> None:
        """Note progress, for `hang_timeout_s`."""
        self._calls += 1

    def check_chief(self, call: str, unless: str = "") -> None:
        if not self.is_chief:
            raise RuntimeError(f"{call}() was called on rank {self.peers.rank}; {unless}call it on rank 0 only")


RUN_METADATA = "run_metadata.json"
MAX_STEPS = 2**63 - 1


class EarlyExitReason(enum.Enum):
    """The reason for an early exit; see `TrainContext.report_early_exit`."""

    INVALID_HP = "EXITED_REASON_INVALID_HP"
    USER_REQUESTED_STOP = "EXITED_REASON_USER_REQUESTED_STOP"


class TensorboardMode(enum.Enum):
    """Selects the writer of TensorBoard files.

    Attributes:
        AUTO: the chief writes the reported metrics.
        MANUAL: the program may write its own event files to `TrainContext.get_tensorboard_path()`.
    """

    AUTO = "AUTO"
    MANUAL = "MANUAL"


class TrainContext:
    """Reports metrics. Only those of the chief (rank 0) are recorded; other ranks need not report."""

    def __init__(
        self, program: Program, mode: TensorboardMode, hparams: Mapping[str, Any], device: torch.device
    ) -> None:
        self._program, self._host, self._mode = program, program.host, mode
        self._tensorboard = TensorBoard(self._host.tensorboard_path, mode is TensorboardMode.AUTO, hparams)
        self._usage = Usage(device)
        self._others, self._warned = OtherMetrics(), False

    def report_training_metrics(
        self, steps_completed: int, metrics: Mapping[str, Any], batch_metrics: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Report training metrics.

        Args:
            steps_completed: total steps trained, an int >= 0; in batches if the config measures length in batches.
            metrics: by name, numbers, tensors or arrays with one element, or other JSON-serialisable values, which are
                not plotted. A metric named `epochs` is the number of epochs trained.
            batch_metrics: the metrics of each batch since the last report, for TensorBoard. Default: one point with
                `metrics`.

        Raises:
            TypeError, ValueError: steps_completed is not an int >= 0, or a metric is not JSON-serialisable.
        """
        self._report("training", steps_completed, metrics, batch_metrics)

    def report_validation_metrics(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Report validation metrics, among them the config's `searcher.metric`, by which the search compares trials.

        If the search then stops or pauses the trial, `preempt.should_preempt()` is true from then on.

        Args:
            steps_completed, metrics: as in `report_training_metrics`. If the search measures length in epochs, the
                metrics must include `epochs`; if it has a `time_metric`, they must include that.

        Raises:
            TypeError, ValueError: as in `report_training_metrics`; or a metric is None.
            SearcherMetricError: the search compares trials, but the program's first validation lacks the search's
                metric; or the report lacks the trial's length in the search's unit.
        """
        self._report("validation", steps_completed, metrics)

    def report_metrics(self, group: str, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Report metrics of a group: "training", "validation" or a group of your own.

        Args:
            group: a name without a dot, other than "system".
            steps_completed, metrics: as in `report_training_metrics` and `report_validation_metrics`.

        Raises:
            ValueError: the group's name is invalid. Other errors as in those two methods.
        """
        if not group or "." in group or group == "system":
            raise ValueError(f"group must be a name without a dot, other than 'system', got {group!r}")
        self._report(group, steps_completed, metrics)

    def _report(
        self,
        group: str,
        steps_completed: int,
        metrics: Mapping[str, Any],
        batch_metrics: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        source = f"report_{group}_metrics()" if group in ("training", "validation") else "report_metrics()"
        steps = as_steps(steps_completed, source)
        if not isinstance(metrics, Mapping):
            raise TypeError(f"{source} takes a dict of metrics, got {metrics!r}")
        if group == "validation" and (
            missing := next((name for name, value in metrics.items() if value is None), None)
        ):
            raise ValueError(f"{source}: the metric {missing!r} is None; report a number, or leave it out")
        if not self._program.is_chief:
            if not self._warned:
                rank = self._program.peers.rank
                log.warning(
                    "rank %d called %s, which has no effect: only the chief's metrics are recorded", rank, source
                )
            self._warned = True
            return
        reportable = {name: value for name, value in metrics.items() if not isinstance(value, (bytes, bytearray))}
        plain = jsonable(reportable, source=source)
        self._others.warn(plain, source)
        if group in ("training", "validation"):
            self._write_scalars(group, steps, plain, batch_metrics)
        self._usage.add_ranks(ranks := [self._usage.share()], ranks)
        system = self._usage.flush(at_once=False)
        self._tensorboard.write_system(steps, system or {})
        self._program.publish(
            Report(
                batches=steps,
                training=plain if group == "training" else None,
                validation=plain if group == "validation" else None,
                groups=None if group in ("training", "validation") else {group: plain},
                compared=not self._program.uses_operations,
                system=system,
            )
        )

    def get_tensorboard_path(self) -> Path:
        """Return the directory of this trial's event files, which may not exist yet."""
        return self._host.tensorboard_path

    def upload_tensorboard_files(
        self,
        selector: Callable[[Path], bool] | None = None,
        mangler: Callable[[Path, int], Path] | None = None,
    ) -> None:
        """Has no effect: files in `get_tensorboard_path()` are kept with the trial.

        Raises:
            RuntimeError: the context was not made with `TensorboardMode.MANUAL`.
        """
        if self._mode is TensorboardMode.AUTO:
            raise RuntimeError("upload_tensorboard_files() needs core.init(tensorboard_mode=TensorboardMode.MANUAL)")

    def _write_scalars(
        self, group: str, steps: int, metrics: Mapping[str, Any], batches: Sequence[Mapping[str, Any]] | None
    ) -> None:
        if not self._tensorboard.enabled:
            return
        if self._program.steps_completed is None and self._host.latest_checkpoint is not None:
            self._tensorboard.restart(steps)
        rows = batches or [metrics]
        for step, values in enumerate(rows, start=steps - len(rows) + 1):
            self._tensorboard.write_metrics(step, values, validation=group == "validation")

    def report_progress(self, progress: float) -> None:
        """Log the share of training that is done, from 0 to 1. The search follows the reports, not this number.

        Raises:
            ValueError: progress is not between 0 and 1.
        """
        if not 0 <= progress <= 1:
            raise ValueError(f"progress must be a number from 0 to 1, got {progress!r}")
        self._program.pulse()
        log.debug("progress: %.1f%%", 100 * progress)

    def set_status(self, status: str) -> None:
        """Log a description of the program's current activity."""
        self._program.pulse()
        log.info("status: %s", status)

    def report_early_exit(self, reason: EarlyExitReason) -> None:
        """Report why the program exits early.

        Raises:
            InvalidHP: the reason is `EarlyExitReason.INVALID_HP`: the trial ends, and the search tries other
                hyperparameters.
        """
        if EarlyExitReason(reason) is EarlyExitReason.INVALID_HP:
            raise InvalidHP("the program reported an early exit because of invalid hyperparameters")
        log.info("the program reported an early exit")

    def get_experiment_best_validation(self) -> float | None:
        """Return the best `searcher.metric` that a trial has reported; None before the first report or without a
        search. On the chief only."""
        return self._host.best_validation()

    def set_metadata(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Store metadata of this run in its directory as JSON, replacing earlier metadata, and return them."""
        path = self._host.tensorboard_path.parent / RUN_METADATA
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dict(metadata)))
        return dict(metadata)

    def get_metadata(self) -> dict[str, Any] | None:
        """Return the metadata that `set_metadata` stored, None if there are none."""
        path = self._host.tensorboard_path.parent / RUN_METADATA
        return dict(document(path)) if path.exists() else None

    def close(self) -> None:
        """Close the TensorBoard files."""
        self._tensorboard.close()


def as_steps(value: Any, source: str) -> int:
    try:
        steps = operator.index(value)
    except TypeError:
        if not (isinstance(value, float) and value.is_integer()):
            raise TypeError(f"{source}: steps_completed must be an int, got {value!r}") from None
        steps = int(value)
    if steps < 0 or isinstance(value, bool):
        raise ValueError(f"{source}: steps_completed must be an int >= 0, got {value!r}")
    if steps > MAX_STEPS:
        raise ValueError(f"{source}: steps_completed must be at most 2**63 - 1 (a 64-bit integer), got a larger number")
    return steps
