"""One run of an experiment on Ray, from its journal's state to the end of the search: the driver's side.

Two threads share the search under one lock. Tune's thread passes the trials' reports to it and carries out its
decisions. The thread that called `run()` reads the desk's messages: it binds leases to parameters, records metrics,
counts restarts, starts groups, and updates the display.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import ray

import dray
from dray.cluster.connection import Cluster, slots_now
from dray.cluster.watch import Watch
from dray.code.factory import ByValue, FromDirectory, Sent
from dray.config.load import ExperimentConfig
from dray.desk.failure import Failure
from dray.desk.messages import Message
from dray.display.counts import Counts
from dray.display.display import Display
from dray.environment import Device, device
from dray.errors import ConfigError, DeskLost, DirectoryGone, ExperimentError, FoundInTraining
from dray.experiment.interrupts import Interrupts
from dray.experiment.preflight import checked_nodes, told_by_worker
from dray.experiment.restarts import Restarts
from dray.experiment.retention import Policy, Retention
from dray.experiment.travel import send
from dray.groups.demand import Demand
from dray.groups.elastic import Elastic
from dray.groups.group import Slots, WorkerGroup, start_desk
from dray.groups.pool import IN_TURN_S, Groups, find_slots
from dray.observers.observer import Observers
from dray.records.directory import ExperimentDirectory
from dray.records.metrics import MetricsLog
from dray.records.outcomes import NEVER_BEST
from dray.records.timeline import Timeline
from dray.storage import CheckpointStore
from dray.training.units import Batch, TrainUnit
from dray.worker.host import REPORT, TOGETHER_S, Lease
from dray.worker.host import Experiment as TrialsExperiment
from searchers.errors import SpaceError
from searchers.events import Reason, Started
from searchers.journal import Journal
from searchers.ray_tune import Answer, TuneDriver
from searchers.search import Search
from searchers.views import TrialView

POLL_S = 0.25
"""How often the driver checks signals and updates the display when nothing happens."""
REPORTS_PER_S = 300
"""Reports of all trials together that nobody waits for: a third of what the desk can take (`bench/scale.py`)."""
TUNE_END_S = 60.0
"""How long Tune may take to end. A thread that is inside Ray when Ray is shut down may end the process."""
STOP_GRACE_S = 120.0
"""How long trials may take to save when the driver is told to stop."""
LOOK_S = 1.0
"""How often the driver looks whether the experiment's directory is still there."""


class Run:
    """Args:
    config, directory, journal, observers, search, metrics: of the experiment; the search has been started, and the
        config includes its extensions.
    revived: trials that had ended, and go on because the search was extended; and how they had ended.
    load_trial: loads the trial's class on the workers.
    cluster: where to run.
    interrupts: tell whether the run is to stop.
    records: the journal so far.
    on_message: called with each of the desk's messages; for benchmarks and tests.
    """

    def __init__(
        self,
        *,
        config: ExperimentConfig,
        directory: ExperimentDirectory,
        journal: Journal,
        observers: Observers,
        search: Search,
        metrics: MetricsLog,
        load_trial: FromDirectory | ByValue,
        cluster: Cluster,
        display: Display,
        interrupts: Interrupts,
        records: Sequence[Mapping[str, Any]],
        revived: Mapping[int, Reason] = MappingProxyType({}),
        on_message: Callable[[Message], None] | None = None,
    ) -> None:
        self.config, self.search, self.display, self.cluster = config, search, display, cluster
        self._restarts = Restarts(
            records,
            config=config,
            directory=directory,
            journal=journal,
            display=display,
            # If machines share no disk, a log here may be that of an earlier process of the rank.
            has_logs=cluster.own or directory.storage.is_local,
        )
        self.counts = Counts(restarts=self._restarts.counted)
        self._directory, self._journal, self._metrics = directory, journal, metrics
        self._load_trial: FromDirectory | ByValue | Sent = load_trial
        self._on_message, self._revived, self._observers = on_message, revived, observers
        self._timeline = Timeline(directory.metrics)
        self._lock = threading.RLock()
        self._error: BaseException | None = None
        self._interrupts = interrupts
        self._trains = False
        self._recorded: Counter[int] = Counter()
        self._records = records
        self._retention = Retention(
            Policy.of(config.checkpoint_storage, smaller_is_better=config.searcher.smaller_is_better),
            store_of=directory.store,
            needs=lambda trial: _checkpoints_needed(search.trials[trial]),
            note=lambda record: journal.append(record, wait=False),
            say=display.say,
        )
        # On a local cluster Tune and the groups share few CPUs. While the first group imports torch, on one core, Tune
        # may start; further groups wait until the first one trains.
        self._tune_may_start = not cluster.own
        sizes = config.slots_per_trial
        kind, limits = find_slots(cluster, config.resources, sizes[0])
        environment: dict[str, Any] = {}
        if not cluster.own:
            self._load_trial, environment = send(load_trial, directory, config, display.say)
        slots = Slots(
            per_trial=sizes[0],
            gpu=kind == "gpu",
            cpus_per_slot=config.resources.cpus_per_slot,
            runtime_env=environment,
            placement_strategy=config.resources.placement_strategy,
            shared_by=config.resources.trials_per_slot,
        )
        display.shares(slots.share)
        self._experiment = self._for_trials(device(gpu=slots.gpu))
        # The name of this run: one that resumes the experiment has another.
        self._name = f"{directory.path.name}-{secrets.token_hex(4)}"
        self._needs = None if cluster.own else checked_nodes(directory, self._name, gpu=slots.gpu)
        name = f"dray-desk-{self._name}"
        self.desk = start_desk(name, environment)
        elastic = len(sizes) > 1
        if cluster.own:  # a local cluster does not grow
            here = sum(slots_now(kind, slots.cpus_per_slot))
            sizes = tuple(size for size in sizes if size <= here)
        self.groups = Groups(
            self._worker_group,
            desk=self.desk,
            slots=slots,
            demand=Demand(slots, limits, config.resources.max_slots),
            elastic=Elastic(slots, sizes, name=self._name) if elastic else None,
            own_cluster=cluster.own,
            runnable=self._count_runnable,
            counts=self.counts,
            timeline=self._timeline,
            display=display,
            experiment=directory.path,
        )
        self._tune = TuneDriver(
            search,
            lock=self._lock,
            together=journal.together,
            act=self._act,
            source=name,
            namespace=ray.get_runtime_context().namespace,
            directory=directory.ray / f"tune-{time.time_ns()}",
            path=None if cluster.own else lambda: str(ray.get(self.desk.place.remote())),
        )

    # ------------------------------------------------------------------ before anything trains
    def _for_trials(self, slot: Device) -> TrialsExperiment:
        searcher = self.config.searcher
        length = _unit(searcher.counted_length)
        unit = type(length) if length is not None else Batch
        rungs = self.search.method.rungs
        by_time = searcher.counted_by is not None
        return TrialsExperiment(
            experiment_id=1,
            config=self.config.for_code(),
            data=self.config.data,
            environment=self.config.environment.variables(slot),
            secrets=self.config.secrets,
            metric=searcher.metric,
            smaller_is_better=searcher.smaller_is_better,
            max_length=length,
            rungs=() if by_time else tuple(unit(int(rung)) for rung in rungs),
            source_checkpoint=searcher.source_checkpoint_uuid,
            time_metric=searcher.counted_by,
            time_rungs=rungs if by_time else (),
            validation_period=_unit(self.config.min_validation_period),
            checkpoint_period=_unit(self.config.min_checkpoint_period),
            checkpoint_policy=self.config.checkpoint_policy,
        )

    # ------------------------------------------------------------------ the run
    def run(self) -> None:
        """Block until the search is done.

        Raises:
            KeyboardInterrupt: stopped by a signal, which it names; running trials have saved a checkpoint.
            DeskLost: the desk died; another run can resume from the journal.
            ExperimentError, ConfigError: it cannot go on.
        """
        with self._interrupts.held():
            self.groups.start()  # first of all: its processes take seconds to come up, beside what is done here
            tune = threading.Thread(target=self._tune.run, name="dray-tune", daemon=True)
            watch = Watch(
                ray.get_runtime_context().gcs_address,
                draining=None if self.cluster.own else self.groups.draining,
                silent=self._head_is_silent,
            )
            try:
                self._tell_desk()
                self._serve(tune)
            except ray.exceptions.RayError as e:
                self._error = DeskLost(
                    f"lost the experiment's desk, or Ray itself: {str(e).splitlines()[0]}; what trials have reported "
                    f"and saved is safe; resume with: dray experiment resume {self._directory.path}"
                )
            finally:
                self._close(tune, watch)
        if isinstance(self._error, DeskLost):
            self._interrupts.check()
            if not watch.answers():
                # Whatever asks Ray for something now, such as another run, would wait for it without a word.
                self._head_is_silent()
                while not watch.answers():
                    time.sleep(LOOK_S)
                self._give_back()  # it is back, and has kept what was ours
        if self._error is not None:
            raise self._error
        if self._tune.error is not None:
            raise ExperimentError(f"the search failed: {self._tune.error}") from self._tune.error
        self._interrupts.check()

    def _tell_desk(self) -> None:
        """Tell the desk where the search is, and begin to look after checkpoints."""
        trials = self.search.trials.values()
        best = [trial.best for trial in trials if trial.best is not None and trial.state not in NEVER_BEST]
        self.desk.set_best.remote(min(map(self._experiment.score, best), default=None))
        self.desk.enqueue.remote([trial.id for trial in self._runnable()])
        started = [trial.id for trial in trials if trial.hparams is not None]
        self._retention.start(self._records, started, _metric_at)

    def _serve(self, tune: threading.Thread) -> None:
        began = look_at = time.monotonic()
        self._ask_for_mail()
        while self._error is None and self._tune.error is None:
            self._read_mail()
            if self._interrupts.wanted:  # Ray may be about to end as well
                break
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + LOOK_S
                if self._directory.is_gone():
                    self._error = DirectoryGone(self._directory.path)
                    break
            if tune.ident is None:
                if self._tune_may_start or time.monotonic() - began > IN_TURN_S:
                    tune.start()
            elif not tune.is_alive() and self.search.done is not None:
                break
            if self.search.done is None:
                self.groups.look_after()
            if self.groups.error is not None:
                self._error = self.groups.error
            self._metrics.pack()
            self.display.update(self.search, self.counts, self.groups.up, self.groups.there)

    def _read_mail(self) -> bool:
        """Read the desk's messages, after a short wait for them; False if there were none."""
        ready, _ = ray.wait([self._mail], timeout=POLL_S)
        if ready:
            self._read(ray.get(self._mail))
            self._ask_for_mail()
        return bool(ready)

    def _ask_for_mail(self) -> None:
        self._mail = self.desk.messages.remote(dict(self._recorded))
        self._recorded.clear()

    def _close(self, tune: threading.Thread, watch: Watch) -> None:
        """Let running trials save and end, then end Tune, the groups and the desk, unless Ray itself is gone."""
        watch.close()
        self.display.closing(self._interrupts.wanted)
        try:
            if not self._directory.is_gone():
                with contextlib.suppress(ray.exceptions.RayError):  # the desk may be gone
                    self._let_trials_save(watch)
        finally:  # also if it is interrupted again
            self._tune.stop()
            # Tune checks whether to stop only when a handle returns.
            self.desk.finished.remote()
            deadline = time.monotonic() + TUNE_END_S
            while tune.is_alive() and time.monotonic() < deadline and watch.answers():
                tune.join(POLL_S)
        self._retention.close()
        self._timeline.close()
        if not watch.answers():
            return
        self._give_back()

    def _give_back(self) -> None:
        """End the groups and the desk."""
        # On a shared cluster workers first give back what they hold. Without a desk they would try that for ever.
        self.groups.end(at_once=self.cluster.own or isinstance(self._error, DeskLost))
        if not self.cluster.own:
            ray.kill(self.desk)

    def _let_trials_save(self, watch: Watch) -> None:
        self.desk.close.remote()
        deadline = time.monotonic() + STOP_GRACE_S
        quiet = self.desk.quiet.remote()
        while time.monotonic() < deadline and watch.answers():
            if ray.wait([quiet], timeout=POLL_S)[0]:
                if ray.get(quiet):
                    break
                quiet = self.desk.quiet.remote()
            self._read_mail()

    def _read(self, messages: list[Message]) -> None:
        for message in messages:
            if self._on_message is not None:
                self._on_message(message)
            self.groups.hear(message)
            match message.kind:
                case "arrived":
                    self._tune_may_start = True
                case "broken":
                    self._error = told_by_worker(message.cause, self._directory.path)
                    if self._trains and isinstance(self._error, ConfigError):
                        self._error = FoundInTraining(self._error.faults, self._error.source)
                case "retired" if self.config.resources.reuse_workers:
                    self.display.retired(message.group, message.trial, message.error)
                case "handle":
                    self.counts.handles_started += 1
                case "granted":
                    self._bind(message)
                case "rows":
                    assert message.report is not None
                    self._trains = True
                    if warning := message.report.get("warning"):
                        self.display.say(f"warning: trial {message.trial}: {warning}")
                    self._metrics.append(message.trial, message.report["rows"])
                    self._observers.rows(message.trial, message.report["rows"])
                    self.display.rows(message.trial, message.report["rows"])
                    self._recorded[message.lease] += 1
                case "saved":
                    self._retention.saved(message.trial, message.batches, message.checkpoint, message.value)
                case "damaged":
                    self._retention.damaged(message.trial, message.checkpoint, message.error)
                case "left":
                    self._left(message)

    def _bind(self, message: Message) -> None:
        with self._lock:
            view = self.search.trials[message.trial]
            wanted = _is_runnable(view)
            if wanted:
                try:
                    self.search.on(Started(trial=message.trial))
                except SpaceError as error:  # no sample meets the constraint
                    self._error = FoundInTraining(error.faults, "The search")
                    return
            lease = Lease(
                number=message.lease,
                trial_id=message.trial,
                trial_seed=self.search.seed_of(message.trial),
                hparams=self.search.params(message.trial),
                trial_dir=self._directory.trial(message.trial),
                store=self._directory.store(message.trial),
                last_step=view.last_step,
                revived=message.trial in self._revived,
                together_s=max(TOGETHER_S, self.groups.there / REPORTS_PER_S),
            )
        if wanted:
            self.desk.bind.remote(message.lease, {"number": message.lease, "lease": lease})
        else:
            self.desk.drop.remote(message.lease)

    def _left(self, message: Message) -> None:
        trial = message.trial
        if message.outcome not in ("errored", "diverged", "invalid_hp") or self.search.trials[trial].ended:
            return
        # A trial whose extension fails keeps the result that it had.
        kept = self._revived.get(trial)
        if message.outcome == "invalid_hp":
            if kept is not None:
                failure = Failure(kind="error", where="InvalidHP")
                self._restarts.gave_up(trial, message.error, "it raised InvalidHP", failure, kept)
            self.desk.finish.remote(trial, kept or "invalid_hp")
            return
        if message.outcome == "diverged":
            self.display.say(f"trial {trial} is stopped (stop_on_nan): {message.error}")
            self.desk.finish.remote(trial, "diverged")
            return
        if message.fatal:
            self.display.failure(trial, message.error)
            self._error = _config_error(message.error)
            return
        assert message.failure is not None, "an error is of some kind, unless it ends the search"
        if not self._restarts.failed(trial, message.error, message.failure, message.dead, kept or ""):
            self.desk.finish.remote(trial, kept or "errored")
            return
        with self._lock:
            # If it was paused meanwhile, or paused and queued again, it goes on when its turn comes.
            runs = self.search.trials[trial].state == "RUNNING"
            if runs:
                self.desk.enqueue.remote([trial], first=True)

    def _act(self, answer: Answer) -> None:
        """Carry out a decision that is already in the journal. Called in Tune's thread."""
        self.desk.answer.remote(answer.trial, answer.number, answer.decision)
        if answer.stops:
            self.desk.withdraw.remote(list(answer.stops))
        if answer.resumes:
            # Before new trials: the search has chosen them as the best to train next.
            self.desk.enqueue.remote(list(answer.resumes), first=True)
        if answer.creates:
            self.desk.enqueue.remote(list(answer.creates))
        if answer.decision != "continue" or answer.stops:
            self._retention.look([answer.trial, *answer.stops])
        if answer.done:
            self.desk.finished.remote()

    def _runnable(self) -> list[TrialView]:
        return [trial for trial in self.search.trials.values() if _is_runnable(trial)]

    def _count_runnable(self) -> int:
        with self._lock:
            return len(self._runnable())

    def _worker_group(self, name: str, start: int, slots: Slots) -> WorkerGroup:
        return WorkerGroup(
            name=name,
            start=start,
            run=self._name,
            desk=self.desk,
            slots=slots,
            work={
                "experiment": self._experiment,
                "load_trial": self._load_trial,
                "run": self._name,
                "log_format": dray.LOG_FORMAT,
                "shared_by": slots.shared_by,
                "needs": self._needs,
            },
            directory=self._directory.ray,
        )

    def _head_is_silent(self) -> None:
        self.display.say(
            "the head of the Ray cluster does not answer; if it is gone, resume with: dray experiment resume "
            f"{self._directory.path}"
        )


def _is_runnable(trial: TrialView) -> bool:
    """Whether the trial should have workers."""
    return trial.state in ("PENDING", "RUNNING")


def _checkpoints_needed(trial: TrialView) -> int:
    """How many of its latest checkpoints a trial needs: one to go on from, and one more while it may write others."""
    return 0 if trial.ended else 2 if trial.state == "RUNNING" else 1


def _metric_at(store: CheckpointStore, batches: int) -> float | None:
    try:
        value = json.loads(store.read(batches, REPORT)).get("metric")
    except (FileNotFoundError, ValueError):  # from another tool, or damaged
        return None
    return value if isinstance(value, int | float) else None


def _config_error(error: str) -> FoundInTraining:
    """From a worker's message, ``field: what is wrong with it``."""
    field_path, _, what = error.partition(": ")
    return FoundInTraining([(field_path, what)])


def _unit(length: Any) -> TrainUnit | None:
    return None if length is None else length.to_unit()
