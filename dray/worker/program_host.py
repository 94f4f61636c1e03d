"""A host inside a lent Ray worker whose trial is a program: it may have its own loop, and report through `dray.core`.

Each validation that the search compares has to tell the trial's length in the search's unit: batches are
`steps_completed`, or the metric `batches` if the program reports one; epochs are the metric `epochs`; with a
`time_metric` it is the metric of that name.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from dray.storage.manifest import Listed
from dray.training.errors import SearcherMetricError, TrialEnded
from dray.training.host import Report
from dray.training.metrics.time_metric import crossed, time_of
from dray.training.metrics.values import as_number
from dray.training.units import Batch, Epoch
from dray.worker.host import Ending, RayHost

LATE_REPORTS = 2
"""Validations that a program may still report after it was told to end, such as one before it saves. Then it is ended:
a program that does not listen must not hold up the search."""


class RayProgramHost(RayHost):
    """The `dray.training.host.ProgramHost` of one rank for one lease.

    Args:
        **arguments: of `RayHost`.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(script=True, **arguments)
        experiment, known = self._experiment, self._lease.last_step
        by_time = experiment.time_metric is not None
        counted = experiment.time_rungs if by_time else [rung.value for rung in experiment.rungs]
        self._ends: list[float] = sorted({length for length in counted if isinstance(length, (int, float))})
        self.lengths: Sequence[float] = [length for length in self._ends if known is None or length > known]
        self.closed = bool(self._ends) and not self.lengths
        self._own_loop = False
        self._compared: dict[str, Any] | None = None  # the last message with a value to compare
        self._at: Report | None = None  # the last validation
        self._enough = False
        self._late = 0

    def opened(self) -> None:
        # If nothing is compared, a program need not report: it may evaluate a model, say.
        self._reported |= self._checks.is_alone

    # ------------------------------------------------------------------ reports
    def report(self, report: Report) -> bool:
        told = self._report(report)
        return (not self._enough and self._diverges(report)) or told

    def _report(self, report: Report) -> bool:
        self._own_loop = self._reported = True
        self._began = None  # the time before a program's first report is not all start-up
        self._checks.of_program(report, known=self._is_known)
        message = self._message(report)
        if warning := self._checks.warning(report):
            message["warning"] = warning
        self._unsaved.add(message["rows"])
        if report.validation is not None:
            self._heed(report, message)
        if self.outcome != "completed" or self._enough:
            return self._late_report(report, message)
        if report.validation is None:
            self._kept += message["rows"]
            if time.monotonic() < self._sent + self._lease.together_s:
                return self._obey(self._heard())
            message["rows"] = []
        reached = "nothing"
        if message["step"] is not None and self._ends:
            reached = crossed(self._ends, self._time, message["step"])
            self._time = max(message["step"], self._time or 0.0)
        told = self._obey(self._send(message, decides=reached != "nothing"))
        # A search that compares at one length only lets the program decide how long it trains.
        self._enough = reached == "end" and len(self._ends) > 1
        return told or self._enough

    @property
    def _is_known(self) -> bool:
        """Whether the search has had a value to compare, or has one coming."""
        return self._compared is not None or self._lease.last_step is not None

    def _heed(self, report: Report, message: Mapping[str, Any]) -> None:
        """Note a validation for the trial's end, and for a checkpoint at the same batch."""
        value, self._at = message["value"], report
        self._validated = (report.batches, value)
        if message["step"] is not None:
            self._compared = {**message, "rows": []}
        if value is not None:
            self._desk.improves.remote(self._lease.number, self._experiment.score(value))
            if report.batches == self._unsaved.saved:  # it was saved before its metric was known
                self._desk.saved.remote(self.trial_id, self.checkpoint_id(report.batches), report.batches, value)

    def _late_report(self, report: Report, message: dict[str, Any]) -> bool:
        self._late += report.validation is not None
        verdict = self._send(message, decides=False)
        if not self._enough or verdict == "fenced":
            self._obey(verdict)
        if self._late > LATE_REPORTS:
            raise TrialEnded(
                f"trial {self.trial_id} was told to stop, but reported {self._late} more validations, so it is ended "
                "here; call core_context.preempt.should_preempt() after each validation, and return if it is true"
            )
        return True

    def interrupted(self) -> None:
        self.heard = True
        if self.outcome == "completed" and not self._enough:
            self.outcome = "interrupted"

    def go_on(self) -> Ending | None:
        ended = super().go_on()
        if self._found.get("step") is not None:
            self._compared = {**self._found, "rows": []}
        return ended

    def end(self) -> Ending:
        if self._own_loop and self.outcome == "completed":
            self._checks.of_program(None, known=self._is_known)
        self._last = self._last or self._compared
        return super().end()

    def best_validation(self) -> float | None:
        score: float | None = ray.get(self._desk.best.remote())
        return score if score is None or self._experiment.smaller_is_better else -score

    def _message(self, report: Report) -> dict[str, Any]:
        epochs = as_number((report.validation or report.training or {}).get("epochs"))
        message = super()._message(report if epochs is None else replace(report, epochs=epochs))
        if (step := message["step"]) is not None and not 0 <= step < math.inf:
            # The search would refuse it, which ends the whole experiment.
            raise SearcherMetricError(
                "searcher.max_length: a trial's length must be a finite number >= 0, but the program reported "
                f"{step!r} with steps_completed={report.batches}"
            )
        return message

    def _step(self, report: Report, validation: Mapping[str, object]) -> float | None:
        if not self._own_loop:
            return super()._step(report, validation)
        experiment = self._experiment
        if not report.compared or experiment.metric not in validation:
            return None
        if report.length is not None:
            return report.length
        if experiment.time_metric is not None:
            return time_of(experiment.time_metric, {"batches": report.batches, **validation})
        match experiment.max_length:
            case Batch() | None:
                return time_of("batches", {"batches": report.batches, **validation})
            case Epoch():
                if report.epochs is not None:
                    return report.epochs
                if report.batches > 0 and len(self._ends) > 1:
                    by_time = experiment.config.get("searcher", {}).get("time_metric") is not None
                    field, other = ("time_metric", "batches") if by_time else ("max_length", "{batches: N}")
                    raise SearcherMetricError(
                        f"searcher.{field}: the search counts epochs, but the program reported no 'epochs' with "
                        f"steps_completed={report.batches}, only {sorted(validation)}; add 'epochs' (trained so far) "
                        "to these metrics, or train by core_context.searcher.operations(), or count steps_completed: "
                        f"set searcher.{field}: {other}"
                    )
                return report.batches  # nothing depends on it
            case _:
                records = as_number(validation.get("records"))
                per_batch = int(self._lease.hparams.get("global_batch_size", 1))
                return report.batches * per_batch if records is None else records

    # ------------------------------------------------------------------ checkpoints
    def checkpoint_id(self, batches: int) -> str:
        return self._store.id_of(batches)

    def commit(self, staging: Path, report: Report, *args: Any, **kwargs: Any) -> str:
        if self._own_loop and self._at is not None and self._at.batches == report.batches:
            # A run that goes on from this checkpoint may have nothing left to report.
            report = self._at
        return super().commit(staging, report, *args, **kwargs)

    def add_to_checkpoint(self, staging: Path, batches: int) -> dict[str, Listed]:
        self._fence()
        return self._store.add(staging, batches)

    def delete_checkpoint(self, checkpoint: str) -> None:
        batches = next((batches for batches, found in self._store.listed() if found == checkpoint), None)
        if batches is None:
            raise ValueError(f"there is no checkpoint {checkpoint!r} of this trial; a trial can delete only its own")
        self._store.delete(batches)
        self._desk.damaged.remote(self.trial_id, checkpoint, "the trial's program deleted it")
