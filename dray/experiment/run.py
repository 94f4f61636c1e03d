"""One run of an experiment on Ray, from its journal's state to the end of the search: the driver's process.

`dray.experiment.core.RunCore` makes all decisions in one thread: the driver's `EventLoop` passes messages of workers,
Tune's handle and the desk to it, and this shell carries out its effects. The thread that called `Run.run` waits.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dray.cluster.watch import Watch
from dray.config.notify import Watched
from dray.display.display import Display
from dray.errors import ConfigError, DirectoryGone, ExperimentError, TakenOver
from dray.experiment import effects
from dray.experiment.cleaner import CLOSE_S, Cleaner
from dray.experiment.core import ReadLogs, RunCore
from dray.experiment.driver import OpenSearch
from dray.experiment.interrupts import Interrupts
from dray.experiment.log_policies import forbidden, printed
from dray.experiment.notify import Notifier
from dray.experiment.prometheus import Prometheus
from dray.experiment.request_files import RequestFiles
from dray.experiment.tune_handle import results_of
from dray.experiment.workers import check_prices, prepare_workers
from dray.groups.borrowed import BorrowedGroups, GroupServer
from dray.groups.effects import LookAtCluster
from dray.groups.lender import Lender, OnPool, PoolClosed, PoolOpened
from dray.groups.lender_shell import LenderShell
from dray.groups.on_ray import OnRay
from dray.groups.pool import GroupsPlan
from dray.leases import messages
from dray.leases.effects import After, Say
from dray.leases.failure import LOG_TAIL, Failure, failure_printed
from dray.leases.messages import Message, TrialLeft
from dray.observers.observer import Observers
from dray.records.directory import ExperimentDirectory
from dray.records.driver_lock import DriverLock
from dray.records.metrics import MetricsLog
from dray.records.numbering import typed
from dray.records.spending import ALIVE_S, ALIVE_SHARE, spending_of
from dray.records.timeline import Timeline
from dray.rpc.calls import Call, Session
from dray.rpc.event_loop import EventLoop
from dray.rpc.wire import checked
from dray.worker.lease import SEND_EVERY_S, TrialLease
from dray.worker.log.tail import last_output, with_log_tail
from dray.worker.spec import ExperimentSpec
from searchers.events import Source
from searchers.journal import Journal
from searchers.ray_tune import TuneDriver

if TYPE_CHECKING:
    from dray.pytorch import PyTorchTrial


def with_last_lines(left: TrialLeft, logs: Path, *, can_read: bool = True) -> TrialLeft:
    """A death with the last lines of the log of a dead process: of several, the one that a GPU's error has ended, which
    becomes the failure, with its node if the GPU may be broken."""
    found = {rank: log for rank in left.dead if can_read and (log := logs / f"rank_{rank}.log").exists()}
    if not found:
        return replace(left, error=f"{left.error}; what it printed is in {logs}")
    was = left.failure or Failure(kind="died")
    nodes = dict(zip(left.dead, left.nodes, strict=False))
    for rank, log in found.items() if was.kind == "died" else ():
        if (failure := failure_printed(last_output(log), nodes.get(rank, ""), was.batches)) is not None:
            who = f"rank {rank}: " if len(left.dead) > 1 else ""
            error = f"{left.error}: {who}{failure.where}"
            return replace(left, error=with_log_tail(error, log), failure=failure)
    return replace(left, error=with_log_tail(left.error, next(iter(found.values()))))


POLL_S = 0.25
"""How often the driver checks signals and updates the display when nothing happens."""
REPORTS_PER_S = 1000
"""Most reports without an urgent reply, of all trials together: half of a driver's capacity on two cores
(`bench/scale.py`)."""
TUNE_END_S = 60.0
"""How long Tune may take to end. A thread that is inside Ray during Ray's shutdown may crash the process."""
STOP_GRACE_S = 120.0
"""How long trials may take to save when the driver is interrupted."""
CHECK_S = 1.0
"""How often the driver checks that the experiment's directory still exists."""
KEPT_SPECS = 8
"""How many variants of the code are kept packed."""
IN_TURN_S = 30.0
"""On a local cluster, Tune starts after the first group, or at the latest after this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The files and records that a run writes."""

    directory: ExperimentDirectory
    lock: DriverLock
    journal: Journal
    observers: Observers
    metrics: MetricsLog
    notifier: Notifier


@dataclass(frozen=True, slots=True, kw_only=True)
class Lent:
    """The resources of a server's process for its experiment.

    Attributes:
        server: lends worker groups.
        loop: an event loop that is listening.
        tune: a Tune driver whose handle gets its results from this process; it may have started.
        notify: what the server's own receivers of alerts want to know.
        alert: sends an alert to the server.
    """

    server: GroupServer
    loop: EventLoop
    tune: TuneDriver
    notify: Watched = field(default_factory=Watched)
    alert: Callable[[Mapping[str, Any]], None] = lambda alert: None


class Run:
    """One run: a `RunCore`, and the shell around it.

    Args:
        opened: the experiment's search.
        records: the experiment's files and records.
        trial: the class, if the config has no entrypoint.
        on_ray: the Ray cluster.
        interrupts: signals that ask the run to stop.
        lent: the resources of a server's process; None: the run has its own groups.
        on_message: called with each message of a trial or a worker group; for benchmarks and tests.

    Attributes:
        driver: the experiment's driver, which decides.
    """

    def __init__(
        self,
        *,
        opened: OpenSearch,
        records: Records,
        trial: type[PyTorchTrial] | None,
        on_ray: OnRay,
        display: Display,
        interrupts: Interrupts,
        lent: Lent | None = None,
        on_message: Callable[[Message], None] | None = None,
    ) -> None:
        directory, config = records.directory, opened.config
        self._config, self._records, self._display = config, records, display
        self._ray, self._cluster = on_ray, on_ray.cluster
        self._interrupts, self._on_message = interrupts, on_message
        self._error: BaseException | None = None
        self._has_failed = False
        """An event could not be recorded or carried out, so none after it may be."""
        self._is_over = False
        self._woken = threading.Event()
        # On a local cluster, Tune and the groups share few CPUs: Tune starts when the first group is importing torch.
        self._tune_may_start = not on_ray.cluster.own
        self._check_at = 0.0
        self._logs = ThreadPoolExecutor(1, thread_name_prefix="dray-logs")
        spending = spending_of(config, directory.metrics)
        self._timeline = Timeline(directory.metrics, lent=lent is not None, spending=spending)
        self._alive = 0.0, 0.0  # share of the budget, and time, when the timeline was last told
        self._requests = RequestFiles(directory)
        self._workers = prepare_workers(
            config,
            directory,
            on_ray,
            trial,
            opened.search.method.rungs,
            display.say,
        )
        # With workers elsewhere, each contains a copy of the code.
        self._for_code = functools.lru_cache(KEPT_SPECS)(functools.partial(self._workers.for_code, directory))
        self._name = self._workers.experiment.run
        self._core = RunCore(
            self._name,
            opened,
            write=self._write,
            perform=self._perform,
            resume=f"resume with: dray experiment resume {typed(directory.path)}",
        )
        self.driver = self._core.driver
        display.shares(self._workers.kind.slots.share)
        self._loop = EventLoop("dray-driver") if lent is None else lent.loop
        if lent is None:
            self._loop.listen(on_ray.host())
        self._prometheus = Prometheus(
            directory.path.name,
            counts=self.driver.counts,
            states=lambda: self.driver.search.states,
            busy_slots=lambda: self._timeline.busy_slots,
        )
        self._cleaner = Cleaner(self.driver.retention, store_of=directory.store, post=self._loop.post)
        self._lender_shell: LenderShell | None = None
        self._lender = self._core.lender = self._new_lender(None if lent is None else lent.server)
        if lent is None:
            source = functools.partial(results_of, self._loop.endpoint)
            self._tune = on_ray.tune(source, directory.ray / f"tune-{time.time_ns()}")
        else:
            self._tune = lent.tune
        self._tune.take = lambda results: self._loop.post(self.driver.decide, results)
        self._tune.ended.add_done_callback(lambda ended: self._woken.set())

    def _new_lender(self, server: GroupServer | None) -> Lender | BorrowedGroups:
        workers, core = self._workers, self._core
        if server is not None:
            hear = functools.partial(self._loop.post, core.hear)
            return BorrowedGroups(server, self._name, workers.kind, self._loop.endpoint, workers.share, hear)
        plan = GroupsPlan(
            max_slots=workers.max_slots,
            sizes=workers.sizes,
            own_cluster=self._cluster.own,
            share_done=self._display.share_done,
        )
        view, emit = self._ray.look(self._ray.limits()), core.effects.append
        lender = Lender(view, time.monotonic, plan=plan, emit=emit, counts=self.driver.counts)
        self._lender_shell = LenderShell(
            self._loop,
            lender,
            self._ray,
            self._display,
            experiment=workers.experiment,
            starts=self._timeline.starts,
            ends=self._timeline.ends,
        )
        return lender

    # ------------------------------------------------------------------ the thread of the caller
    def run(self) -> None:
        """Block until the search is done.

        Raises:
            KeyboardInterrupt: stopped by the named signal; running trials have saved a checkpoint.
            ExperimentError, ConfigError: the run can't continue.
        """
        with self._interrupts.held():
            watch = self._ray.watch(
                draining=functools.partial(self._loop.post, self._lender.nodes_drain), silent=self._ray_is_silent
            )
            try:
                self._loop.attach(self)
                self._loop.post(self._core.begin, self._workers.kind, self._workers.share)
                began = time.monotonic()
                while not (self._is_over or self._interrupts.wanted or self._tune.ended.done()):
                    self._woken.wait(POLL_S)
                    self._woken.clear()
                    if not self._tune.started and (self._tune_may_start or time.monotonic() - began > IN_TURN_S):
                        self._tune.start()
                    self._loop.post(self._tick)
            finally:
                self._close(watch)
        if self._error is not None:
            raise self._error
        if self._tune.error is not None:
            raise ExperimentError(f"the search failed: {self._tune.error}") from self._tune.error
        self._interrupts.check()
        if self.driver.search.done is None and not self.driver.limits.reason:
            resume = f"dray experiment resume {typed(self._records.directory.path)}"
            raise ExperimentError(f"Ray Tune ended before the search did; resume with: {resume}")

    def _close(self, watch: Watch) -> None:
        """Let running trials save, then end Tune and the groups, unless Ray itself is gone."""
        watch.close()
        self._loop.post(self._display.closing, self._interrupts.wanted)
        gone = isinstance(self._error, DirectoryGone | TakenOver)  # trials have nowhere to save
        try:
            if not (self._has_failed or gone):
                self._loop.post(self.driver.close)
                self._wait_while(lambda: not (self._core.is_drained or self._has_failed), STOP_GRACE_S, watch)
        finally:  # even if it is interrupted again
            self._tune.stop()
            self._loop.post(self.driver.end)
            self._wait_while(lambda: self._tune_runs and not self._has_failed, TUNE_END_S, watch)
            if self._has_failed:  # the handle gets no answer; it ends when its connection does
                self._loop.close()
                self._wait_while(lambda: self._tune_runs, TUNE_END_S, watch)
        # What is deleted may follow from a listing that is not there yet.
        if not gone:
            self._wait_while(lambda: self.driver.retention.unanswered > 0 and not self._has_failed, CLOSE_S, watch)
        self._cleaner.close()
        self._prometheus.update(at_once=True)
        if watch.answers(only_head=True):
            # On a shared cluster, workers release their resources first.
            if self._lender_shell is None:
                self._lender.end()
            else:
                self._lender_shell.end(at_once=self._cluster.own or self._has_failed or gone)
        self._loop.close()
        # Only now: until here groups may end, and trials may die.
        self._logs.shutdown()
        self._timeline.close()

    def _wait_while(self, condition: Callable[[], bool], at_most_s: float, watch: Watch) -> None:
        deadline = time.monotonic() + at_most_s
        while condition() and time.monotonic() < deadline and watch.answers():
            if self._tune.ended.done():
                time.sleep(POLL_S / 5)
            else:
                wait([self._tune.ended], timeout=POLL_S / 5)
            self._loop.post(self._tick)

    # ------------------------------------------------------------------ in the event loop
    def take(self, call: Call) -> None:
        """Handle a call from a worker or from Tune's handle."""
        if call.method == "spec":
            call.answer(pickle.dumps(checked(self._spec, *call.args)))
        else:
            self._core.take(call)

    def _spec(self, code: str | None = None) -> ExperimentSpec:
        return self._for_code(code)

    def lost(self, session: Session) -> None:
        """No-op for a worker or handle that has lost its connection for good: Ray reports its death."""

    def failed(self, error: BaseException) -> None:
        """Handle an error in recording or carrying out: the search may be ahead of its journal, so the run ends."""
        self._has_failed = True
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._end()

    def _end(self) -> None:
        self._is_over = True
        self._woken.set()

    def settle(self) -> None:
        """Carry out all decisions."""
        if not self._has_failed:
            self._core.settle()

    def _write(self, records: Sequence[effects.Append]) -> None:
        journal = self._records.journal
        stamped = [{**each.record, "time": time.time()} for each in records]
        if any(each.wait for each in records):
            with journal.batch():
                for record in stamped:
                    journal.append(record)
        else:
            for record in stamped:
                journal.append(record, wait=False)

    def _perform(self, effect: Any) -> None:
        match effect:
            case effects.Bind():
                self._bind(effect)
            case messages.ReportReceived(trial=trial, rows=rows):
                self._records.metrics.append(trial, rows)
                self._records.observers.wake()
                self._display.rows(trial, rows)
                self._notify(effect)
            case messages.CheckpointSaved(seconds=seconds):
                if seconds is not None:
                    self._prometheus.saved(seconds)
                self._notify(effect)
            case effects.Prune() | effects.Examine():
                self._cleaner.put(effect)
            case Say(line):
                self._display.say(line)
            case effects.ShowFailure():
                self._display.failure(effect.trial, effect.error, effect.ended, effect.kept)
            case effects.Send(alert):
                self._records.notifier.send(alert)
            case effects.Answered(request_id):
                self._requests.remove(request_id)
            case effects.EndRun():
                self._end()
            case effects.Fail(error):
                self._fail(error)
            case ReadLogs(left):
                self._read_logs(left)
            case After() | PoolOpened() | OnPool() | PoolClosed() | LookAtCluster():
                assert self._lender_shell is not None
                self._lender_shell.perform(effect)
            case _:
                self._heard(effect)

    def _heard(self, message: Message) -> None:
        """Show and record a message of the desk."""
        self._notify(message)
        match message:
            case messages.WorkerArrived():
                self._tune_may_start = True
                self._woken.set()
                self._timeline.arrived(message.group, message.time)
            case messages.GroupReady():
                self._timeline.ready(message.group, message.time)
            case messages.GroupRetired():
                if message.reason and self._config.resources.reuse_workers:
                    self._display.retired(message.group, message.trial, message.reason)
            case messages.LeaseGranted():
                if self._lender_shell is None:  # the group is this experiment's for the duration of the lease
                    self._timeline.starts(message.group, self._workers.kind.slots.taken, message.time)
                gpu_type = message.gpu_type if self._workers.kind.slots.gpu else ""
                slot_type = message.slot_type
                self._timeline.granted(
                    message.group, message.trial, message.time, gpu_type=gpu_type, slot_type=slot_type
                )
                try:
                    check_prices(self._config, [slot_type])
                except ConfigError as error:
                    self._fail(error)
            case messages.GroupFreed() | messages.LeaseOver(freed=False):
                self._timeline.left(message.group, message.trial, message.time)
                if self._lender_shell is None:
                    self._timeline.ends(message.group, message.time)

    def _notify(self, message: Message) -> None:
        if self._on_message is not None:
            self._on_message(message)

    def _read_logs(self, left: TrialLeft) -> None:
        """Complete a trial's failure from its logs, and pass it on."""
        if self._records.directory.is_gone():  # the cause of the failure
            self._fail(DirectoryGone(self._records.directory.path))
            return
        if left.fatal or not (self._is_death(left) or self._config.log_policies):
            self._core.logs_read(left)
            return

        def read() -> None:
            try:
                found = self._with_logs(left)
            except OSError:
                found = left
            self._loop.post(self._core.logs_read, found)

        self._logs.submit(read)

    @staticmethod
    def _is_death(left: TrialLeft) -> bool:
        """Whether the trial could not report its failure itself, and its worker has not done so."""
        is_death = left.failure is not None and left.failure.kind == "died" and LOG_TAIL not in left.error
        return bool(left.dead) or is_death

    def _with_logs(self, left: TrialLeft) -> TrialLeft:
        """A failure with the end of the log of a dead process, and the reason why the log policies forbid a restart."""
        directory, policies = self._records.directory, self._config.log_policies
        logs, why = directory.trial(left.trial) / "logs", ""
        if policies:
            why = forbidden(policies, printed(left.error, logs, directory.storage.child(f"trial_{left.trial}")))
        if self._is_death(left):
            # If machines share no disk, a local log may be from an earlier process of the rank.
            has_logs = self._cluster.local or directory.storage.is_local
            left = with_last_lines(left, logs, can_read=has_logs)
        return replace(left, no_restart=why)

    def _bind(self, bind: effects.Bind) -> None:
        directory = self._records.directory
        lease = TrialLease(
            number=bind.lease,
            client=self._name,
            trial_id=bind.trial,
            trial_seed=bind.seed,
            hparams=bind.hparams,
            trial_dir=directory.trial(bind.trial),
            store=directory.store(bind.trial),
            last_step=bind.last_step,
            was_completed=bind.was_completed,
            source=self._source(bind.source),
            is_changed=bind.is_changed,
            code=bind.code,
            send_every_s=max(SEND_EVERY_S, self._lender.count / REPORTS_PER_S),
        )
        self._lender.send("bind", self._name, bind.lease, pickle.dumps(lease))

    def _source(self, source: Source | None) -> str | None:
        """The id of a checkpoint that a trial begins from."""
        if source is None or source.batches is None:
            return None
        return self._records.directory.store(source.trial).id_of(source.batches)

    def _tick(self) -> None:
        """Periodic work, also while nothing happens."""
        for request in self._requests.waiting():
            with contextlib.suppress(OSError):  # the checkpoints' store can't be used now
                self.driver.request(request, self._requests.check)
        self._core.effects += map(effects.Append, self._records.notifier.told())
        self._apply_limits()
        self._records.metrics.pack()
        self._prometheus.update()
        self._display.update(self.driver.counts, self._lender.ready_count, self._lender.count)
        if time.monotonic() >= self._check_at:
            self._check_at = time.monotonic() + CHECK_S
            if self._records.directory.is_gone():
                self._fail(DirectoryGone(self._records.directory.path))
            elif self._records.lock.lost_to is not None:
                self._fail(TakenOver(self._records.lock.lost_to))

    def _apply_limits(self) -> None:
        limits, now = self.driver.limits, time.monotonic()
        self.driver.tick(self._timeline.spending.at(time.time()), now)
        share, at = self._alive
        if limits.usage and (limits.share - share >= ALIVE_SHARE or now - at >= ALIVE_S):
            self._alive = limits.share, now
            self._timeline.alive()
        self._display.budget(limits.usage, limits.share)

    @property
    def _tune_runs(self) -> bool:
        return self._tune.started and not self._tune.ended.done()

    def _ray_is_silent(self) -> None:
        resume = f"dray experiment resume {typed(self._records.directory.path)}"
        if self._cluster.own:  # nobody starts its processes again
            self._fail(ExperimentError(f"a process of Ray on this machine has died; resume with: {resume}"))
        else:
            self._display.say(f"the head of the Ray cluster does not answer; if it is gone, resume with: {resume}")
