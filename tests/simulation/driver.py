"""The process that drives an experiment: the real `ExperimentDriver`, in a shell that does what
`dray.experiment.run.Run` does, in the same order; and Tune's handle, which fetches its results."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from dray.config.custom import Custom
from dray.config.search import build_search
from dray.desk import messages
from dray.desk.effects import Reply, Say, Tell
from dray.desk.lease import Client
from dray.desk.messages import Message, TrialLeft
from dray.experiment import driver, effects
from dray.experiment.driver import ExperimentDriver
from dray.experiment.open_search import open_search
from dray.groups.lender import GroupKind
from dray.groups.pool import GroupsPlan
from dray.groups.slots import Slots
from searchers.events import TrialResult
from searchers.journal import Journal
from tests.simulation.cluster import Cluster, Lending
from tests.simulation.experiment import Experiment
from tests.simulation.worker import Lease
from tests.simulation.world import (
    Call,
    Connection,
    DiskJournal,
    Failed,
    Future,
    Killed,
    Process,
    Steps,
    Unreachable,
    World,
    proceed,
)

STOP_GRACE_S, TUNE_END_S, CLOSE_S = 120.0, 60.0, 60.0


class Loop(Process):
    """A process with an event loop: as `dray.desk.loop.EventLoop`, and what it calls."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self._is_due = False
        self._effects: list[Any] = []
        self.fuse = -1
        """The process is killed before it carries out the effect after so many; -1: it is not."""

    def post(self, call: Callable[..., Any], *args: Any) -> None:
        """Call this in the loop."""
        self.world.at(self.world.delay(), self.call, call, *args)

    def later(self, seconds: float, call: Callable[..., Any], *args: Any) -> None:
        self.world.at(seconds, self.call, call, *args)

    def call(self, call: Callable[..., Any], *args: Any) -> None:
        """Call this now."""
        if not self.alive:
            return
        try:
            call(*args)
        except (OSError, Unreachable) as error:
            self.failed(error)
        except Killed:
            self.end()
        if not self._is_due:
            self._is_due = True
            # Others may call before.
            self.world.at(0.01 * self.world.random.random(), self._settle)

    def _settle(self) -> None:
        if not self.alive:
            return
        self._is_due = False
        try:
            self.settle()
        except (OSError, Unreachable) as error:
            self.failed(error)
        except Killed:
            self.end()

    def burn(self) -> None:
        """An effect is about to be carried out."""
        if self.fuse >= 0:
            self.fuse -= 1
            if self.fuse < 0:
                raise Killed

    def settle(self) -> None:
        raise NotImplementedError

    def failed(self, error: Exception) -> None:
        raise NotImplementedError


class Observers:
    """Nobody observes."""

    def happened(self, record: object, trials: object) -> None:
        """Nothing follows."""


class DriverProcess(Loop):
    """One run of an experiment. `lending` is made by `_lend`: its own groups, or those of a server.

    Args:
        ended: called when the process has ended, with how: "killed", "full", or of its main thread.
    """

    def __init__(
        self, world: World, experiment: Experiment, cluster: Cluster, ended: Callable[[DriverProcess, str], None]
    ) -> None:
        experiment.runs += 1
        super().__init__(world, f"{experiment.name}-{experiment.runs}")
        self.experiment, self._cluster, self._ended = experiment, cluster, ended
        self.error: Exception | None = None
        self.has_failed = False
        self.over = Future()
        self._drained = Future()
        self.tune: Tune | None = None
        self.lending: Any = None
        self.driver: ExperimentDriver | None = None
        self.how = "killed"
        self.interrupted = self._is_closing = False
        self._pending_logs = 0

    def end(self) -> None:
        if self.alive:
            super().end()
            if self.tune is not None:
                self.tune.end()
            if self.lending is not None:
                self.lending.lost()
            if self.driver is not None and self.how in ("done", "stopped") and self.world.random.random() < 0.3:
                check_replay(self)
            self._ended(self, self.how)

    def interrupt(self) -> None:
        """The user sends a signal."""
        self.interrupted = True
        self.over.resolve()

    # ------------------------------------------------------------------ as `Experiment.run`
    def start(self) -> None:
        """Open the experiment, and run it."""
        if not self.alive:
            return
        try:
            if self._open():
                self._run()
            else:
                self.how = "done"
                self.end()
        except Killed:
            self.end()
        except OSError:
            self.how = "full"
            self.end()

    def _open(self) -> bool:
        """Open the search; returns whether anything is left to do."""
        experiment = self.experiment
        experiment.facts.opened()
        if (other := experiment.process) is not None and other.alive:
            raise Failed(f"{self.name} begins, and {other.name} has not ended")
        experiment.process = self
        self.journal = DiskJournal(experiment.disk, experiment.facts.written)
        records: list[dict[str, Any]] = Journal.parse(experiment.disk.data, where=experiment.name)
        for record in records[experiment.facts.count :]:  # a killed process has written them, and did not know it
            experiment.facts.written(record)
        if len(records) != experiment.facts.count:
            raise Failed(f"{self.name}: the journal has lost records")
        self.opened = open_search(
            experiment.config,
            Custom(),
            experiment.extension,
            journal=self.journal,
            records=records,
            observers=Observers(),  # type: ignore[arg-type]
        )
        if self.opened.search.done is not None:
            self.journal.flush()
            return False
        self.records = list(records)
        rungs = self.opened.search.method.rungs
        experiment.plan_to(self.opened.config.searcher.length or 0, rungs)
        return True

    # ------------------------------------------------------------------ as `Run`
    def _run(self) -> None:
        self.driver = ExperimentDriver(self.opened, self._effects.append)
        self.cleaner = Cleaner(self)
        self._lend()
        self.post(self._begin)
        self.tune = Tune(self)
        late = self.world.random.random() < 0.1
        self.world.at(self.world.random.uniform(0.0, 150.0 if late else 4.0), self.tune.start)
        proceed(self, self._main())

    def _lend(self) -> None:
        setup = self.experiment.setup

        def plan(owner: str, kind: GroupKind) -> GroupsPlan:
            return GroupsPlan(owner=owner, slots=kind.slots, max_slots=setup.max_slots, own_cluster=self.own_cluster)

        assert self.driver is not None
        self.lending = Lending(
            self,
            self._cluster,
            plan,
            self._effects.append,
            self.driver.counts,
            shares_cluster=False,
            end_s=0.0 if self.own_cluster else 30.0,
        )

    own_cluster = True

    @property
    def kind(self) -> GroupKind:
        """Of groups."""
        slots = Slots(per_trial=self.experiment.setup.ranks, gpu=False, cpus_per_slot=1, runtime_env={})
        return GroupKind(
            slots=slots,
            environment={},
            deterministic=False,
            collective_timeout_s=600,
            reuse_workers=self.experiment.setup.reuse_workers,
        )

    def _begin(self) -> None:
        assert self.driver is not None
        if self.lending.is_own:
            self.lending.on(self.lending.lender.add, self.name, self.kind, None, {})
        self.driver.begin(self.records)
        self.records.clear()

    def _main(self) -> Steps:
        """The thread that called `Run.run`."""
        assert self.driver is not None
        assert self.tune is not None
        yield self.over
        if not self.has_failed:
            self.post(self.driver.close)
            self.post(self._look_whether_drained)
            self.later(STOP_GRACE_S, self._has_not_drained)
            yield self._drained
        self.tune.is_stopping = True
        self.post(self.driver.end)
        self.later(0.0 if self.has_failed else TUNE_END_S, self.tune.ended.resolve)
        yield self.tune.ended
        self.cleaner.close()
        self.later(CLOSE_S, self.cleaner.ended.resolve)
        yield self.cleaner.ended
        self.post(self.lending.end)
        if self.has_failed:  # nothing is carried out any more
            yield 5.0
            self.lending.end_at_once()
        yield self.lending.ended
        yield self.world.delay()
        try:
            self.journal.flush()
        except OSError as error:
            self.failed(error)
        except Killed:
            self.end()
        if isinstance(self.error, OSError | Unreachable):
            self.how = "full" if isinstance(self.error, OSError) else "lost"
        elif self.opened.search.done is not None:
            self.how = "done"
        else:
            self.how = "stopped" if self.interrupted else f"failed: {self.error}"
        self.end()

    def _has_not_drained(self) -> None:
        if not self._drained.done:
            raise Failed(f"{self.name}: its trials have not left {STOP_GRACE_S:.0f} s after it was told to close")

    def _look_whether_drained(self) -> None:
        self._is_closing = True

    def tick(self) -> None:
        self.call(lambda: None)

    def take(self, call: Call) -> None:
        self.call(self._take, call)

    def _take(self, call: Call) -> None:
        if call.method in driver.CALLS:
            if call.method == "report" and call.args[2]:
                self.world.waiting = call.session.process
            getattr(self.driver, call.method)(call, *call.args)
        elif call.method == "spec":
            call.answer(b"spec")
        else:
            self.lending.take(call)

    def failed(self, error: Exception) -> None:
        self.has_failed = True
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.error = self.error or error
        self.over.resolve()
        self._drained.resolve()

    def settle(self) -> None:
        if self.driver is None:
            return
        if not self.has_failed:
            self.lending.step()
        while self._effects and not self.has_failed:
            decided = self._effects.copy()
            self._effects.clear()
            self._write([each for each in decided if isinstance(each, effects.Append)])
            for each in decided:
                self.burn()
                if self.world.lines is not None:
                    self.world.note(f"   {self.name}: {each}")
                self._perform(each)
        if self._is_closing and self.driver.is_drained and not self._pending_logs:
            self._drained.resolve()

    def _write(self, records: list[effects.Append]) -> None:
        for each in records:
            self.journal.append(each.record, wait=False)
        if any(each.wait for each in records):
            self.burn()
            self.journal.flush()

    def _perform(self, effect: Any) -> None:
        match effect:
            case effects.Append():
                pass
            case Reply(Call() as call, value):
                if call.method == "may_commit":
                    self.experiment.facts.permits(call.args[0], value)
                call.answer(value)
            case Reply():
                pass
            case effects.ToDesk(method, args):
                self.lending.send(method, self.name, *args)
            case effects.Bind():
                self._bind(effect)
            case messages.ReportReceived(trial=trial, rows=rows):
                self.experiment.rows.update((trial, row["batches"], row["kind"]) for row in rows)
            case messages.CheckpointSaved() | Say() | effects.ShowFailure():
                pass
            case effects.Prune() | effects.Examine():
                self.cleaner.put(effect)
            case effects.Fail(error):
                self._fail(error)
            case Tell(client, message):
                if client == self.name:  # the groups' owner only watches
                    self.hear(message)
            case _:
                self.lending.perform(effect)

    def hear(self, message: Message) -> None:
        """The desk has sent this message."""
        assert self.driver is not None
        match message:
            case messages.LeaseGranted(trial=trial, lease=lease):
                if self.lending.is_own:
                    check_leases(self.lending.lender.desk.clients[self.name])
                self.experiment.facts.granted(trial, lease)
                self.driver.on(message)
            case messages.TrialLeft():
                self._left(message)
            case messages.LeaseOver() | messages.WorkerUnfit():
                self.driver.on(message)

    def _left(self, left: TrialLeft) -> None:
        assert self.driver is not None
        if left.outcome == "errored" and (left.dead or (left.failure is not None and left.failure.kind == "died")):
            # Its logs are read first, in a thread.
            self._expect(1)
            self.later(self.world.random.choice((0.01, 0.5, 3.0)), self._read, left)
        else:
            self.driver.on(left)

    def _read(self, left: TrialLeft) -> None:
        assert self.driver is not None
        self._expect(-1)
        self.driver.on(left)

    def _expect(self, more: int) -> None:
        self._pending_logs += more
        self.lending.send("expect", self.name, self._pending_logs)

    def _bind(self, bind: effects.Bind) -> None:
        assert self.driver is not None
        if (state := self.driver.search.trials[bind.trial].state) not in driver.RUNNABLE:
            raise Failed(f"{self.name}: trial {bind.trial} is {state}, and begins")
        lease = Lease(
            number=bind.lease,
            run=self.experiment.runs,
            experiment=self.experiment,
            trial=bind.trial,
            hparams=dict(bind.hparams),
            last_step=bind.last_step,
            was_completed=bind.was_completed,
        )
        self.lending.send("bind", self.name, bind.lease, self.world.keep(lease))


def check_leases(client: Client) -> None:
    """A trial has at most one lease that is not over, but those that have failed."""
    trials = Counter(lease.trial for lease in client.leases.values() if lease.state != "failed")
    if more := [trial for trial, leases in trials.items() if leases > 1]:
        raise Failed(f"{client.name}: trials {more} have several leases")


def check_replay(process: DriverProcess) -> None:
    """The search that the journal's file gives is the driver's. (If that was killed, the next one replays it.)"""
    assert process.driver is not None
    search = process.driver.search
    records = Journal.parse(process.experiment.disk.data, where=process.name)
    replayed = build_search(process.experiment.config, lambda record: None, records=records)
    if repr(replayed.trials) != repr(search.trials) or replayed.done != search.done:  # a NaN is not itself
        raise Failed(f"{process.name}: by its journal its trials are {replayed.trials}, in place of {search.trials}")


class Cleaner:
    """As `dray.experiment.cleaner.Cleaner`: a thread that deletes checkpoints."""

    def __init__(self, process: DriverProcess) -> None:
        assert process.driver is not None
        self._process, self._retention = process, process.driver.retention
        self._jobs: deque[Any] = deque()
        self._is_busy = self._is_closing = False
        self.ended = Future()

    def put(self, job: effects.Prune | effects.Examine) -> None:
        self._jobs.append(job)
        self._next()

    def close(self) -> None:
        self._is_closing = True
        self._next()

    def _next(self) -> None:
        if self._is_busy:
            return
        if self._jobs:
            self._is_busy = True
            self._process.world.at(self._process.world.random.choice((0.01, 0.2, 2.0)), self._do)
        elif self._is_closing:
            self.ended.resolve()

    def _do(self) -> None:
        process = self._process
        if not process.alive:
            return
        self._is_busy = False
        job, store = self._jobs.popleft(), process.experiment.store
        if isinstance(job, effects.Examine):
            self._examine(job)
        else:
            deleted, missing, failed = [], [], store.is_away
            if not failed:
                for each in job.keep:
                    kept = store.trials.get(each.trial, {}).get(each.batches)
                    if kept is None:
                        missing.append(each)
                    else:
                        kept.is_forced = True
                for each in () if missing else filter(self._retention.is_pruning, job.delete):
                    if process.world.random.random() < 0.02:  # the store goes away
                        failed = True
                        break
                    store.delete(each.trial, each.batches)
                    deleted.append(each)
            process.post(lambda: self._retention.pruned(job, deleted, missing, failed=failed))
        self._next()

    def _examine(self, job: effects.Examine) -> None:
        store, trial = self._process.experiment.store, job.trial
        found: list[effects.Saved] = []
        missing: Sequence[int] = ()
        if not store.is_away:
            listed = store.trials.get(trial, {})
            missing = sorted(set(job.known) - listed.keys())
            found = [
                effects.Saved(trial=trial, batches=batches, checkpoint=each.id, value=each.metric)
                for batches, each in listed.items()
                if batches not in job.known and each.is_valid
            ]
        self._process.post(lambda: self._retention.examined(job, found, (), missing))


class Tune:
    """Tune, in a thread of the driver's process, and its handle, a process of its own."""

    def __init__(self, driver: DriverProcess) -> None:
        self._driver, self._world = driver, driver.world
        self.handle: Process | None = None
        self.is_stopping = False
        self.ended = Future()
        self._started = 0

    def start(self) -> None:
        """Start the handle, or another one in place of one that has died."""
        if not self._driver.alive:
            return
        if self.is_stopping:
            self.ended.resolve()
            return
        self._started += 1
        self.handle = Process(self._world, f"{self._driver.name}/tune-{self._started}")
        proceed(self.handle, self._fetch(self.handle, self._started))

    def _fetch(self, handle: Process, number: int) -> Steps:
        connection = Connection(handle, self._driver)
        try:
            while (results := (yield connection.call("fetch", number))) is not None:
                yield self._world.delay() if self._world.random.random() < 0.95 else 5 * self._world.random.random()
                if self.is_stopping:
                    break
                # Before it is asked for more.
                self._driver.post(self._decide, results)
                yield self._world.delay()
        except Unreachable:
            pass
        handle.end()
        if self._driver.alive:
            self.ended.resolve()
            self._driver.over.resolve()

    def _decide(self, results: Sequence[TrialResult]) -> None:
        assert self._driver.driver is not None
        self._driver.driver.decide(results)

    def kill_handle(self) -> None:
        """The handle's process dies."""
        if self.handle is not None and self.handle.alive:
            self.handle.end()
            self._world.at(self._world.random.uniform(0.5, 5.0), self.start)

    def end(self) -> None:
        """The driver's process is gone."""
        if self.handle is not None:
            self.handle.end()
