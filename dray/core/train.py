"""Metrics of a program with a loop of its own."""

from __future__ import annotations

import enum
import json
import logging
import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dray.training import metrics
from dray.training.distributed import DistributedContext
from dray.training.errors import InvalidHP
from dray.training.host import ProgramHost, Report
from dray.training.tensorboard import TensorBoard
from dray.training.usage import Usage

log = logging.getLogger(__name__)

RUN_METADATA = "run_metadata.json"


class EarlyExitReason(enum.Enum):
    """Why a program ends before its time; see `TrainContext.report_early_exit`."""

    INVALID_HP = "EXITED_REASON_INVALID_HP"
    USER_REQUESTED_STOP = "EXITED_REASON_USER_REQUESTED_STOP"


class TensorboardMode(enum.Enum):
    """Who writes for TensorBoard.

    AUTO: what is reported is written to the trial's event files, by the chief. MANUAL: nothing is; the program writes
    its own files to `TrainContext.get_tensorboard_path()`.
    """

    AUTO = "AUTO"
    MANUAL = "MANUAL"


class TrainContext:
    """Reports how training goes. Only what the chief (rank 0) reports counts; other ranks need not call anything.

    Attributes:
        told: whether the last report was answered with a request to end.
        steps_completed: of the last report; None before it.
    """

    def __init__(
        self, host: ProgramHost, peers: DistributedContext, mode: TensorboardMode, hparams: Mapping[str, Any]
    ) -> None:
        self._host, self._peers, self._mode = host, peers, mode
        self._board = TensorBoard(host.tensorboard_path, mode is TensorboardMode.AUTO, hparams)
        self._usage = Usage(_device())
        self._warned = False
        self._operating = False
        self._calls = 0
        self.told = False
        self.steps_completed: int | None = None
        host.watch(lambda: (self.steps_completed or 0, self._calls))

    # ------------------------------------------------------------------------------------------------------ metrics
    def report_training_metrics(
        self, steps_completed: int, metrics: Mapping[str, Any], batch_metrics: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Report metrics of training.

        Args:
            steps_completed: how far training is: batches trained in all, where the config counts these.
            metrics: numbers by name; `epochs` among them says how many were trained.
            batch_metrics: of each batch since the last report, for TensorBoard.

        Raises:
            TypeError, ValueError: steps_completed is no int >= 0, or a metric can't be written as JSON.
        """
        self._report("training", steps_completed, metrics, batch_metrics)

    def report_validation_metrics(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Report metrics of a validation. The search compares the one that the config names in `searcher.metric`.

        If it decides to stop or to pause the trial, `preempt.should_preempt()` is true from here on.

        Args:
            steps_completed, metrics: as of `report_training_metrics`. Where the search counts epochs, `epochs` has to
                be among the metrics; where it counts by a `time_metric`, that one.

        Raises:
            TypeError, ValueError: as of `report_training_metrics`; a metric is None.
            SearcherMetricError: the report does not say how long the trial is in the search's unit.
        """
        self._report("validation", steps_completed, metrics)

    def report_metrics(self, group: str, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Report metrics of a group: "training" and "validation" are those above; another name is kept beside them.

        Args:
            group: a name without a dot, other than "system".
            steps_completed, metrics: as above.

        Raises:
            TypeError, ValueError: as above; a group can't be called so.
        """
        if not group or "." in group or group == "system":
            raise ValueError(f"a group of metrics is a name without a dot, other than 'system', got {group!r}")
        self._report(group, steps_completed, metrics)

    def _report(
        self,
        group: str,
        steps_completed: int,
        found: Mapping[str, Any],
        batch_metrics: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        source = f"report_{group}_metrics()" if group in ("training", "validation") else "report_metrics()"
        steps = _steps(steps_completed, source)
        if not isinstance(found, Mapping):
            raise TypeError(f"{source} takes a dict of metrics, got {found!r}")
        if group == "validation" and (missing := next((name for name, value in found.items() if value is None), None)):
            raise ValueError(f"{source}: the metric {missing!r} is None; report a number, or leave it out")
        if self._is_peer(source):
            return
        plain = metrics.jsonable({name: v for name, v in found.items() if not isinstance(v, (bytes, bytearray))},
                                 source=source)  # fmt: skip
        if group in ("training", "validation"):
            self._write_scalars(group, steps, plain, batch_metrics)
        self._usage.hear([self._usage.machine()])
        self.publish(
            Report(
                batches=steps,
                training=plain if group == "training" else None,
                validation=plain if group == "validation" else None,
                groups=None if group in ("training", "validation") else {group: plain},
                compared=not self._operating,
                system=self._usage.take(at_once=False),
            )
        )

    def publish(self, report: Report) -> None:
        """Pass a report on to where the run happens. On the chief."""
        self._calls += 1
        self.steps_completed = report.batches
        self.told = self._host.report(report) or self.told

    def operate(self) -> None:
        """From here on the search compares what operations are completed with, not what is reported here."""
        self._operating = True

    def pulse(self) -> None:
        """Something has happened."""
        self._calls += 1

    def _is_peer(self, source: str) -> bool:
        if self._peers.rank > 0 and not self._warned:
            self._warned = True
            log.warning("rank %d called %s: only what the chief reports counts", self._peers.rank, source)
        return self._peers.rank > 0

    # -------------------------------------------------------------------------------------------------- TensorBoard
    def get_tensorboard_path(self) -> Path:
        """Where event files of this trial belong; it need not exist yet."""
        return self._host.tensorboard_path

    def upload_tensorboard_files(
        self,
        selector: Callable[[Path], bool] | None = None,
        mangler: Callable[[Path, int], Path] | None = None,
    ) -> None:
        """Without effect: what is in `get_tensorboard_path()` is kept with the trial. For `TensorboardMode.MANUAL`.

        Raises:
            RuntimeError: the mode is AUTO.
        """
        if self._mode is TensorboardMode.AUTO:
            raise RuntimeError("upload_tensorboard_files() is for core.init(tensorboard_mode=TensorboardMode.MANUAL)")

    def _write_scalars(
        self, group: str, steps: int, found: Mapping[str, Any], batches: Sequence[Mapping[str, Any]] | None
    ) -> None:
        if not self._board.enabled:
            return
        if self.steps_completed is None and self._host.latest_checkpoint is not None:
            self._board.restart(steps)
        first = steps - len(batches or ()) + 1
        rows: Iterable[tuple[int, Mapping[str, Any]]] = [
            *((first + place, each) for place, each in enumerate(batches or ())),
            *([(steps, found)] if not batches else []),
        ]
        prefix = "val_" if group == "validation" else ""
        now = time.time()
        self._board.write((now, step, tagged) for step, values in rows if (tagged := _tagged(values, prefix)))

    # ---------------------------------------------------------------------------------------------------- the trial
    def report_progress(self, progress: float) -> None:
        """Say which share is done, from 0 to 1. The log has it; the progress of a search is known from its reports.

        Raises:
            ValueError: progress is not from 0 to 1.
        """
        if not 0 <= progress <= 1:
            raise ValueError(f"progress is a share from 0 to 1, got {progress!r}")
        self.pulse()
        log.debug("progress: %.1f%%", 100 * progress)

    def set_status(self, status: str) -> None:
        """Say in a few words what the program is doing. The log has it."""
        self.pulse()
        log.info("status: %s", status)

    def report_early_exit(self, reason: EarlyExitReason) -> None:
        """Say why the program ends before its time.

        Raises:
            InvalidHP: with `INVALID_HP`: the trial ends here, and the search tries other hyperparameters.
        """
        if EarlyExitReason(reason) is EarlyExitReason.INVALID_HP:
            raise InvalidHP("the program has reported an early exit for invalid hyperparameters")
        log.info("the program ends before its time")

    def get_experiment_best_validation(self) -> float | None:
        """The best value of the searcher's metric that any trial has reported; None if there is none yet, or no
        search. On the chief."""
        return self._host.best_validation()

    def set_metadata(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Keep what describes this run, as JSON in its directory, in the place of what was set before; return it."""
        plain = dict(metadata)
        path = self._host.tensorboard_path.parent / RUN_METADATA
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(plain))
        return plain

    def get_metadata(self) -> dict[str, Any] | None:
        """What `set_metadata` has kept; None if nothing was."""
        path = self._host.tensorboard_path.parent / RUN_METADATA
        return dict(json.loads(path.read_text())) if path.exists() else None

    def close(self) -> None:
        """Write what is left for TensorBoard."""
        self._board.close()


def _steps(value: Any, source: str) -> int:
    try:
        steps = operator.index(value)
    except TypeError:
        if not (isinstance(value, float) and value.is_integer()):
            raise TypeError(f"{source}: steps_completed is an int, got {value!r}") from None
        steps = int(value)
    if steps < 0 or isinstance(value, bool):
        raise ValueError(f"{source}: steps_completed is an int >= 0, got {value!r}")
    return steps


def _tagged(values: Mapping[str, Any], prefix: str) -> dict[str, float]:
    numbers = {name: metrics.as_number(metrics.to_numpy(value)) for name, value in values.items()}
    return {
        f"Determined/{name if name.startswith('val') else prefix + name}": number
        for name, number in numbers.items()
        if number is not None
    }


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
