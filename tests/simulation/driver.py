"""The process that drives an experiment: the real `RunCore`, in a shell that does what `dray.experiment.run.Run` does,
in the same order; and Tune's handle, which fetches its results."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from dray.config.custom import Custom
from dray.config.search import build_search
from dray.desk import messages
from dray.desk.connection import DeskUnreachable
from dray.desk.effects import Reply
from dray.desk.lease import Client
from dray.experiment import effects
from dray.experiment.core import ReadLogs, RunCore
from dray.experiment.driver import RUNNABLE
from dray.experiment.open_search import open_search
from dray.groups.effects import StartGroup
from dray.groups.lender import GroupKind, Lender, OnPool
from dray.groups.pool import GroupsPlan
from dray.groups.slots import Slots
from searchers import rows
from searchers.events import TrialResult
from tests.simulation.cluster import Cluster, Lending
from tests.simulation.experiment import Experiment
from tests.simulation.worker import Lease
from tests.simulation.world import Call, Connection, DiskJournal, Failed, Future, Killed, Process, Steps, proceed

STOP_GRACE_S, TUNE_END_S, CLOSE_S = 120.0, 60.0, 60.0
"""Observes."""


class Loop(Process):
    """A process with an event loop, like `dray.desk.loop.EventLoop`, and its callbacks.

    Attributes:
        fuse: number of effects after which the process is killed; -1: never.
    """

    settle: Callable[[], None]
    failed: Callable[[Exception], None]
    fuse = -1
    _is_due = False
    _posted_at = 0.0

    def post(self, call: Callable[..., Any], *args: Any) -> None:
        """Call this in the loop, after earlier calls."""
        world = self.world
        self._posted_at = max(self._posted_at, world.now + world.delay())
        world.when(self._posted_at, self.call, call, *args)

    def later(self, seconds: float, call: Callable[..., Any], *args: Any) -> None:
        self.world.at(seconds, self.call, call, *args)

    def call(self, call: Callable[..., Any], *args: Any) -> None:
        """Call this now."""
        if self.alive:
            self._try(call, *args)
            if not self._is_due:
                self._is_due = True
                self.world.at(0.01 * self.world.random.random(), self._settle)  # other calls may come first

    def _settle(self) -> None:
        self._is_due = False
        if self.alive:
            self._try(self.settle)

    def _try(self, call: Callable[..., Any], *args: Any) -> None:
        try:
            call(*args)
        except (OSError, DeskUnreachable) as error:
            self.failed(error)
        except Killed:
            self.end()

    def burn(self, effect: Any) -> None:
        """Count an effect that is about to be carried out."""
        if self.fuse >= 0:
            self.fuse -= 1
            if self.fuse < 0:
                raise Killed
        if self.world.lines is not None:
            self.world.note(f"   {self.name}: {effect}")

    def tick(self) -> None:
        self.call(self.look)

    def look(self) -> None:
        """Periodic work."""


class Core(RunCore):
    """A process that may be killed between any two effects."""

    process: DriverProcess

    def carry_out(self, effect: Any) -> None:
        self.process.burn(effect)
        if type(effect) is Reply and effect.call is not None and effect.call.method == "may_commit" and effect.value:  # type: ignore[attr-defined]
            self.process.experiment.facts.permits(effect.call.args[0])  # type: ignore[attr-defined]
        super().carry_out(effect)


class DriverProcess(Loop):
    """One run of an experiment.

    Args:
        own_cluster: whether the cluster belongs to the experiment.
        ended: called at the end of the process with the kind: "killed", "full", "lost", or that of its main thread.
    """

    core: Core | None = None
    """None until the experiment is open."""
    lending: Any
    """The shell of its groups, or a server's."""

    def __init__(
        self,
        experiment: Experiment,
        cluster: Cluster,
        ended: Callable[[DriverProcess, str], None],
        *,
        own_cluster: bool = False,
    ) -> None:
        experiment.runs += 1
        super().__init__(cluster.world, f"{experiment.name}-{experiment.runs}")
        self.experiment, self.cluster, self._ended, self._own_cluster = experiment, cluster, ended, own_cluster
        self._error: Exception | None = None
        self._has_failed = self._is_closing = self._interrupted = self._has_begun = False
        self.over, self._drained = Future(), Future()
        self._sending: list[int] = []  # alerts
        self._told: list[Mapping[str, Any]] = []  # records of alerts that were sent
        self._how = "killed"

    def end(self) -> None:
        if self.alive:
            super().end()
            self.experiment.facts.kills += self._how in ("killed", "full", "lost")
            if self._how == "killed":
                self.experiment.requests.lose_power()
            if self.core is not None:
                self.experiment.account.end(killed=self._how == "killed")
                self.tune.kill_handle()
                self.lending.lost()
                if self._how in ("done", "stopped") and self.world.random.random() < 0.3:
                    self._check_replay()
            extensions = self.experiment.extensions
            if self._how == "spent" and not (extensions and extensions[0][0][0] == "budget"):
                extensions.insert(0, self.experiment.account.extended())  # by the user
            self._ended(self, self._how)

    @property
    def lender(self) -> Any:
        return self._core.lender

    @property
    def _core(self) -> Core:
        assert self.core is not None
        return self.core

    def look(self) -> None:
        """Like `Run._tick`."""
        if self._has_begun:
            for request in self.experiment.requests.waiting():
                with contextlib.suppress(OSError):
                    self.driver.request(request, self.experiment.requests.check)
            self._core.effects += map(effects.Append, self._told)
            self._told = []
            self.driver.tick(self.experiment.account.usage(self.driver.limits.share), self.world.now)

    def interrupt(self) -> None:
        """Send a signal from the user."""
        self._interrupted = True
        self.over.resolve()

    # ------------------------------------------------------------------ as `Experiment.run`
    def start(self) -> None:
        """Open the experiment, and run it."""
        if self.alive:
            self._try(self._open)

    def _open(self) -> None:
        experiment, facts = self.experiment, self.experiment.facts
        facts.opened()
        if (other := experiment.process) is not None and other.alive:
            raise Failed(f"{self.name} begins, and {other.name} has not ended")
        experiment.process = self
        self._journal = DiskJournal(experiment.disk, facts.written)
        records: list[dict[str, Any]] = rows.strict(experiment.disk.data, experiment.name)
        for record in records[facts.count :]:  # a killed process wrote them without noticing
            facts.written(record)
        if len(records) != facts.count:
            raise Failed(f"{self.name}: the journal has lost records")
        self._opened = open_search(
            experiment.config,
            Custom(),
            experiment.extension,
            journal=self._journal,
            records=records,
            requests=experiment.requests,  # type: ignore[arg-type]
        )
        for alert in self._opened.alerts.pending.values():
            self._send(alert)
        if self._opened.search.done is not None:
            self._finish_sending()
            self._journal.flush()
            self._finish("done")
            return
        experiment.account.open()
        limits = self._opened.limits
        limits.spend(experiment.account.spending.usage)
        if limits.reason:
            if not limits.is_recorded:
                self._journal.append({"event": "ended", "reason": limits.reason})
            self._finish_sending()
            self._journal.flush()
            self._finish("spent")
            return
        searcher, rungs = self._opened.config.searcher, self._opened.search.method.rungs
        experiment.plan_to(searcher.length or 0, rungs, searcher.trial_count or experiment.setup.points or 1)
        self._run()

    # ------------------------------------------------------------------ as `Run`
    def _run(self) -> None:
        world, setup = self.world, self.experiment.setup
        core = self.core = Core(self.name, self._opened, write=self._write, perform=self._perform)
        core.process = self
        self.driver = core.driver
        self._cleaner = Cleaner(self)
        slots = Slots(per_trial=setup.ranks, gpu=False, cpus_per_slot=1, runtime_env={})
        kind = GroupKind(
            slots=slots,
            environment={},
            deterministic=False,
            collective_timeout_s=600,
            reuse_workers=setup.reuse_workers,
        )
        self._lend(core, kind)
        self.experiment.account.begin(lent=not isinstance(core.lender, Lender))
        self.post(self._begin, core, kind)
        self.tune = Tune(self)
        late = world.random.random() < 0.1
        world.at(world.random.uniform(0.0, 150.0 if late else 4.0), self.tune.start)
        proceed(self, self._main(core))

    def _begin(self, core: Core, kind: GroupKind) -> None:
        core.begin(kind, {})
        self._has_begun = True

    def _lend(self, core: Core, kind: GroupKind) -> None:
        max_slots, own = self.experiment.setup.max_slots, self._own_cluster
        core.lender = lender = Lender(
            self.cluster.view(),
            lambda: self.world.now,
            plan=lambda owner, kind: GroupsPlan(owner=owner, slots=kind.slots, max_slots=max_slots, own_cluster=own),
            emit=core.effects.append,
            counts=core.driver.counts,
        )
        ends = partial(self._timeline, "ends")
        self.lending = Lending(self, self.cluster, lender, end_s=0.0 if own else 30.0, ends=ends)

    def _main(self, core: Core) -> Steps:
        """The thread that called `Run.run`."""
        yield self.over
        if not self._has_failed:
            self.post(self._close)
            self.later(STOP_GRACE_S, self._has_not_drained)
            yield self._drained
        self.tune.is_stopping = True
        self.post(self.driver.end)
        self.later(0.0 if self._has_failed else TUNE_END_S, self.tune.ended.resolve)
        yield self.tune.ended
        self._cleaner.close()
        self.later(CLOSE_S, self._cleaner.ended.resolve)
        yield self._cleaner.ended
        self.post(self.lending.end)
        if self._has_failed:  # no more effects are carried out
            yield 5.0
            self.lending.end_at_once()
        yield self.lending.ended
        yield self.world.delay()
        self._finish_sending()
        self._try(self._journal.flush)
        if isinstance(self._error, OSError):
            self._finish("lost" if isinstance(self._error, DeskUnreachable) else "full")
        elif self._opened.search.done is not None:
            self._finish("done")
        elif self.driver.limits.reason:
            self._finish("spent")
        else:
            self._finish("stopped" if self._interrupted else f"failed: {self._error}")

    def _send(self, alert: Mapping[str, Any]) -> None:
        """Send an alert in a thread, which takes a while."""
        self._sending.append(alert["id"])
        self.world.at(self.world.random.uniform(0.0, 20.0), self._sent, alert["id"])

    def _sent(self, number: int) -> None:
        if self.alive and number in self._sending:
            self._sending.remove(number)
            self.experiment.facts.sent[number] += 1
            self._told.append({"event": "told", "id": number})

    def _finish_sending(self) -> None:
        for number in self._sending.copy():
            self._sent(number)
        for record in self._told:
            self._journal.append(record, wait=False)

    def _close(self) -> None:
        self.driver.close()
        self._is_closing = True

    def _finish(self, how: str) -> None:
        self._how = how
        if self.core is not None:
            self.experiment.account.note("closed")
        self.end()

    def _has_not_drained(self) -> None:
        if not self._drained.done:
            raise Failed(f"{self.name}: its trials have not left {STOP_GRACE_S:.0f} s after it was told to close")

    def take(self, call: Call) -> None:
        if call.method == "report" and call.args[2]:
            self.world.waiting = call.session.process
        self.call(self._core.take, call)

    def failed(self, error: Exception) -> None:
        if self.core is None:
            self._finish("full")
            return
        self._has_failed = True
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self.over.resolve()
        self._drained.resolve()

    def settle(self) -> None:
        if self.core is not None and not self._has_failed:
            self.core.settle()
            if self._is_closing and self.core.is_drained:
                self._drained.resolve()

    def _write(self, records: Sequence[effects.Append]) -> None:
        for each in records:
            self._journal.append(each.record, wait=False)
        if any(each.wait for each in records):
            self.burn(records)
            self._journal.flush()

    def _timeline(self, event: str, group: str, **fields: Any) -> None:
        """Record an event of a group, as `Run` does."""
        self.experiment.account.note(event, group=group, **fields)

    def _perform(self, effect: Any) -> None:
        is_lent, slots = not isinstance(self.lender, Lender), self.experiment.setup.ranks
        match effect:
            case OnPool(_, StartGroup() as start):
                self._timeline("starts", start.group, slots=start.slots.taken)
            case messages.WorkerArrived(group=group):
                self._timeline("arrived", group)
            case messages.LeaseGranted(group=group, trial=trial):
                if is_lent:
                    self._timeline("starts", group, slots=slots)
                self._timeline("granted", group, trial=trial)
            case messages.LeaseOver(group=group) if is_lent:
                self._timeline("ends", group)
        match effect:
            case effects.Bind():
                self._bind(effect)
            case effects.Send(alert):
                self._send(alert)
            case effects.EndRun():
                self.experiment.account.spent(self.driver.limits.share, own=not is_lent)
                self.over.resolve()
            case effects.Prune() | effects.Examine():
                self._cleaner.put(effect)
            case effects.Answered(request_id):
                self.experiment.requests.remove(request_id)
            case effects.Fail(error):
                self._fail(error)
            case messages.LeaseGranted(trial=trial, lease=lease):
                if isinstance(lender := self.lender, Lender):
                    check_leases(lender.desk.clients[self.name])
                self.experiment.facts.granted(trial, lease)
            case ReadLogs(left):
                logs_read = self._core.logs_read
                if left.dead or (left.failure is not None and left.failure.kind == "died"):
                    # Meanwhile, another trial may get a new group; members of a population must train in turn.
                    slowest = 0.01 if self.experiment.setup.is_population else 3.0
                    self.later(min(self.world.random.choice((0.01, 0.5, 3.0)), slowest), logs_read, left)
                else:
                    logs_read(left)
            case _:
                self.lending.perform(effect)

    def _bind(self, bind: effects.Bind) -> None:
        # A trial that was canceled meanwhile leaves as soon as it has begun.
        if (state := self.driver.search.trials[bind.trial].state) not in (*RUNNABLE, "CANCELED"):
            raise Failed(f"{self.name}: trial {bind.trial} is {state}, and begins")
        lease = self.world.keep(Lease(bind, self.experiment.runs, self.experiment))
        self.lender.send("bind", self.name, bind.lease, lease)

    def _check_replay(self) -> None:
        """Check that the journal's file restores the driver's search. (If that was killed, the next one replays it.)"""
        search = self.driver.search
        records = rows.strict(self.experiment.disk.data, self.name)
        replayed = build_search(self.experiment.config, lambda record: None, records=records)
        if repr(replayed.trials) != repr(search.trials) or replayed.done != search.done:  # NaN is not equal to itself
            raise Failed(f"{self.name}: by its journal its trials are {replayed.trials}, in place of {search.trials}")


def check_leases(client: Client) -> None:
    """Check that a trial has at most one open lease, not counting failed ones."""
    trials = Counter(lease.trial for lease in client.leases.values() if lease.state != "failed")
    if more := [trial for trial, leases in trials.items() if leases > 1]:
        raise Failed(f"{client.name}: trials {more} have several leases")


class Cleaner:
    """A thread that deletes checkpoints, like `dray.experiment.cleaner.Cleaner`."""

    def __init__(self, process: DriverProcess) -> None:
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
        if self._process.alive:
            self._is_busy = False
            job = self._jobs.popleft()
            (self._examine if isinstance(job, effects.Examine) else self._prune)(job)
            self._next()

    def _prune(self, job: effects.Prune) -> None:
        process, store = self._process, self._process.experiment.store
        deleted, missing, failed = [], [], store.is_away
        for each in () if failed else job.keep:
            if (kept := store.trials[each.trial].get(each.batches)) is None:
                missing.append(each)
            else:
                kept.is_forced = True
        for each in () if failed or missing else job.delete:
            if not self._retention.is_pruning(each, job):
                continue
            if process.world.random.random() < 0.02:  # the store goes away
                failed = True
                break
            store.delete(each.trial, each.batches)
            deleted.append(each)
        process.post(lambda: self._retention.pruned(job, deleted, missing, failed=failed))

    def _examine(self, job: effects.Examine) -> None:
        store, trial, known = self._process.experiment.store, job.trial, set(job.known)
        listed = store.trials[trial]
        found = [
            effects.Saved(trial=trial, batches=batches, checkpoint=each.id, value=each.metric)
            for batches, each in listed.items()
            if batches not in known and each.is_valid
        ]
        missing = sorted(known - listed.keys())
        answer = partial(self._retention.examined, job, found, (), missing, failed=store.is_away)
        self._process.post(answer)


class Tune:
    """Tune, in a thread of the driver's process, and its handle, a separate process."""

    def __init__(self, driver: DriverProcess) -> None:
        self._process, self._world = driver, driver.world
        self._handle: Process | None = None
        self.is_stopping = False
        self.ended = Future()
        self._started = 0

    def start(self) -> None:
        """Start the handle, or replace one that has died."""
        if not self._process.alive:
            return
        if self.is_stopping or (not self._started and self._process.over.done):
            self.ended.resolve()
            return
        self._started += 1
        self._handle = Process(self._world, f"{self._process.name}/tune-{self._started}")
        proceed(self._handle, self._fetch(self._handle, self._started))

    def _fetch(self, handle: Process, number: int) -> Steps:
        connection = Connection(handle, self._process)
        try:
            while (results := (yield connection.call("fetch", number))) is not None:
                yield self._world.delay() if self._world.random.random() < 0.95 else 5 * self._world.random.random()
                if self.is_stopping:
                    break
                self._process.post(self._decide, results)  # before the next request
                yield self._world.delay()
        except DeskUnreachable:
            pass
        handle.end()
        if self._process.alive:
            self.ended.resolve()
            self._process.over.resolve()

    def _decide(self, results: Sequence[TrialResult]) -> None:
        self._process.driver.decide(results)

    def kill_handle(self) -> None:
        """Kill the handle's process."""
        if self._handle is not None and self._handle.alive:
            self._handle.end()
            self._world.at(self._world.random.uniform(0.5, 5.0), self.start)
