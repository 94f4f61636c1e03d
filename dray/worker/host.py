"""A host inside a lent Ray worker: reports go to the desk, checkpoints to storage, and decisions come back."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ray

from dray.hosts.unsaved import Unsaved
from dray.storage import CheckpointStore
from dray.storage.manifest import Listed
from dray.training.host import Reached, Report
from dray.training.metrics.checks import MetricChecks
from dray.training.metrics.time_metric import crossed, time_of
from dray.training.parallel.distributed import DistributedContext
from dray.training.plan import Plan
from dray.training.units import Batch, Epoch, TrainUnit, in_batches

REPORT = "report.json"
"""A file in a checkpoint: what was measured since the checkpoint before, in case the driver never got it."""

TOGETHER_S = 0.25
"""Training metrics, which nobody waits for, are sent together with later reports within this time: a message costs over
a millisecond of CPU time."""

REPORTS_IN_FLIGHT = 16
"""Reports that may be unanswered before the trial waits for the oldest of them."""


Ending = Literal["completed", "stopped", "diverged", "paused", "interrupted"]


_ENDINGS: dict[str, Ending] = {"stop": "stopped", "pause": "paused", "interrupt": "interrupted"}


class LeaseLost(RuntimeError):
    """The trial has been given to other workers: nothing that this process still does for it counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """What is the same for all trials of an experiment.

    Args:
        experiment_id: a number.
        config: the experiment's config, as plain data, without its secrets.
        secrets: texts to hide in logs and errors; see `dray.masking`.
        data: the config's, with secrets. It is left out of this object's repr, which Ray's dashboard shows.
        metric: the validation metric that the search compares.
        smaller_is_better: of the metric.
        max_length: the search's; reports count in its unit, in batches without one.
        rungs: absolute lengths at which the search decides, in the same unit.
        source_checkpoint: what every trial begins with, or None.
        time_metric: the validation metric by which the search counts length, instead of batches; or None.
        time_rungs: the lengths at which it then decides, in that metric's unit; a trial ends at the last one.
        validation_period, checkpoint_period: how often at least, or None.
        checkpoint_policy: best, all or none.
        environment: environment variables of trials; None for those to unset.
    """

    experiment_id: int
    config: Mapping[str, Any]
    metric: str
    smaller_is_better: bool
    max_length: TrainUnit | None
    rungs: Sequence[TrainUnit]
    validation_period: TrainUnit | None
    checkpoint_period: TrainUnit | None
    checkpoint_policy: str
    source_checkpoint: str | None = None
    time_metric: str | None = None
    time_rungs: Sequence[float] = ()
    data: Mapping[str, Any] = field(default_factory=dict, repr=False)
    environment: Mapping[str, str | None] = field(default_factory=dict, repr=False)
    secrets: Sequence[str] = field(default=(), repr=False)

    def for_code(self) -> dict[str, Any]:
        """The config for a trial's code: a copy, because the next trial in this process gets it too."""
        return {**copy.deepcopy(dict(self.config)), "data": copy.deepcopy(dict(self.data))}

    def score(self, value: object) -> float:
        """A metric as the search ranks it: smaller is better, and a value that is not finite is the worst."""
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return math.inf
        return float(value) if self.smaller_is_better else -float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A trial as it is lent to a worker group.

    Args:
        number: of the lease; a later lease of the same trial ends it.
        trial_id, trial_seed, hparams: which trial.
        trial_dir: the trial's own directory, for everything but checkpoints.
        store: its checkpoints; the trial goes on from the latest valid one.
        last_step: the greatest length at which the search has had a report, or None.
        revived: the trial had ended, and goes on because the search was extended: the end recorded in its checkpoint
            may no longer be one.
        together_s: as `TOGETHER_S`; longer where many trials report to one desk.
    """

    number: int
    trial_id: int
    trial_seed: int
    hparams: Mapping[str, Any]
    trial_dir: Path
    store: CheckpointStore
    last_step: float | None
    revived: bool = False
    together_s: float = TOGETHER_S


class RayHost:
    """The `dray.training.host.Host` of one rank for one lease; see there for its attributes and methods.

    Args:
        desk: the desk's actor handle.
        lease: the trial to run.
        experiment: the trial's experiment.
        code_dir: copied into every checkpoint, or None.
        script: the trial is a program, and ends when the program does, not with a `fit()` in it.
    """

    best_supported = True

    def __init__(
        self, *, desk: Any, lease: Lease, experiment: Experiment, code_dir: Path | None, script: bool = False
    ) -> None:
        self.experiment_id, self.trial_id, self.trial_seed = experiment.experiment_id, lease.trial_id, lease.trial_seed
        self.latest_checkpoint: str | None = None
        self.source_checkpoint = experiment.source_checkpoint
        self.tensorboard_path = lease.trial_dir / "tensorboard"
        self.code_dir = code_dir
        self.secrets: Sequence[str] = ()  # the experiment's copy of the code has none
        self.max_length: TrainUnit | None = experiment.max_length
        self.rungs = experiment.rungs
        records = int(lease.hparams.get("global_batch_size", 1))
        self.validation_period = in_batches(experiment.validation_period, records)
        self.checkpoint_period = in_batches(experiment.checkpoint_period, records)
        self._checks = MetricChecks(
            experiment.metric,
            is_alone=experiment.config.get("searcher", {}).get("name") == "single",
            stops_on_nan=bool(experiment.config.get("stop_on_nan")),
        )
        self.metric = self._checks.compared
        self.outcome: Ending = "completed"
        self.watched = False  # whether this rank trains, or has trained
        self.heard = False  # whether a program with a loop of its own knows that it is asked to end
        self.closed = False  # whether such a program had completed its last operation before this lease
        self._progress: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._commits = 0
        self._desk, self._lease, self._experiment = desk, lease, experiment
        self._store = lease.store
        self.is_remote = lease.store.is_remote
        self.outputs = lease.store.outputs
        self._in_flight: deque[Any] = deque()
        self._kept: list[dict[str, Any]] = []
        self._sent = -math.inf
        self._unsaved = Unsaved()
        self._carried: list[dict[str, Any]] = []
        self._ended = False
        self._asked: Any = None
        self._script = script
        self._reported = False
        self._last: dict[str, Any] | None = None
        self._verified: tuple[str, Path] | None = None  # by go_on(), for the trial's code that opens it next
        self._time = lease.last_step
        self._validated: tuple[int, float | None] = (-1, None)
        self._value: float | None = None
        self._began: float | None = time.monotonic()
        self._found: dict[str, Any] = {}
        self.why = ""  # the trial has diverged

    # ------------------------------------------------------------------ checkpoints
    def is_best(self, validation: Mapping[str, object]) -> bool:
        improves = self._improves(validation)
        return improves is not None and bool(ray.get(improves))

    def _improves(self, validation: Mapping[str, object]) -> Any:
        """The desk's answer to come, whether this is the best of the experiment; None if it can't be."""
        score = self._experiment.score(self._metric_of(validation))
        return self._desk.improves.remote(self._lease.number, score) if math.isfinite(score) else None

    def reached(self, validation: Mapping[str, object]) -> Reached:
        if self._experiment.time_metric is None:
            return "nothing"
        now = time_of(self._experiment.time_metric, validation)
        reached = crossed(self._experiment.time_rungs, self._time, now)
        self._time = now if self._time is None else max(self._time, now)
        return reached

    def training(self, plan: Plan, begin: int, peers: DistributedContext) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()  # the driver shows the progress of all trials

    def watch(self, progress: Callable[[], tuple[int, int]]) -> None:
        self._progress, self.watched = progress, True

    @property
    def batches(self) -> int:
        """Batches trained, as far as this rank knows."""
        return self._progress()[0]

    def pulse(self) -> tuple[float, ...]:
        """A value that changes with any progress of the trial, and all the time while it waits for its store."""
        return *self._progress(), self._commits, time.monotonic() if self._store.activity else 0.0

    def new_checkpoint(self, batches: int) -> Path:
        self._carried = self._unsaved.now()
        # The value of a validation at the same batch, if one was published before.
        validated, value = self._validated
        self._value = value if validated == batches else None
        return self._store.stage(batches)

    def commit(
        self,
        staging: Path,
        report: Report,
        digests: Mapping[str, str],
        others: Mapping[str, Listed] | None = None,
    ) -> str:
        message = self._message(report)
        carried = {**message, "rows": [*self._carried, *message["rows"]], "decides": report.decides}
        value = self._metric_of(report.validation) if report.validation is not None else self._value
        carried |= {"batches": report.batches, "metric": value}
        (staging / REPORT).write_text(json.dumps(carried))
        # Also the fence: a process that lost the lease must not write beside the one that has it.
        self._fence()
        self._verified = None
        checkpoint = self._store.commit(staging, report.batches, digests, others)
        self._unsaved.saved = report.batches
        self._desk.saved.remote(self.trial_id, checkpoint, report.batches, value)
        self._commits += 1
        return checkpoint

    def _fence(self) -> None:
        if not ray.get(self._desk.may_commit.remote(self._lease.number)):
            raise LeaseLost(f"trial {self.trial_id} now runs elsewhere")

    def open_checkpoint(self, checkpoint: str) -> Path:
        found, self._verified = self._verified, None
        if found is not None and found[0] == checkpoint:
            return found[1]
        return self._store.open(checkpoint)

    # ------------------------------------------------------------------ reports
    def asked_to_stop(self) -> bool:
        # The first call comes when a trial has run for a moment: short ones are spared the message.
        if self._asked is None:
            self._asked = self._desk.stop_wanted.remote(self._lease.number)
        try:
            ready, _ = ray.wait([self._asked], timeout=0)
            return bool(ready) and bool(ray.get(self._asked))
        except ray.exceptions.RayError:  # the next report finds out what is wrong
            return False

    def publish(self, report: Report) -> bool:
        stop = self._publish(report)
        return self._diverges(report) or stop

    def _diverges(self, report: Report) -> bool:
        """Whether the trial ends by this report because a loss is NaN."""
        if self.outcome == "completed" and (why := self._checks.diverged(report)):
            self.outcome, self.why = "diverged", why
        return self.outcome == "diverged"

    def _publish(self, report: Report) -> bool:
        if self._ended or self._last is not None:
            raise RuntimeError(
                "a trial of an experiment can call fit() only once: the search already has this trial's final report, "
                "and ignores any later one; train further models in experiments of their own"
            )
        message = self._message(report)
        if warning := self._checks.warning(report):
            message["warning"] = warning  # the driver shows it
        self._reported = True
        if report.validation is not None:
            self._validated = (report.batches, self._metric_of(report.validation))
            if report.decides:
                self._improves(report.validation)  # for later validations: this one was saved without asking
        self._unsaved.add(message["rows"])
        if self.outcome != "completed":  # the last checkpoint of a trial that was told to end: that still holds
            self._obey(self._send(message, decides=False))
            return True
        if self._script and report.final:
            self._last = message
            return False
        if report.validation is None and report.checkpoint is None and not report.decides and not report.final:
            self._kept += message["rows"]
            if time.monotonic() < self._sent + self._lease.together_s:
                return self._obey(self._heard())
            message["rows"] = []
        return self._obey(self._send(message, decides=report.decides or report.final))

    def go_on(self) -> Ending | None:
        """Find the checkpoint to go on from, and report what it carries, which may never have reached the driver.

        Returns:
            How the trial ended, if that was its last report or the search now stops it; otherwise None.
        """
        self._store.sweep()
        found = self._store.open_latest(lambda damaged, why: self._desk.damaged.remote(self.trial_id, damaged, why))
        if found is None:
            return None
        self.latest_checkpoint, directory = self._verified = found
        path = directory / REPORT
        if not path.exists():  # a checkpoint that another tool wrote
            return None
        message = self._found = json.loads(path.read_text())
        batches, value = message.pop("batches", None), message.pop("metric", None)
        if batches is not None:  # the process that committed it may have been killed before it told
            self._desk.saved.remote(self.trial_id, self.latest_checkpoint, batches, value)
        decides = message.pop("decides")
        known = self._lease.last_step
        news = message["step"] is not None and (known is None or message["step"] > known)
        if self._lease.revived and not news:
            message["final"] = False
        if news and self._experiment.time_metric is not None:
            self._time = message["step"]
        if self._obey(self._send(message, decides=(decides and news) or message["final"])):
            return self.outcome
        return "completed" if message["final"] else None

    @property
    def trained(self) -> bool:
        """Whether the trial's code has trained, now or before the checkpoint that it went on from."""
        return self._reported or self.latest_checkpoint is not None or self._lease.last_step is not None

    def end(self) -> Ending:
        """The trial's code has returned. Returns how it ended: completed, interrupted, or as the search decided."""
        if self.outcome == "completed" and not self._ended:
            last = self._last or {"rows": [], "step": None, "value": None}
            self._send({**last, "final": True}, decides=True)
        while self._in_flight:
            ray.get(self._in_flight.popleft())
        return self.outcome

    def flush(self) -> None:
        """Send what is kept, even if the trial failed: the last call of a lease to its host, on every rank."""
        self._store.close()
        if self._kept:
            self._send({"rows": [], "step": None, "value": None, "final": False}, decides=False)

    def _send(self, message: dict[str, Any], decides: bool) -> str:
        message = {**message, "rows": [*self._kept, *message["rows"]]}
        self._kept, self._sent = [], time.monotonic()
        answer = self._desk.report.remote(self._lease.number, message, decides)
        self._ended = self._ended or message["final"]
        if decides:
            return str(ray.get(answer))
        self._in_flight.append(answer)
        return self._heard()

    def _heard(self) -> str:
        """The first answer other than "continue" among those that have come; otherwise "continue"."""
        verdict = "continue"
        while self._in_flight and verdict == "continue":
            # Only the oldest is checked: reports arrive in order.
            ready, _ = ray.wait([self._in_flight[0]], timeout=0 if len(self._in_flight) <= REPORTS_IN_FLIGHT else None)
            if not ready:
                break
            verdict = ray.get(self._in_flight.popleft())
        return verdict

    def _obey(self, verdict: str) -> bool:
        match verdict:
            case "continue":
                return False
            case "stop" | "pause" | "interrupt":
                if self.outcome == "completed":
                    self.outcome = _ENDINGS[verdict]
                return True
            case _:
                raise LeaseLost(f"trial {self.trial_id} now runs elsewhere")

    def _system(self, report: Report) -> Mapping[str, float] | None:
        """The system figures; the first ones also with the time before the training that they cover."""
        if report.system is None or self._began is None:
            return report.system
        trained_s = sum(value for name, value in report.system.items() if name.endswith("_s"))
        starting_s, self._began = time.monotonic() - self._began - trained_s, None
        return {"starting_s": max(starting_s, 0.0), **report.system}

    def _message(self, report: Report) -> dict[str, Any]:
        now = time.time()
        if report.interrupted and self.outcome == "completed":
            self.outcome = "interrupted"
        rows = [
            {
                "batches": report.batches,
                "epochs": report.epochs,
                "kind": kind,
                "name": name,
                "value": value,
                "time": now,
            }
            for kind, metrics in (
                ("training", report.training),
                ("validation", report.validation),
                ("system", self._system(report)),
                *(report.groups or {}).items(),
            )
            for name, value in (metrics or {}).items()
            if isinstance(value, (int, float)) and name not in ("batches", "epochs")
        ]
        return {
            "rows": rows,
            "step": self._step(report, report.validation) if report.validation is not None else None,
            "value": self._metric_of(report.validation) if report.validation is not None else None,
            # A program that fails after fit() has not completed its trial: it is run again. And the end of a trial that
            # was told to end, or to leave its workers, is not its completion.
            "final": report.final and not self._script and self.outcome == "completed",
        }

    def _step(self, report: Report, validation: Mapping[str, object]) -> float | None:
        if self._experiment.time_metric is not None:
            return time_of(self._experiment.time_metric, validation)
        match self._experiment.max_length:
            case Epoch():
                assert report.epochs is not None, "a length in epochs was resolved without the length of an epoch"
                # Whole epochs must be whole numbers, because rungs are compared with them.
                return round(report.epochs) if math.isclose(report.epochs, round(report.epochs)) else report.epochs
            case Batch() | None:
                return report.batches
            case _:
                return report.batches * int(self._lease.hparams["global_batch_size"])

    def _metric_of(self, validation: Mapping[str, object]) -> float | None:
        # Not there: with `single`, and in a program's other validations.
        value = validation.get(self._experiment.metric)
        return float(value) if isinstance(value, (int, float)) else None
