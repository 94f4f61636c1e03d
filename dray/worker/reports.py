"""The reports of one trial to its search: their contents, the decisions that the trial waits for, and its end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from dray.hosts.unsaved import UnsavedRows
from dray.leases.messages import DeskReport, LeaseOutcome, Reply
from dray.training.errors import TrialEnded
from dray.training.host import Reached, Report
from dray.training.metrics.checks import MetricChecks, time_of
from dray.training.metrics.values import as_number
from dray.worker.lease import SharedSettings, TrialLease
from dray.worker.length import Rungs, length_in_fit, length_in_program
from dray.worker.lifecycle import Lifecycle
from dray.worker.link import TrialLink

MAX_LATE_REPORTS = 2
"""Validations that a program may report after a request to stop, such as one before it saves. Then it is ended, because
a program that ignores the request must not hold up the search."""


class LastValidation(NamedTuple):
    """The latest validation.

    Attributes:
        batches: batches trained per slot; -1 before the first validation.
        value: the search's metric.
        message: the report; None if it came from `fit()`, which passes a report with each checkpoint.
    """

    batches: int = -1
    value: float | None = None
    message: DeskReport | None = None


class Reports:
    """The reports of one lease, on its chief.

    Attributes:
        unsaved: rows that are not in a checkpoint yet.
        why_diverged: the loss that is NaN, if the trial has diverged; else "".
    """

    def __init__(self, link: TrialLink, lease: TrialLease, settings: SharedSettings, *, is_program: bool) -> None:
        self._link, self._lease, self._settings, self._is_program = link, lease, settings, is_program
        self.life = Lifecycle()
        self.unsaved = UnsavedRows()
        self.checks = MetricChecks(settings.compared, is_single=settings.is_single, stops_on_nan=settings.stops_on_nan)
        self.rungs = Rungs(settings.lengths, lease.last_step)
        self.last_validation = LastValidation()
        self.why_diverged = ""
        self._final: DeskReport | None = None  # completes the trial after its program has returned
        self._late = 0
        self._started_at: float | None = time.monotonic()  # None after the start's duration has been reported

    # ------------------------------------------------------------------ begin and end
    def resume(self, carried: DeskReport, decides: bool) -> LeaseOutcome | None:
        """Send the report stored in the trial's checkpoint, which may never have reached the driver. Returns the
        trial's outcome if that was its last report, or if the search stops it now; otherwise None."""
        step, known = carried.step, self._lease.last_step
        is_new = step is not None and (known is None or step > known)
        at_end = carried.final or (step is not None and step >= max(self.rungs.lengths, default=math.inf))
        if self._lease.was_completed and not is_new:
            carried = replace(carried, final=False)
        if is_new and self._settings.time_metric is not None:
            self.rungs.at = step
        if step is not None:
            self._final = replace(carried, rows=())
        stop = self._send(carried, wait=(decides and is_new) or carried.final)
        # Its processes may have died after a loss became NaN, before they left.
        stop = stop or (not at_end and self._stops_after(_measured(carried)))
        return self.life.outcome if stop or carried.final else None

    def complete(self, *, goes_on: bool = False) -> LeaseOutcome:
        """Send the final report after the trial's code has returned, unless it has been sent. Returns the outcome.

        `goes_on`: it has returned because another trial has its group; the search may let it go on.
        """
        if goes_on and self.life.state == "fitting":
            self.life.on("yield")
        if self.life.state == "reporting":
            self.checks.check_program(None, known=self._is_known)
        if self.life.outcome == "completed" and self.life.state != "completed":
            self._link.send(replace(self._final or DeskReport(), final=True), wait=True)
            self.life.on("complete")
        self._link.wait_for_answers()
        return self.life.outcome

    # ------------------------------------------------------------------ reports of fit()
    def from_fit(self, report: Report) -> bool:
        """Send a report of `fit()`, and return whether training should stop."""
        if self.life.state in ("fitted", "completed"):
            raise RuntimeError(
                "a trial of an experiment can call fit() only once: the search already has this trial's final report, "
                "and ignores any later one; train further models in separate experiments"
            )
        self.life.on("fit")
        if report.interrupted:
            self.life.on("interrupt")
        message = self._new_message(report, length_in_fit(report, self._settings, self._lease.batch_size))
        if report.validation is not None:
            self.last_validation = LastValidation(report.batches, message.value)
            if report.decides:  # it is saved without asking, and later validations must beat it
                self._offer_best(message.value)
        if not self._is_program and (report.decides or report.final):
            message = replace(message, read=tuple(self._lease.hparams if report.read is None else report.read))
        if self.life.outcome != "completed":  # the last checkpoint of a trial that is stopping
            return self._send(message, wait=False)
        if self._is_program and report.final:
            self._final = message
            self.life.on("end_fit")
            return False
        waits = report.decides or report.final
        if report.validation is None and report.checkpoint is None and not waits:
            self._obey(self._link.send_soon(message.rows))
        else:
            self._send(message, wait=waits)
        return self._stops_after(report)

    def reached(self, validation: Mapping[str, object]) -> Reached:
        """The rung that a validation of `fit()` has reached, if a metric measures the length."""
        if self._settings.time_metric is None:
            return "nothing"  # rungs in batches and epochs are in the plan
        return self.rungs.reach(time_of(self._settings.time_metric, validation))

    # ------------------------------------------------------------------ reports of a program's own loop
    def from_program(self, report: Report) -> bool:
        """Send a report of `dray.core`, and return whether the program should save and return."""
        self.life.on("report")
        self._started_at = None  # the time before a program's first report is not only start-up time
        self.checks.check_program(report, known=self._is_known)
        epochs = as_number((report.validation or report.training or {}).get("epochs"))
        report = report if epochs is None else replace(report, epochs=epochs)
        length = length_in_program(report, self._settings, self._lease.batch_size)
        message = self._new_message(report, length)
        if report.validation is not None:
            self.last_validation = LastValidation(report.batches, message.value, message)
            if length is not None and self.life.state != "fitted":
                self._final = replace(message, rows=())
            self._offer_best(message.value)
            if message.value is not None and report.batches == self.unsaved.saved:
                # The checkpoint was saved before its metric was known.
                self._link.saved(self._lease.store.id_of(report.batches), report.batches, message.value)
        if self.life.should_return:
            return self._late_report(report, message)
        if report.validation is None:
            self._obey(self._link.send_soon(message.rows))
            return self._stops_after(report)
        reached = "nothing" if length is None else self.rungs.reach(length)
        stop = self._send(message, wait=reached != "nothing")
        # If the search compares trials at one length only, the program decides on its length.
        if reached == "end" and len(self.rungs.lengths) > 1 and not stop:
            self.life.on("reach_end")
        return self._stops_after(report)

    def _late_report(self, report: Report, message: DeskReport) -> bool:
        self._late += report.validation is not None
        self._send(message, wait=False)
        if self._late > MAX_LATE_REPORTS:
            raise TrialEnded(
                f"trial {self._lease.trial_id} was asked to stop, but reported {self._late} more validations, so it is "
                "ended here; call core_context.preempt.should_preempt() after each validation, and return if it is true"
            )
        return True

    @property
    def _is_known(self) -> bool:
        """Whether the search has, or will get, a value to compare."""
        return self._final is not None or self._lease.last_step is not None

    # ------------------------------------------------------------------ messages
    def _message(self, report: Report, length: float | None) -> DeskReport:
        """A report as a message for the driver. `length`: the length at its validation, in the searcher's unit."""
        common = {"batches": report.batches, "epochs": report.epochs, "time": time.time()}
        groups = {
            "training": report.training,
            "validation": report.validation,
            "system": self._system(report),
            **(report.groups or {}),
        }
        rows = [
            {**common, "kind": kind, "name": name, "value": value}
            for kind, metrics in groups.items()
            for name, value in (metrics or {}).items()
            if isinstance(value, (int, float)) and name not in ("batches", "epochs")
        ]
        # A program that fails after fit() has not completed its trial, which runs again. Neither has a trial that was
        # stopped, or that leaves its workers.
        completes = not self._is_program and not report.interrupted and self.life.outcome == "completed"
        message = DeskReport(rows=rows, step=length, final=report.final and completes)
        if report.validation is None:
            return message
        settings = self._settings
        return replace(
            message, value=settings.metric_of(report.validation), metrics=settings.metrics_of(report.validation)
        )

    def carried(self, report: Report) -> DeskReport:
        """The report to store in a checkpoint. It may be called in a different thread. A program's report with a
        checkpoint has no metrics: the checkpoint stores the validation at the same batch instead, since a run that
        resumes there may have nothing left to report."""
        last = self.last_validation
        if last.message is not None and last.batches == report.batches:
            return last.message
        return self._message(report, length_in_fit(report, self._settings, self._lease.batch_size))

    def _new_message(self, report: Report, length: float | None) -> DeskReport:
        message = self._message(report, length)
        self.unsaved.add(message.rows)
        return message

    def _system(self, report: Report) -> Mapping[str, float] | None:
        """The system metrics; the first ones include the time before training."""
        if report.system is None or self._started_at is None:
            return report.system
        trained_s = sum(value for name, value in report.system.items() if name.endswith("_s"))
        starting_s, self._started_at = time.monotonic() - self._started_at - trained_s, None
        return {"starting_s": max(starting_s, 0.0), **report.system}

    def _offer_best(self, value: float | None) -> None:
        if math.isfinite(score := self._settings.score(value)):
            self._link.offer_best(score)

    # ------------------------------------------------------------------ decisions
    def _send(self, message: DeskReport, *, wait: bool) -> bool:
        reply = self._link.send(message, wait=wait)
        if message.final:
            self.life.on("complete")
        return self._obey(reply)

    def _obey(self, reply: Reply) -> bool:
        """Apply a reply, and return whether the trial should stop."""
        if reply == "fenced":
            self.life.on("lose")
            raise self._link.lost()
        if reply != "continue":
            self.life.on(reply)
        return self.life.should_return

    def _stops_after(self, report: Report) -> bool:
        """Whether the trial should stop, because of a decision or a NaN loss in this report."""
        if not self.life.should_return and (why := self.checks.diverged(report)):
            self.life.on("diverge")
            self.why_diverged = why
        return self.life.should_return


def _measured(carried: DeskReport) -> Report:
    """The losses stored in a checkpoint."""
    rows: dict[str, dict[str, object]] = {"training": {}, "validation": {}}
    for row in carried.rows:
        rows.setdefault(row["kind"], {})[row["name"]] = row["value"]
    batches = max((row["batches"] for row in carried.rows), default=0)
    return Report(batches=batches, training=rows["training"], validation=rows["validation"])
