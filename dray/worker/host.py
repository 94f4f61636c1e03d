"""The hosts of trials in leased Ray workers: they send reports to the driver, and checkpoints to the store."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from dray.hosts.local import metrics_text
from dray.leases.messages import DeskReport, LeaseOutcome
from dray.rpc.connection import Connection
from dray.storage.manifest import Listed
from dray.training.host import Reached, Report
from dray.training.parallel.distributed import DistributedContext
from dray.training.plan import Plan
from dray.training.units import in_batches
from dray.worker.behind import Behind
from dray.worker.lease import REPORT_FILE, DriverLost, SharedSettings, TrialLease
from dray.worker.link import TrialLink
from dray.worker.reports import Reports

log = logging.getLogger(__name__)


BEAT_S = 60.0
"""Seconds of training without a report after which the driver is told how far it is."""


def _not_yet() -> tuple[int, int]:
    return 0, 0


class RayHost:
    """The `dray.training.host.Host` of one rank for one lease; see there for its attributes and methods.

    Args:
        driver, desk: the connections to the trial's driver, and to the desk that lends the worker group.
        code_dir: a directory that is copied into every checkpoint, or None.
        behind: takes the trial's end, if other trials follow in this process.
        is_program: whether the trial is a program, which ends when the program does, not with a `fit()` in it.
    """

    experiment_id = 1  # a run has one experiment
    best_supported = True
    secrets: Sequence[str] = ()  # the experiment's copy of the code contains none

    def __init__(
        self,
        *,
        driver: Connection,
        desk: Connection,
        lease: TrialLease,
        settings: SharedSettings,
        code_dir: Path | None,
        behind: Behind | None = None,
        is_program: bool = False,
    ) -> None:
        self.trial_id, self.trial_seed = lease.trial_id, lease.trial_seed
        self.latest_checkpoint: str | None = None
        self.source_checkpoint = settings.source_checkpoint
        self.tensorboard_path = lease.trial_dir / "tensorboard"
        self.code_dir = code_dir
        self.max_length, self.rungs = settings.max_length, settings.rungs
        self.validation_period = in_batches(settings.validation_period, lease.batch_size)
        self.checkpoint_period = in_batches(settings.checkpoint_period, lease.batch_size)
        self.is_remote = lease.store.is_remote
        self.behind = behind
        self.lease, self.settings, self._store = lease, settings, lease.store
        self._link = TrialLink(driver, desk, lease)
        self.reports = Reports(self._link, lease, settings, is_program=is_program)
        self.metrics: Sequence[str] = self.reports.checks.metrics
        self._progress: Callable[[], tuple[int, int]] = _not_yet
        self._begin = 0
        self._told = 0, -math.inf  # the batches that the driver knows of, and when it was told
        self._is_saving = False
        self.late: list[str] | None = None  # what to log once the trial, which was left behind, has ended
        self._store.warn = partial(self._say, level=logging.WARNING)

    # ------------------------------------------------------------------ the lease
    def resume(self) -> LeaseOutcome | None:
        """Find the checkpoint to resume from, and send the report stored in it. Returns as `Reports.resume`."""
        self._store.sweep()
        found = self._store.open_latest(self._link.damaged)
        if found is None:
            self.latest_checkpoint = self.lease.source  # its report is another trial's
            return None
        self.latest_checkpoint, directory = found
        path = directory / REPORT_FILE
        if not path.exists():  # another tool wrote the checkpoint
            return None
        carried = json.loads(path.read_text())
        # The process that committed it may have been killed before it could report it.
        self._link.saved(self.latest_checkpoint, carried["batches"], carried["metric"])
        # A report of an earlier version lacks some fields.
        report = DeskReport(**{name: carried[name] for name in DeskReport.__slots__ if name in carried})
        return self.reports.resume(report, carried["decides"])

    @property
    def is_changed_fork(self) -> bool:
        return self.lease.is_changed and self.latest_checkpoint == self.lease.source

    def end(self) -> LeaseOutcome:
        """End the trial after its code has returned. Returns the outcome: completed, interrupted, or the search's
        decision; or writing, if its end was left behind."""
        if self.behind is not None and self.behind.left is not None:
            return "writing"
        return self.reports.complete()

    def close(self) -> None:
        """Send all remaining data, even if the trial failed. This is a lease's last call of its host, on every rank."""
        self._store.close()
        with contextlib.suppress(DriverLost):  # it must not hide how the trial has left; the driver restarts it
            self._link.flush()

    @property
    def has_reported(self) -> bool:
        """Whether the trial's code has reported, in this lease or before its checkpoint."""
        resumed = self.latest_checkpoint is not None or self.lease.last_step is not None
        return resumed or self.reports.life.state != "idle"

    # ------------------------------------------------------------------ progress
    def training(self, plan: Plan, begin: int, peers: DistributedContext) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()  # the driver shows the progress of all trials

    def watch(self, progress: Callable[[], tuple[int, int]]) -> None:
        if not self.has_trained:
            self._begin = progress()[0]
            self._told = self._begin, time.monotonic()
            if self.behind is not None:
                self.behind.trains()
        self._progress = progress

    @property
    def has_trained(self) -> bool:
        """Whether this rank has begun to train."""
        return self._progress is not _not_yet

    @property
    def has_progressed(self) -> bool:
        """Whether this rank has trained a batch, or its trial has reported, in this lease."""
        return self.batches > self._begin or self.reports.life.state != "idle"

    @property
    def batches(self) -> int:
        """Batches trained, as far as this rank knows."""
        return self._progress()[0]

    def pulse(self) -> tuple[float, ...]:
        """A value that changes with any progress of the trial or of transfers with the store, including those of the
        trial before it, for which it may wait."""
        return *self._progress(), self._store.transferred

    @contextlib.contextmanager
    def beating(self, every_s: float = BEAT_S / 6) -> Iterator[None]:
        """Call `beat` in another thread, again and again, during the block."""
        over = threading.Event()

        def run() -> None:
            while not over.wait(every_s):
                self.beat()

        thread = threading.Thread(target=run, name="dray-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def beat(self) -> None:
        """Tell the driver how far training is if no report has for a minute: the `scheduling_unit` batches over which
        metrics are averaged may take longer. Not while the search may decide on an earlier batch."""
        (batches, now), (known, since) = (self.batches, time.monotonic()), self._told
        if self._is_saving or batches <= known or now - since < BEAT_S:
            return
        self._told = batches, now
        row = {"kind": "system", "name": "batches_per_second", "value": (batches - known) / (now - since)}
        self._link.send_at_once({"batches": batches, "epochs": None, "time": time.time(), **row})

    # ------------------------------------------------------------------ reports
    def publish(self, report: Report) -> bool:
        for did, metrics in (("trained to", report.training), ("validated at", report.validation)):
            if metrics is not None:
                self._say(f"{did} batch {report.batches}: {metrics_text(metrics)}")
        try:
            return self.reports.from_fit(report)
        finally:
            self._told, self._is_saving = (self.batches, time.monotonic()), False

    def _say(self, line: str, level: int = logging.INFO) -> None:
        if self.late is None:
            log.log(level, line)
        else:
            self.late.append(line)

    def reached(self, validation: Mapping[str, object]) -> Reached:
        return self.reports.reached(validation)

    def is_best(self, validation: Mapping[str, object]) -> bool:
        score = self.settings.score(self.settings.metric_of(validation))
        return math.isfinite(score) and self._link.is_best(score)

    def stop_requested(self) -> bool:
        return self._link.stop_requested()

    # ------------------------------------------------------------------ checkpoints
    def new_checkpoint(self, batches: int) -> Path:
        self._is_saving = True
        staging = self._store.stage(batches)
        last = self.reports.last_validation
        self.reports.unsaved.stage(staging, last.value if last.batches == batches else None)
        return staging

    def commit(self, staging: Path, report: Report, known: Mapping[str, Listed]) -> str:
        staged, message = self.reports.unsaved.take(staging), self.reports.carried(report)
        metric = staged.value if message.value is None else message.value
        carried = {each.name: getattr(message, each.name) for each in fields(message)}
        carried |= {"rows": [*staged.rows, *message.rows], "metric": metric}
        carried |= {"decides": report.decides, "batches": report.batches}
        (staging / REPORT_FILE).write_text(json.dumps(carried))
        at_rung = report.decides and not report.final
        checkpoint = self._store.commit(
            staging, report.batches, known, confirm=self._link.confirm_commit, keep=at_rung and self.behind is not None
        )
        self.reports.unsaved.saved = report.batches
        self._say(f"saved {checkpoint}")
        seconds = time.monotonic() - staged.staged_at
        self._link.saved(checkpoint, report.batches, metric, seconds)
        if self.behind is not None:
            self.behind.write_s = seconds
        return checkpoint

    def add_to_checkpoint(self, staging: Path, batches: int, known: Mapping[str, Listed]) -> dict[str, Listed]:
        self._link.confirm_commit()
        return self._store.add(staging, batches, known)

    def open_checkpoint(self, checkpoint: str, *, only: Collection[str] = ()) -> Path:
        return self._store.open(checkpoint, only=only)

    def last_checkpoint(self) -> str | None:
        return self.latest_checkpoint


class RayProgramHost(RayHost):
    """The `dray.training.host.ProgramHost` of one rank for one lease."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(is_program=True, **arguments)
        self.lengths: Sequence[float] = self.reports.rungs.remaining
        self.outputs = self._store.outputs
        self.acknowledged = False

    @property
    def was_complete(self) -> bool:
        """Whether the program had completed its last operation before this lease."""
        return bool(self.reports.rungs.lengths) and not self.lengths

    def opened(self) -> None:
        if self.reports.checks.is_single:  # no trials are compared, so the program need not report
            self.reports.life.on("report")

    def report(self, report: Report) -> bool:
        return self.reports.from_program(report)

    def interrupted(self) -> None:
        self.acknowledged = True
        self.reports.life.on("interrupt")

    def best_validation(self) -> float | None:
        score = self._link.best()
        return score if score is None or self.settings.smaller_is_better else -score

    def checkpoint_id(self, batches: int) -> str:
        return self._store.id_of(batches)

    def delete_checkpoint(self, checkpoint: str) -> None:
        batches = next((batches for batches, found in self._store.listed() if found == checkpoint), None)
        if batches is None:
            raise ValueError(f"there is no checkpoint {checkpoint!r} of this trial; a trial can delete only its own")
        self._store.delete(batches)
        self._link.damaged(checkpoint, "the trial's program deleted it")
