"""One run of an experiment on Ray, from its journal's state to the end of the search: the driver's side.

The thread that called `Run.run` reads the desk's messages: it binds leases to hyperparameters, records metrics,
restarts trials, starts and ends groups, and updates the display. Tune's thread takes the trials' results to the search.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from typing_extensions import assert_never

from dray.cluster.connection import Cluster
from dray.cluster.watch import Watch
from dray.code.factory import ByValue, FromDirectory
from dray.desk import messages
from dray.desk.actor import connect, results_of, start_desk
from dray.desk.connection import DeskConnection, DeskUnreachable
from dray.desk.messages import LeaseGranted, Message, ReportReceived, TrialLeft
from dray.display.counts import Counts
from dray.display.display import Display
from dray.errors import ConfigError, DeskLost, DirectoryGone, ExperimentError, FoundInTraining, TakenOver
from dray.experiment.interrupts import Interrupts
from dray.experiment.open_search import OpenSearch
from dray.experiment.preflight import error_of_unfit_worker
from dray.experiment.prometheus import Prometheus
from dray.experiment.restarts import Restarts
from dray.experiment.retention import Policy, Retention, checkpoints_needed
from dray.experiment.trial_queue import TrialQueue
from dray.experiment.workers import prepare_workers
from dray.groups.lent import DESK, GroupServer, LentGroups
from dray.groups.pool import IN_TURN_S, Groups
from dray.observers.observer import Observers
from dray.records.directory import ExperimentDirectory
from dray.records.driver_lock import DriverLock
from dray.records.metrics import MetricsLog
from dray.records.timeline import Timeline
from dray.worker.lease import SEND_EVERY_S
from searchers.answers import Answer
from searchers.errors import SpaceError
from searchers.journal import Journal
from searchers.ray_tune import TuneDriver

POLL_S = 0.25
"""How often the driver checks signals and updates the display when nothing happens."""
REPORTS_PER_S = 1000
"""Reports of all trials together that nobody waits for: half of what driver and desk take on two cores
(`bench/scale.py`)."""
TUNE_END_S = 60.0
"""How long Tune may take to end. A thread that is inside Ray when Ray is shut down may end the process."""
STOP_GRACE_S = 120.0
"""How long trials may take to save when the driver is interrupted."""
CHECK_S = 1.0
"""How often the driver checks that the experiment's directory still exists."""


def lent_handle() -> str:
    """The name of this process's Tune handle at a server's desk."""
    return str(ray.get_runtime_context().get_job_id())


def tune_driver(desk: str, handle: str, directory: Path, *, local: bool) -> TuneDriver:
    """A Tune driver whose handle gets its results from a desk.

    Args:
        desk: the actor's name.
        handle: its name at the desk.
        directory: for Tune.
        local: the handle can import dray as this process does.
    """
    namespace = ray.get_runtime_context().namespace
    return TuneDriver(
        source=functools.partial(results_of, desk, namespace, handle),
        directory=directory,
        path=None if local else lambda: str(ray.get(ray.get_actor(desk, namespace=namespace).import_path.remote())),
    )


class Run:
    """One run: it has its own desk, worker groups and Tune driver.

    Args:
        opened: the experiment's search.
        directory, lock, journal, observers, metrics: of the experiment.
        load_trial: loads the trial's class, or the program, on workers on this machine.
        cluster: where to run.
        interrupts: signals that ask the run to stop.
        lender: the server that lends it groups; None: the run has its own.
        tune: a Tune driver whose handle is `lent_handle`, and which may have started; None: there is none yet.
        on_message: called with each of the desk's messages; for benchmarks and tests.

    Attributes:
        search: as opened.
        counts: the run's counters.
    """

    def __init__(
        self,
        *,
        opened: OpenSearch,
        directory: ExperimentDirectory,
        lock: DriverLock,
        journal: Journal,
        observers: Observers,
        metrics: MetricsLog,
        load_trial: FromDirectory | ByValue,
        cluster: Cluster,
        display: Display,
        interrupts: Interrupts,
        lender: GroupServer | None = None,
        tune: TuneDriver | None = None,
        on_message: Callable[[Message], None] | None = None,
    ) -> None:
        config, search = opened.config, opened.search
        self.search, self.config, self._records = search, config, opened.records
        self.display, self.cluster = display, cluster
        self._directory, self._lock, self._metrics, self._observers = directory, lock, metrics, observers
        self._on_message, self._interrupts = on_message, interrupts
        self._error: BaseException | None = None
        self._trains = False
        self._connection: DeskConnection | None = None
        """For what happens with every trial; what is rare goes to `desk`, the actor."""
        self._mail: Future[list[Message]] = Future()
        self._granted: list[LeaseGranted] = []
        self._recorded: Counter[int] = Counter()
        """Reports of each lease recorded since the desk was last asked for messages."""
        # On a local cluster Tune and the groups share few CPUs. While the first group imports torch, on one core, Tune
        # may start; further groups wait until the first one trains.
        self._tune_may_start = not cluster.own
        self._timeline = Timeline(directory.metrics)
        self._restarts = Restarts(
            opened.records,
            config=config,
            directory=directory,
            journal=journal,
            display=display,
            # If machines share no disk, a log here may be that of an earlier process of the rank.
            has_logs=cluster.local or directory.storage.is_local,
        )
        self.counts = Counts(restarts=self._restarts.counted)
        self._retention = Retention(
            Policy.of(config.checkpoint_storage, smaller_is_better=config.searcher.sign == 1),
            store_of=directory.store,
            needs=lambda trial: checkpoints_needed(search.trials[trial]),
            note=lambda record: journal.append(record, wait=False),
            say=display.say,
        )
        self._workers = prepare_workers(
            config, directory, cluster, load_trial, search.method.rungs, display.say, borrows=lender is not None
        )
        display.shares(self._workers.slots.share)
        self._name = self._workers.experiment.run
        self._is_lent = lender is not None
        desk_name = f"dray-desk-{self._name}" if lender is None else DESK
        if lender is not None:
            self.desk = lender.desk()
            workers, experiment = cloudpickle.dumps(self._workers), cloudpickle.dumps(self._workers.experiment)
            ray.get(self.desk.add.remote(self._name, experiment, workers, handle=lent_handle(), **self._workers.claim))
        else:
            env, shape = self._workers.slots.runtime_env, self._workers.shape
            self.desk = start_desk(desk_name, self._name, shape=shape, runtime_env=env)
        self._queue = TrialQueue(
            search,
            name=self._name,
            directory=directory,
            together=journal.together,
            changed=self._retention.changed,
        )
        self._prometheus = Prometheus(
            directory.path.name,
            counts=self.counts,
            states=self._queue.states,
            busy_slots=lambda: self._timeline.busy_slots,
        )
        self.groups: Groups | LentGroups = (
            LentGroups()
            if self._is_lent
            else Groups(
                functools.partial(self._workers.start, self.desk, owner=self._name),
                desk=self.desk,
                owner=self._name,
                slots=self._workers.slots,
                capacity=self._workers.capacity,
                elastic=self._workers.elastic,
                own_cluster=cluster.own,
                runnable=self._queue.count_runnable,
                counts=self.counts,
                timeline=self._timeline,
                display=display,
                experiment=directory.path,
            )
        )
        if tune is None or tune.ended.done():
            handle = lent_handle() if self._is_lent else self._name
            tune = tune_driver(desk_name, handle, directory.ray / f"tune-{time.time_ns()}", local=cluster.local)
        tune.attach(search, lock=self._queue.lock, together=journal.together, act=self._act)
        self._tune = tune

    def run(self) -> None:
        """Block until the search is done.

        Raises:
            KeyboardInterrupt: stopped by a signal, which it names; running trials have saved a checkpoint.
            DeskLost: the desk died; another run can resume from the journal.
            ExperimentError, ConfigError: it cannot continue.
        """
        with self._interrupts.held():
            self.groups.start()  # first of all: its processes take seconds to come up, beside what is done here
            watch = Watch(
                ray.get_runtime_context().gcs_address,
                draining=None if self.cluster.own else self.groups.nodes_drain,
                silent=self._head_is_silent,
            )
            try:
                self._connection = connect(self.desk)
                self._queue.begin(self._connection, self._workers.experiment.settings.score)
                self._retention.start(self._records)
                self._records.clear()
                self._serve()
            except (ray.exceptions.RayError, DeskUnreachable) as e:
                self._error = DeskLost(
                    f"lost the experiment's desk, or Ray itself: {str(e).splitlines()[0]}; what trials have reported "
                    f"and saved is safe; resume with: dray experiment resume {self._directory.path}"
                )
            finally:
                self._close(watch)
        if isinstance(self._error, DeskLost):
            self._interrupts.check()
            self._wait_for_head(watch)
        if self._error is not None:
            raise self._error
        if self._tune.error is not None:
            raise ExperimentError(f"the search failed: {self._tune.error}") from self._tune.error
        self._interrupts.check()

    # ------------------------------------------------------------------ the desk's messages
    def _serve(self) -> None:
        """Read messages and keep the groups running, until the search is done, an error occurs, or a signal arrives."""
        began = check_at = time.monotonic()
        self._ask_for_mail()
        while self._error is None and self._tune.error is None:
            self._read_mail()
            if self._interrupts.wanted:  # Ray may be about to end as well
                break
            if time.monotonic() >= check_at:
                check_at = time.monotonic() + CHECK_S
                if self._is_taken():
                    break
            if not self._tune.started:
                if self._tune_may_start or time.monotonic() - began > IN_TURN_S:
                    self._tune.start()
            elif self._tune.ended.done() and self._tune.error is None:
                if self.search.done is None:
                    raise DeskUnreachable("the search's Tune handle has lost the desk")
                break
            if self.search.done is None:
                self.groups.reconcile()
            if self.groups.error is not None:
                self._error = self.groups.error
            self._metrics.pack()
            self.display.update(self.counts, self.groups.ready_count, self.groups.count)

    def _is_taken(self) -> bool:
        """Whether the experiment no longer belongs to this driver."""
        if self._directory.is_gone():
            self._error = DirectoryGone(self._directory.path)
        elif self._lock.lost_to is not None:
            self._error = TakenOver(self._lock.lost_to)
        return isinstance(self._error, DirectoryGone | TakenOver)

    def _ask_for_mail(self) -> None:
        assert self._connection is not None
        self._mail = self._connection.messages(self._name, dict(self._recorded))
        self._recorded.clear()

    def _read_mail(self) -> None:
        """Read the desk's messages, after a short wait for them."""
        awaited: list[Future[Any]] = [self._mail, self._tune.ended]
        wait(awaited, timeout=POLL_S, return_when=FIRST_COMPLETED)
        if self._mail.done():
            for message in self._mail.result():
                self._read(message)
            self._bind()
            self._ask_for_mail()
        self._prometheus.update()

    def _read(self, message: Message) -> None:
        if self._on_message is not None:
            self._on_message(message)
        self.groups.on(message)
        match message:
            case messages.WorkerArrived():
                self._tune_may_start = True
            case messages.WorkerUnfit():
                self._error = error_of_unfit_worker(message.cause, self._directory.path)
                if self._trains and isinstance(self._error, ConfigError):
                    self._error = FoundInTraining(self._error.faults, self._error.source)
            case messages.GroupReady():
                self._timeline.ready(message.group, message.time)
            case messages.GroupRetired():
                if self.config.resources.reuse_workers:
                    self.display.retired(message.group, message.trial, message.reason)
            case messages.GroupEnded() | messages.ClientAdded():
                pass
            case messages.LeaseGranted():
                if self._is_lent:  # it is this experiment's for the time of the lease
                    self._timeline.starts(message.group, self._workers.slots.taken, message.time)
                gpu_type = message.gpu_type if self._workers.slots.gpu else ""
                self._timeline.granted(message.group, message.trial, message.time, gpu_type)
                self._granted.append(message)
            case messages.ReportReceived():
                self._record(message)
            case messages.TrialLeft():
                self._timeline.left(message.group, message.trial, message.time)
                if self._is_lent:
                    self._timeline.ends(message.group, message.time)
                self._left(message)
            case messages.CheckpointSaved():
                self._restarts.saved(message.trial, message.batches)
                self._retention.saved(message.trial, message.batches, message.checkpoint, message.value)
                if message.seconds is not None:
                    self._prometheus.saved(message.seconds)
            case messages.CheckpointDamaged():
                self._retention.damaged(message.trial, message.checkpoint, message.error)
            case messages.HandleStarted():
                self.counts.handles_started += 1
            case _:
                assert_never(message)

    def _bind(self) -> None:
        """Give the leases that were granted their parameters."""
        granted, self._granted = self._granted, []
        try:
            self._queue.bind(
                granted,
                revived=self._restarts.ended_before,
                send_every_s=max(SEND_EVERY_S, self.groups.count / REPORTS_PER_S),
            )
        except SpaceError as error:
            self._error = FoundInTraining(error.faults, "The search")

    def _record(self, received: ReportReceived) -> None:
        trial, rows = received.trial, received.rows
        self._trains = True
        if received.warning:
            self.display.say(f"warning: trial {trial}: {received.warning}")
        self._metrics.append(trial, rows)
        self._restarts.reached(trial, max((row["batches"] for row in rows), default=-1))
        self._observers.rows(trial, rows)
        self.display.rows(trial, rows)
        self._recorded[received.lease] += 1
        self.counts.reports += 1

    def _act(self, answer: Answer) -> None:
        """Carry out a decision of the search. Called in Tune's thread."""
        self.counts.decisions[answer.decision] += 1
        self._queue.act(answer)

    def _left(self, left: TrialLeft) -> None:
        """A trial has left its group: if it failed, it restarts, or its end is reported to the search."""
        if left.outcome not in ("errored", "diverged", "invalid_hp") or self.search.trials[left.trial].ended:
            return
        if left.fatal:
            self.display.failure(left.trial, left.error)
            field_path, _, fault = left.error.partition(": ")
            self._error = FoundInTraining([(field_path, fault)])
            return
        if (reason := self._restarts.end_of(left)) is not None:
            self._queue.end(left.trial, reason)
        else:
            self._queue.retry(left.trial)

    # ------------------------------------------------------------------ the end
    def _close(self, watch: Watch) -> None:
        """Let running trials save, then end Tune, the groups and the desk, unless Ray itself is gone."""
        watch.close()
        self.display.closing(self._interrupts.wanted)
        try:
            if self._connection is not None and not self._is_taken():
                with contextlib.suppress(ray.exceptions.RayError, DeskUnreachable):  # the desk may be gone
                    self._let_trials_save(watch)
        finally:  # also if it is interrupted again
            self._tune.stop()
            # Tune checks whether to stop only when a handle returns.
            self.desk.end_search.remote(self._name)
            deadline = time.monotonic() + TUNE_END_S
            while self._tune.started and time.monotonic() < deadline and watch.answers():
                if wait([self._tune.ended], timeout=POLL_S).done:
                    break
        self._retention.close()
        self._timeline.close()
        self._prometheus.update(at_once=True)
        if watch.answers():
            self._end_groups()
        if self._connection is not None:
            self._connection.close()

    def _let_trials_save(self, watch: Watch) -> None:
        self.desk.close.remote(self._name)
        deadline = time.monotonic() + STOP_GRACE_S
        quiet = self.desk.is_quiet.remote(self._name)
        while time.monotonic() < deadline and watch.answers():
            if ray.wait([quiet], timeout=POLL_S)[0]:
                if ray.get(quiet):
                    break
                quiet = self.desk.is_quiet.remote(self._name)
            self._read_mail()

    def _end_groups(self) -> None:
        """End the groups and the desk."""
        # On a shared cluster workers first release what they hold. Without a desk they would try that forever.
        self.groups.end(at_once=self.cluster.own or isinstance(self._error, DeskLost))
        if self._is_lent:
            self.desk.remove.remote(self._name)
        else:
            ray.kill(self.desk)

    def _wait_for_head(self, watch: Watch) -> None:
        """Wait until the head answers: a call to Ray, as in another run, would wait for it without a message."""
        if watch.answers():
            return
        self._head_is_silent()
        while not watch.answers():
            time.sleep(CHECK_S)
        self._end_groups()  # they were ours before, and have survived

    def _head_is_silent(self) -> None:
        self.display.say(
            "the head of the Ray cluster does not answer; if it is gone, resume with: dray experiment resume "
            f"{self._directory.path}"
        )
