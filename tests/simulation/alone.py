"""The cores alone, at many schedules a second: one experiment's search, driver, desk and groups decide as they ship.

Around them are stand-ins for threads, connections, files and Ray: messages come late and in order, decisions reach the
journal, and ranks, nodes, drivers and Tune's handle die. The shells that ship are in `tests.simulation.whole`.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from dray.cluster.view import ClusterView, RayNode
from dray.config.custom import Custom
from dray.experiment import effects
from dray.experiment.core import ReadLogs, RunCore
from dray.experiment.open_search import open_search
from dray.groups.effects import ClusterSeen, EndGroup, GroupPlaced, LookAtCluster, StartGroup
from dray.groups.lender import GroupKind, Lender, OnPool, PoolClosed
from dray.groups.pool import MAX_FAILED_STARTS, GroupsPlan
from dray.groups.slots import Slots
from dray.leases import messages
from dray.leases.effects import After
from dray.leases.failure import Failure
from dray.leases.messages import Departure, DeskReport, GroupEnded
from dray.training.loop import Outcome, Publish, Train, Validate, drive
from dray.training.plan import Plan, Schedule
from dray.training.progress import Progress
from searchers.errors import IllegalEvent
from searchers.events import Requested, Source
from tests.simulation.facts import Facts
from tests.simulation.kernel import Failed
from tests.simulation.ray import Node
from tests.simulation.schedule import Fault
from tests.simulation.schedule import Schedule as Drawn

Steps = Generator[Any, Any, Any]
GRACE_S = 120.0
"""How long running trials may take to save and leave."""
MAX_STEPS = 100_000
LOST = Departure(outcome="interrupted")
COLLECTIVE = Departure(outcome="errored", error="a collective failed", failure=Failure(kind="collective"))


class Killed(BaseException):
    """The driver dies between two effects."""


class TrialFailed(Exception):
    """With the trial's departure."""


class Answer:
    """An answer that a process waits for."""

    def __init__(self) -> None:
        self.is_known = False
        self.value: Any = None
        self.waiting: list[Callable[[], None]] = []

    def resolve(self, value: Any = None) -> None:
        if not self.is_known:
            self.is_known, self.value = True, value
            for call in self.waiting:
                call()


class Process:
    """Runs steps until they end, or it is killed; they wait by yielding seconds or an `Answer`."""

    def __init__(self, world: Alone) -> None:
        self.world, self.is_alive = world, True

    def go(self, steps: Steps, known: Answer | None = None) -> None:
        while self.is_alive:
            try:
                waits = steps.send(None if known is None else known.value)
            except StopIteration:
                return
            if not isinstance(waits, Answer):
                self.world.at(waits, self.go, steps)
                return
            known = waits
            if not waits.is_known:
                waits.waiting.append(partial(self.go, steps, waits))
                return


class Call:
    """A call that has arrived, like `dray.rpc.connection.Call`."""

    session = None

    def __init__(self, line: Line, answer: Answer, method: str, args: tuple[Any, ...]) -> None:
        self._line, self._answer, self.method, self.args = line, answer, method, args

    def answer(self, value: Any = None) -> None:
        self._line.send(self._answer.resolve, value)

    def fail(self, text: str) -> None:
        raise Failed(text)


class Line:
    """A session between a process and a driver; what is sent arrives late and in order, while both live."""

    def __init__(self, process: Process, driver: Driver) -> None:
        self._process, self._driver, self._arrives = process, driver, 0.0

    def send(self, call: Callable[..., object], *args: Any) -> None:
        world = self._process.world
        self._arrives = max(self._arrives, world.now + world.delay())
        world.at(self._arrives - world.now, lambda: self._process.is_alive and call(*args))

    def call(self, method: str, *args: Any) -> Answer:
        answer = Answer()
        self.send(self._driver.post_now, self._driver.take, Call(self, answer, method, args))
        return answer


@dataclass(kw_only=True)
class Checkpoint:
    """A checkpoint with the report that it carries."""

    at: Progress
    report: DeskReport
    decides: bool
    metric: float | None


class Alone:
    """A cluster, an experiment and its user, and what must hold of them."""

    def __init__(self, drawn: Drawn, root: Path, *, lines: list[str] | None = None, **_: Any) -> None:
        self.random, self.drawn, self.lines = Random(f"alone:{drawn.seed}"), drawn, lines
        self.now, self.steps, self.switches, self.digest, self._pushed = 0.0, 0, 0, 0, 0
        self.kernel = self
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self.setup = drawn.setups[0]
        self.config = self.setup.config()
        self.ranks = self.random.choice((1, 1, 2)) if min(drawn.nodes) > 1 else 1
        self.facts = Facts(root, self.setup, self.config, self.fail, lambda: self.now)
        self.nodes = [Node(f"node-{number}", slots) for number, slots in enumerate(drawn.nodes)]
        self.waiting: list[Group] = []
        self.groups: dict[Group, None] = {}
        self.journal: list[dict[str, Any]] = []
        self.checkpoints: dict[int, dict[int, Checkpoint]] = defaultdict(dict)
        self.requests: dict[str, Requested] = {}
        self.runs, self.is_over = 0, False
        self.driver: Driver | None = None
        self._extensions, self.extension = [dict(each) for each in self.setup.extensions], dict[str, Any]()
        self.left = {each: each.times for each in self.setup.errors}
        self._late_requests = drawn.late_requests

    # ------------------------------------------------------------------ time
    def at(self, delay: float, call: Callable[..., object], *args: Any) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (self.now + delay, self._pushed, call, args))

    def delay(self) -> float:
        chance = self.random.random()
        return 0.0005 + 0.004 * chance if chance < 0.97 else self.drawn.slow_s * self.random.random()

    def note(self, line: str) -> None:
        if self.lines is not None:
            self.lines.append(f"{self.steps:6d} {self.now:10.3f}  {line}")

    def fail(self, why: str) -> None:
        raise Failed(why)

    def clean(self) -> None:
        """No-op: it has no files."""

    def run(self) -> None:
        """Run the schedule. Raises `Failed`, or an exception of dray's."""
        trials = dict(self.setup.searcher).get("max_trials", 6)
        length_s = self.setup.batch_s * dict(self.setup.searcher)["max_length"] * trials / sum(self.drawn.nodes)
        for fault in self.drawn.faults:
            self.at(fault.step / (50 + 35 * trials) * (length_s + 4 * trials + 10), self._happen, fault)
        self._start()
        while self._heap and not self.is_over:
            self.now, _, call, args = heapq.heappop(self._heap)
            self.steps += 1
            call(*args)
            if self.steps > MAX_STEPS:
                self.fail("it does not end")
        self.digest = hash((self.steps, self.now))
        if not self.is_over:
            self.fail("nothing is left to do")

    # ------------------------------------------------------------------ the user
    def _start(self) -> None:
        self.runs += 1
        self.driver = Driver(self)
        self.driver.open()

    def ended(self, how: str) -> None:
        """The driver's process has ended."""
        self.note(f"driver {self.runs} has ended: {how}")
        self.facts.kills += how == "killed"
        if how == "done" and not self.requests:
            if self._late_requests:
                self._late_requests -= 1
                self._request(self.random.random())
            elif self._extensions:
                self.extension |= self._extensions[0]
                self.facts.extended(self._extensions.pop(0))
            else:
                self.at(60.0, self._check_end)
                return
        self.at(self.random.uniform(0.1, 20.0), self._start)

    def _check_end(self) -> None:
        if not self.facts.given_up:
            is_exact = not (self.drawn.faults or self.facts.requests or self.setup.extensions)
            self.facts.check_checkpoints(is_exact=is_exact)
        self.facts.check_end(self.requests, is_extended=bool(self.setup.extensions))
        if any(node.is_alive and node.free != node.slots for node in self.nodes):
            self.fail("somebody has not freed its slots")
        self.is_over = True

    def _happen(self, fault: Fault) -> None:
        self.note(f"-- {fault}")
        driver, which = self.driver, fault.which
        groups = [each for each in self.groups if each.processes]
        group = groups[int(which * len(groups))] if groups else None
        nodes = [each for each in self.nodes if each.is_alive]
        node = nodes[int(which * len(nodes))] if nodes else None
        match fault.kind:
            case "rank" | "cut" | "dead" if group:
                group.kill(int(which * 7) % self.ranks)
            case "group" if group:
                for rank in range(self.ranks):
                    group.kill(rank)
            case "node" if node:
                self._kill(node)
            case "drain" | "clock" if node and not node.is_draining:
                node.is_draining = True
                self.at(1.0, lambda: self.driver and self.driver.drain(node.name))
                self.at(30.0, self._kill, node)
            case "driver" | "power" | "full" if driver:
                driver.kill()
            case "torn" if driver:
                driver.fuse = int(which * 40)
            case "handle" if driver:
                driver.start_handle()
            case "stop" if driver:
                driver.over.resolve()
            case "request" if self.facts.created and not self.is_over:
                self._request(which)

    def _kill(self, node: Node) -> None:
        if not node.is_alive:
            return
        node.is_alive = False
        for group in [*self.groups]:
            for rank, at in enumerate(group.nodes):
                if at is node:
                    group.kill(rank)
        self.at(self.random.uniform(1.0, 60.0), self._boot, node.slots)

    def _boot(self, slots: int) -> None:
        self.nodes.append(Node(f"node-{len(self.nodes)}", slots))
        self.place()

    def _request(self, which: float) -> None:
        """Let a person request the end of a trial, a fork, or a new trial."""
        random, facts, number = Random(f"request:{which}"), self.facts, f"request-{len(self.facts.requests):02d}"
        there = [(trial, batches) for trial, each in self.checkpoints.items() for batches in each]
        hparams = {"lr": 10 ** random.uniform(-4, -1)} if random.random() < 0.7 else None
        kind = random.choice(("stop", "fork", "fork", "add"))
        if kind == "stop":
            request = Requested(id=number, trial=random.choice(facts.live) if facts.live else 0)
        elif kind == "fork" and there:
            trial, batches = random.choice(there)
            request = Requested(id=number, source=Source(trial=trial, step=batches, batches=batches), hparams=hparams)
        else:
            request = Requested(id=number, hparams=hparams, code=random.choice((None, None, "a", "b")))
        self.requests[number] = facts.requests[number] = request

    # ------------------------------------------------------------------ the cluster
    def view(self) -> ClusterView:
        alive = [each for each in self.nodes if each.is_alive]
        return ClusterView(
            nodes=tuple(RayNode(each.name, each.name, True, {"CPU": float(each.slots)}, {}) for each in alive),
            draining=frozenset(each.name for each in alive if each.is_draining),
            free={"CPU": float(sum(each.free for each in alive))},
        )

    def place(self) -> None:
        """Give free slots to waiting groups."""
        for group in [*self.waiting]:
            usable = (each for each in self.nodes if each.is_alive and not each.is_draining)
            free = [each for each in usable for _ in range(each.free)][: self.ranks]
            if len(free) == self.ranks:
                self.waiting.remove(group)
                group.placed(free)


class Group:
    """A worker group: its processes, from the request for slots to its end."""

    def __init__(self, driver: Driver, owner: str, start: StartGroup) -> None:
        self.driver, self.world, self.owner, self.spec = driver, driver.world, owner, start
        self.nodes: list[Node] = []
        self.processes: dict[int, Process] = {}
        self.signals: dict[int, Answer] = defaultdict(Answer)  # what rank 0 tells the others at a lease's end
        self.is_broken = Answer()
        self._is_over = self._has_reported = False
        self.world.groups[self] = None
        self.world.waiting.append(self)
        self.world.at(self.world.delay(), self.world.place)

    def _report(self, event: Any) -> None:
        self.driver.post(self.driver.lender.on, self.owner, event)

    def placed(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        for node in nodes:
            node.free -= 1
        self._report(GroupPlaced(group=self.spec.group, start=self.spec.start))
        self.world.at(self.world.random.uniform(0.5, 3.0), self._start)

    def _start(self) -> None:
        if not self._is_over:
            for rank, node in enumerate(self.nodes):
                self.processes[rank] = process = Rank(self, rank)
                if node.is_alive:
                    process.go(process.main())
                else:
                    self.kill(rank)

    def kill(self, rank: int) -> None:
        if (process := self.processes.get(rank)) is not None and process.is_alive:
            process.is_alive = False
            self.driver.kills += 1
            self.world.at(self.world.random.uniform(0.1, 3.0), self.gone, {rank: ""})
            self.world.at(self.world.delay(), self.is_broken.resolve)

    def gone(self, dead: Mapping[int, str]) -> None:
        """Ray notices that processes have ended."""
        if not self._has_reported:
            self._has_reported = True
            self._report(GroupEnded(group=self.spec.group, start=self.spec.start, dead=dead))

    def end(self) -> None:
        """End its processes, and free its slots."""
        if not self._is_over:
            self._is_over = True
            self.world.groups.pop(self)
            if self in self.world.waiting:
                self.world.waiting.remove(self)
            for process in self.processes.values():
                process.is_alive = False
            for node in self.nodes:
                node.free += 1
            self.world.at(self.world.delay(), self.world.place)
            self.gone({})


class Rank(Process):
    """A process of a group. Rank 0 trains by the real loop; the others follow it."""

    def __init__(self, group: Group, rank: int) -> None:
        super().__init__(group.world)
        self.group, self.rank, self.line = group, rank, Line(self, group.driver)
        self.written = Answer()  # the last checkpoint of the trial before
        self.written.resolve()

    def main(self) -> Steps:
        group, number = self.group, 0
        self.line.call(
            "arrived", group.owner, group.spec.group, group.spec.start, group.nodes[self.rank].name, "", "CPU"
        )
        asked = partial(self.line.call, "next_lease", group.owner, group.spec.group, group.spec.start, self.rank)
        while (granted := (yield asked(self.world.ranks, number, group.driver.shape))) is not None:
            bind, run = group.driver.bound[int(granted[2])]
            if bind.lease <= number:
                self.world.fail(f"lease {bind.lease} comes after lease {number}")
            number = bind.lease
            if self.rank:
                departure = yield group.signals[number]
                departure = departure or COLLECTIVE
            else:
                self.line.call("begun", number)
                trial = Trial(self, bind, run)
                departure = yield from trial.run()
                told = None if departure.outcome == "errored" else departure
                for _ in range(1, self.world.ranks):
                    self.world.at(self.world.delay(), group.signals[number].resolve, told)
            self.line.call("leave", number, self.rank, departure)
            if not self.rank and departure.outcome == "writing":
                self.written = Answer()
                self.go(self._complete(trial, self.written))
        self.world.at(0.5, group.gone, {})

    def _complete(self, trial: Trial, written: Answer) -> Steps:
        """Write the last checkpoint of a trial whose group may train another one by now."""
        departure = yield from trial.complete()
        self.line.call("leave", trial.lease, 0, departure)
        written.resolve()


class Trial:
    """A trial in one lease, like `RayHost` and `Reports`."""

    def __init__(self, rank: Rank, bind: effects.Bind, run: str) -> None:
        self._rank, self._bind, self._run, self.world = rank, bind, run, rank.world
        self._trained, self._value, self._why, self._unsaved = 0, math.nan, "continue", list[Any]()
        self.lease = bind.lease
        self._left: Publish | None = None  # it has left its group, and this is still to be done
        self._has_value, self._stop = False, rank.line.call("stop_wanted", bind.lease)

    def run(self) -> Steps:
        try:
            return (yield from self._train_all())
        except TrialFailed as failed:
            return failed.args[0]

    def complete(self) -> Steps:
        """Write and report what was left; the steps return the departure."""
        command, self._left = self._left, None
        assert command is not None
        yield self.world.random.uniform(0.1, 5.0)
        try:
            yield from self._publish(command)
        except TrialFailed as failed:
            return failed.args[0]
        departure = self._departure()
        goes_on = departure.outcome == "completed" and not command.final
        return replace(departure, outcome="yielded") if goes_on else departure

    def _train_all(self) -> Steps:
        world, bind, call = self.world, self._bind, self._rank.line.call
        mine, at, found, source = world.checkpoints[bind.trial], Progress(), None, None
        if mine:
            found = mine[max(mine)]
            at = found.at
        elif bind.source is not None and (there := world.checkpoints[bind.source.trial].get(bind.source.batches or 0)):
            at, source = there.at, (bind.source.trial, bind.source.batches or 0)
        self._trained = at.batches
        world.facts.begins(self._run, bind.code, bind.trial, at.batches, source)
        if world.setup.is_invalid(bind.hparams):
            return Departure(outcome="invalid_hp", error="these hyperparameters")
        if found is not None:
            call("saved", bind.trial, str(at.batches), at.batches, found.metric, None)
            step = found.report.step
            is_new = step is not None and (bind.last_step is None or step > bind.last_step)
            final = found.report.final and (is_new or not bind.was_completed)
            yield from self._send(replace(found.report, final=final), wait=(found.decides and is_new) or final)
            if final or self._why != "continue":
                return self._departure()
        length = world.driver.length if world.driver is not None else 0
        plan = Plan(
            length=int(length),
            rungs=tuple(sorted({int(each) for each in self._rank.group.driver.rungs})),
            policy=world.setup.policy,
            report=None if world.setup.report is None else Schedule(period=world.setup.report),
            validate=None if world.setup.validate is None else Schedule(period=world.setup.validate),
            checkpoint=None if world.setup.checkpoint is None else Schedule(period=world.setup.checkpoint),
        )
        steps, outcome = drive(plan, at), None
        while True:
            try:
                command = next(steps) if outcome is None else steps.send(outcome)
            except StopIteration:
                return self._departure()
            match command:
                case Train():
                    outcome = yield from self._train(command.until)
                case Validate():
                    yield world.setup.batch_s
                    self._has_value, self._value = True, world.setup.loss(bind.hparams, self._trained)
                    is_best = command.compare and (yield call("improves", bind.lease, self._value))
                    outcome = Outcome(is_best=bool(is_best))
                case Publish():
                    is_last = command.save and (command.decides or command.interrupted)
                    if is_last and world.random.random() < 0.5:
                        yield self._rank.written
                        if (yield call("waited_for", bind.lease)):
                            self._left = command
                            return Departure(outcome="writing")
                    outcome = yield from self._publish(command)

    def _departure(self) -> Departure:
        outcome = {"continue": "completed", "stop": "stopped", "pause": "paused"}.get(self._why, self._why)
        return LOST if outcome in ("fenced", "interrupt") else Departure(outcome=outcome)  # type: ignore[arg-type]

    def _train(self, until: int) -> Steps:
        world = self.world
        while self._trained < until:
            yield world.setup.batch_s
            if self._stop.is_known and self._stop.value:
                return Outcome(batches=self._trained, leave=True, interrupted=True)
            if self._rank.group.is_broken.is_known:
                raise TrialFailed(COLLECTIVE)
            for error, left in world.left.items():
                if left and (error.trial, error.batch) == (self._bind.trial, self._trained + 1):
                    world.left[error] -= 1
                    stale = error.kind if error.kind in ("oom", "device") else ""
                    failure = Failure(kind=error.kind, batches=self._trained, where="model.py")
                    raise TrialFailed(Departure(outcome="errored", error=error.kind, failure=failure, stale=stale))
            self._trained += 1
        return Outcome(batches=self._trained)

    def _publish(self, command: Publish) -> Steps:
        world, bind, batches = self.world, self._bind, command.at.batches
        row = {"batches": batches, "epochs": None, "kind": "training", "name": "loss", "value": 0.5, "time": 0.0}
        fields: dict[str, Any] = {"step": batches, "value": self._value} if self._has_value else {}
        is_final = command.final and not command.interrupted
        report, metric = DeskReport(rows=(row,), final=is_final, **fields), fields.get("value")
        self._has_value = False
        if command.save:
            if not (yield self._rank.line.call("may_commit", bind.lease)):
                raise TrialFailed(LOST)
            yield self.world.delay()
            carried = replace(report, rows=(*self._unsaved, row))
            world.checkpoints[bind.trial][batches] = Checkpoint(
                at=command.at, report=carried, decides=command.decides, metric=metric
            )
            world.facts.commits(self._run, bind.trial, bind.lease, batches, metric)
            self._rank.line.call("saved", bind.trial, str(batches), batches, metric, 0.1)
        waits = (command.decides or is_final) and not command.interrupted
        yield from self._send(report, wait=waits)
        if waits and not is_final:
            world.facts.answered(bind.trial, batches, self._why == "stop")
        if command.interrupted:
            self._why = "interrupt" if self._why == "continue" else self._why
        stops_on_nan = world.setup.stops_on_nan and metric is not None and math.isnan(metric)
        if stops_on_nan and not is_final and self._why == "continue":
            raise TrialFailed(Departure(outcome="diverged", error="loss is nan"))
        return Outcome(stop=self._why != "continue")

    def _send(self, report: DeskReport, *, wait: bool) -> Steps:
        answer = self._rank.line.call("report", self._bind.lease, report, wait)
        if wait or self.world.random.random() < 0.3:
            self._why = yield answer
        if self._why == "fenced":
            raise TrialFailed(LOST)


class Core(RunCore):
    """A driver that may die between any two effects."""

    driver_process: Driver

    def carry_out(self, effect: Any) -> None:
        process = self.driver_process
        process.fuse -= 1
        if process.fuse == -1:
            raise Killed
        super().carry_out(effect)


class Driver(Process):
    """The process of one run, like `Experiment.run` and `Run`.

    Attributes:
        fuse: it dies after so many effects.
        kills: how often its groups' processes were killed.
    """

    def __init__(self, world: Alone) -> None:
        super().__init__(world)
        self.name, self.fuse, self.kills = f"run-{world.runs}", -1, 0
        self.over, self.bound = Answer(), dict[int, tuple[effects.Bind, str]]()
        self._groups: dict[int, Group] = {}
        self._jobs: deque[Any] = deque()
        self._sending: set[int] = set()
        self._handles, self._posted_at = 0, 0.0
        self._is_due = self._is_closing = self._has_ended = self._tune_ended = False

    def open(self) -> None:
        world, before = self.world, [*self.world.journal]
        journal = SimpleNamespace(append=self._append, path=Path("journal.jsonl"))
        opened = open_search(
            world.config,
            Custom(),
            world.extension,
            journal=journal,  # type: ignore[arg-type]
            records=before,
            requests=self,  # type: ignore[arg-type]
        )
        for alert in opened.alerts.pending.values():
            self._send(alert)
        self.search, self.rungs, self.length = opened.search, opened.search.method.rungs, opened.config.searcher.length
        core = self.core = Core(self.name, opened, write=self._write, perform=self._perform)
        core.driver_process = self
        slots = Slots(per_trial=world.ranks, gpu=False, cpus_per_slot=1, runtime_env={})
        kind = GroupKind(
            slots=slots,
            environment={},
            deterministic=False,
            collective_timeout_s=600,
            reuse_workers=world.setup.reuse_workers,
        )
        self.shape = kind.shape
        own, most = world.drawn.own_cluster, world.setup.max_slots
        core.lender = self.lender = Lender(
            world.view(),
            lambda: world.now,
            plan=GroupsPlan(max_slots=most, own_cluster=own),
            emit=core.effects.append,
            counts=core.driver.counts,
        )
        self.post(core.begin, kind, {})
        world.at(world.random.uniform(0.0, 4.0), self.start_handle)
        self.go(self._main())

    # ------------------------------------------------------------------ in place of `RequestFiles`
    def waiting(self) -> list[Requested]:
        return [*self.world.requests.values()]

    def check(self, request: Requested) -> None:
        if (source := request.source) is not None and source.batches not in self.world.checkpoints[source.trial]:
            raise IllegalEvent(f"there is no {source}")

    def remove(self, request_id: str) -> None:
        self.world.requests.pop(request_id, None)

    # ------------------------------------------------------------------ its threads
    def _main(self) -> Steps:
        world = self.world
        while not (self.over.is_known or self._tune_ended):
            yield 1.0
            self.post(self._tick)
        self.post(self.core.driver.close)
        self._is_closing, deadline = True, world.now + GRACE_S
        while not self.core.is_drained:
            yield 0.5
            if world.now > deadline:
                world.fail(f"trials have not left {GRACE_S:.0f} s after they were asked to")
        self.post(self.core.driver.end)
        while self.core.driver.retention.unanswered or not self._tune_ended:
            yield 0.5
            self._tune_ended = self._tune_ended or world.now > deadline + 60
        self.post(self.lender.end)
        while self._groups:
            yield 0.5
        for number in [*self._sending]:
            self._sent(number)
        self._settle()
        self._end("done" if self.search.done is not None else "stopped")

    def _tick(self) -> None:
        for request in self.waiting():
            self.core.driver.request(request, self.check)

    def start_handle(self) -> None:
        """Start Tune's handle, or replace it."""
        if self.is_alive and not self._tune_ended:
            self._handles += 1
            handle = Process(self.world)
            handle.go(self._fetch(Line(handle, self), self._handles))

    def _fetch(self, line: Line, number: int) -> Steps:
        while self._handles == number and (results := (yield line.call("fetch", number))) is not None:
            yield self.world.delay() if self.world.random.random() < 0.95 else 5 * self.world.random.random()
            if self._handles == number:
                self.post_now(self.core.driver.decide, results)
        if self._handles == number:
            self._tune_ended = True

    def drain(self, node: str) -> None:
        self.post(self.lender.nodes_drain, [node])

    def kill(self) -> None:
        self._end("killed")

    def _end(self, how: str) -> None:
        if self.is_alive:
            self.is_alive = False
            self.world.driver = None
            for group in self._groups.values():
                self.world.at(self.world.random.choice((0.0, 0.1, 10.0)), group.end)
            self.world.ended(how)

    # ------------------------------------------------------------------ its event loop
    def post(self, call: Callable[..., object], *args: Any) -> None:
        """Call this in the loop, after earlier calls."""
        self._posted_at = max(self._posted_at, self.world.now + self.world.delay())
        self.world.at(self._posted_at - self.world.now, self.post_now, call, *args)

    def post_now(self, call: Callable[..., object], *args: Any) -> None:
        if self.is_alive:
            call(*args)
            if not self._is_due:
                self._is_due = True
                self.world.at(0.01 * self.world.random.random(), self._settle)

    def _settle(self) -> None:
        self._is_due = False
        if self.is_alive:
            try:
                self.core.settle()
            except Killed:
                self.kill()

    def take(self, call: Call) -> None:
        self.core.take(call)  # type: ignore[arg-type]

    def _append(self, record: Mapping[str, Any], *, wait: bool = True) -> None:
        line = json.loads(json.dumps(record, allow_nan=False))
        self.world.journal.append(line)
        self.world.facts.written(line)

    def _write(self, records: Sequence[effects.Append]) -> None:
        self.fuse -= 1
        if self.fuse == -1:
            raise Killed
        for each in records:
            self._append(each.record)

    def _perform(self, effect: Any) -> None:
        world, lender = self.world, self.lender
        match effect:
            case effects.Bind():
                self.bound[effect.lease] = effect, self.name
                lender.send("bind", self.name, effect.lease, str(effect.lease).encode())
            case messages.LeaseGranted(trial=trial, lease=lease):
                world.facts.granted(self.name, trial, lease)
            case messages.LeaseOver(lease=lease) | messages.TrialLeft(lease=lease, outcome="errored"):
                world.facts.over(self.name, lease)
            case ReadLogs(left):
                self.post(self.core.logs_read, left)
            case effects.Prune() | effects.Examine():
                self._jobs.append(effect)
                world.at(world.random.choice((0.01, 0.2, 2.0)), self._clean)
            case effects.Send(alert):
                self._send(alert)
            case effects.Answered(request_id):
                self.remove(request_id)
            case effects.EndRun():
                self.over.resolve()
            case effects.Fail(error):
                if self.kills < MAX_FAILED_STARTS:
                    raise error
                self.over.resolve()  # no group has ended a trial; the user resumes it
            case After(seconds, method, args):
                world.at(seconds, self.post_now, lender.send, method, *args)
            case OnPool(owner, StartGroup() as start):
                self._groups[start.start] = Group(self, owner, start)
            case OnPool(_, EndGroup(start=number)):
                if (group := self._groups.pop(number, None)) is not None:
                    group.end()
            case OnPool(owner, LookAtCluster()):
                self.post(lambda: lender.on(owner, ClusterSeen(world.view())))
            case LookAtCluster():
                self.post(lambda: lender.look(world.view()))
            case PoolClosed():
                for group in self._groups.values():
                    group.end()
                self._groups.clear()

    def _send(self, alert: Mapping[str, Any]) -> None:
        self._sending.add(alert["id"])
        self.world.at(self.world.random.uniform(0.0, 20.0), self._sent, alert["id"])

    def _sent(self, number: int) -> None:
        if self.is_alive and number in self._sending:
            self._sending.remove(number)
            self.world.facts.sent[number] += 1
            self.core.effects.append(effects.Append({"event": "told", "id": number}, wait=False))

    def _clean(self) -> None:
        """In place of `Cleaner`."""
        if not self.is_alive:
            return
        job, retention, facts = self._jobs.popleft(), self.core.driver.retention, self.world.facts
        if isinstance(job, effects.Examine):
            there = self.world.checkpoints[job.trial]
            found = [
                effects.Saved(trial=job.trial, batches=batches, checkpoint=str(batches), value=each.metric)
                for batches, each in there.items()
                if batches not in job.known
            ]
            missing = sorted(set(job.known) - there.keys())
            self.post(lambda: retention.examined(job, found, (), missing, failed=False))
            return
        missing_kept = [each for each in job.keep if each.batches not in self.world.checkpoints[each.trial]]
        for each in job.keep:
            facts.synced(each.trial, each.batches)
        gone = [] if missing_kept else [each for each in job.delete if retention.is_pruning(each, job)]
        for each in gone:
            self.world.checkpoints[each.trial].pop(each.batches, None)
            facts.deleted(each.trial, each.batches)
        self.post(lambda: retention.pruned(job, gone, missing_kept, failed=False))
