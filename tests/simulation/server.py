"""A server: the real `Scheduler`, `Queue` and `Lender`, in a shell that does what `dray.serve.manager.Manager` does, in
the same order; and its users."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dray.desk.desk import CLIENT_CALLS
from dray.desk.effects import Reply, Say, Tell
from dray.desk.messages import ClientLeft, LeaseGranted, Message
from dray.display.counts import Counts
from dray.groups.lender import GroupKind
from dray.groups.pool import GroupsPlan
from dray.serve import scheduler as effects
from dray.serve.control import NotSubmitted, Share, WrongState
from dray.serve.queue import Queue
from dray.serve.scheduler import ProcessEnd, Scheduler
from searchers.journal import Journal
from tests.simulation.cluster import Cluster, Lending
from tests.simulation.driver import DriverProcess, Loop, check_leases
from tests.simulation.experiment import Experiment
from tests.simulation.world import Call, Connection, Disk, DiskJournal, End, Failed, Future, Unreachable, World

LOOK_S = 15.0
"""How often users look at what they have submitted."""


class LentGroups:
    """As `dray.groups.lent.LentGroups`."""

    is_own = False

    def __init__(
        self, process: DriverProcess, server: ServerProcess, kind: GroupKind, share: Mapping[str, Any]
    ) -> None:
        self._process, self._heard_at = process, 0.0
        self._desk = Connection(process, server, self._heard)
        self._desk.call("add", process.name, kind, (process.name,), dict(share))
        self.ended = Future()

    def _heard(self, message: Message) -> None:
        world = self._process.world  # what is posted comes in order
        self._heard_at = max(self._heard_at, world.now + world.delay())
        world.when(self._heard_at, self._process.call, self._process.hear, message)

    def send(self, method: str, *args: Any) -> None:
        self._desk.tell(method, *args)

    def step(self) -> None:
        if self._desk.is_gone:
            raise Unreachable

    def nodes_drain(self, nodes: Iterable[str]) -> None:
        """The server watches them."""

    def end(self) -> None:
        self._desk.tell("remove", self._process.name)
        self.end_at_once()

    def end_at_once(self) -> None:
        self._desk.close()
        self.ended.resolve()

    def lost(self) -> None:
        """The server ends the groups."""


class LentDriver(DriverProcess):
    """The process of an experiment of a server."""

    def __init__(self, server: ServerProcess, experiment: Experiment) -> None:
        super().__init__(server.world, experiment, server.cluster, server.child_ended)
        self._server = server

    def _lend(self) -> None:
        setup = self.experiment.setup
        share = {"priority": setup.priority, "weight": setup.weight, "max_slots": setup.max_slots}
        self.lending = LentGroups(self, self._server, self.kind, share)


class Results:
    """What outlives servers: the queue's journal, the experiments, and what their users know.

    Attributes:
        wanted: what may be wanted of each experiment that was accepted: its user's last wish that was acknowledged,
            and later ones that may have come to the disk.
    """

    def __init__(self, world: World, experiments: list[Experiment]) -> None:
        self.disk = Disk(world)
        self.experiments = {each.name: each for each in experiments}
        self.wanted: dict[str, set[str]] = {}
        self.servers = 0


class ServerProcess(Loop):
    """A server from its start to its end, after which `ended` is called."""

    def __init__(self, world: World, cluster: Cluster, results: Results, ended: Callable[[], None]) -> None:
        results.servers += 1
        super().__init__(world, f"server-{results.servers}")
        self.cluster, self._results, self._ended = cluster, results, ended
        self.processes: dict[str, LentDriver] = {}
        self._sessions: dict[str, End] = {}
        self._is_ending = False
        journal = DiskJournal(results.disk, lambda record: None)
        self.queue = Queue(
            Journal.parse(results.disk.data, where=self.name), journal.append, clock=lambda: self.world.now
        )
        self._check_queue()
        self.lending = Lending(
            self, cluster, self._plan, self._effects.append, Counts(), shares_cluster=True, end_s=0.0
        )
        self._lender = self.lending.lender
        self.scheduler = Scheduler(self.queue, self._effects.append, is_preempted=self._lender.is_preempted)
        self.lending.ended.then(lambda _: self.end())

    @staticmethod
    def _plan(owner: str, kind: GroupKind) -> GroupsPlan:
        return GroupsPlan(owner=owner, slots=kind.slots, own_cluster=False, min_groups=0)

    def _check_queue(self) -> None:
        """Nothing that was acknowledged is lost."""
        items = {item.name: item for item in self.queue.items()}
        for name, wanted in self._results.wanted.items():
            if name not in items:
                raise Failed(f"{self.name}: {name} was accepted, and is not in the queue")
            state = items[name].state
            if state not in ("COMPLETED", "ERROR") and state not in wanted:
                raise Failed(f"{self.name}: {name} is to {state}, in place of {sorted(wanted)}")

    def end(self) -> None:
        if self.alive:
            super().end()
            self.lending.lost()
            for process in self.processes.values():  # their connections close
                self.world.at(self.world.random.choice((0.0, 0.01, 1.0)), process.end)
            self._ended()

    # ------------------------------------------------------------------ as `Manager`
    def tick(self) -> None:
        self.call(self._look)

    def _look(self) -> None:
        self.scheduler.disk("the disk is full" if self._results.disk.is_full else "")
        if self.scheduler.closing and not self.processes and not self._is_ending:
            self._is_ending = True
            self.lending.end()

    def take(self, call: Call) -> None:
        self.call(self._take, call)

    def _take(self, call: Call) -> None:
        if call.method == "add":
            self._sessions[call.args[0]] = call.session
            self.lending.on(self._lender.add, *call.args)
            call.answer()
        elif call.method in CLIENT_CALLS:
            if call.args[0] in self._lender.desk.clients:
                self.lending.send(call.method, *call.args)
        else:
            self.lending.take(call)

    def lost(self, session: object) -> None:
        self.call(self._lost, session)

    def _lost(self, session: object) -> None:
        for run in [run for run, each in self._sessions.items() if each is session]:
            self.lending.send("remove", run)

    def failed(self, error: Exception) -> None:
        """It is tried again."""

    def settle(self) -> None:
        self.lending.step()
        self.scheduler.step(self._lender.demands, self._lender.slots())
        while self._effects:
            self.burn()
            effect = self._effects.pop(0)
            if self.world.lines is not None:
                self.world.note(f"   {self.name}: {effect}")
            self._perform(effect)

    def _perform(self, effect: Any) -> None:
        match effect:
            case Reply(Call() as call, value):
                call.answer(value)
            case Reply():
                pass
            case Tell(client, message):
                if isinstance(message, LeaseGranted) and client in self._lender.desk.clients:
                    check_leases(self._lender.desk.clients[client])
                if (session := self._sessions.get(client)) is not None:
                    session.send((0, message))
            case ClientLeft(client=client):
                self._sessions.pop(client, None)
                self.scheduler.left(client)
            case effects.StartProcess(name, _, extension):
                self._start(name, extension)
            case effects.SignalProcess(name, number):
                if (process := self.processes.get(name)) is not None:
                    self.world.at(self.world.delay(), process.end if number == signal.SIGKILL else process.interrupt)
            case effects.SetShare(run, priority, weight, most):
                self.lending.send("set_share", run, priority, weight, most)
            case effects.RemoveRun(run):
                self.lending.send("remove", run)
            case Say():
                pass
            case _:
                self.lending.perform(effect)

    def _start(self, name: str, extension: Mapping[str, int]) -> None:
        experiment = self._results.experiments[name]
        experiment.extension = dict(extension)
        process = self.processes[name] = LentDriver(self, experiment)
        self.world.at(self.world.random.choice((0.01, 2.0)), process.start)

    def child_ended(self, process: DriverProcess, how: str) -> None:
        """An experiment's process has ended."""
        if self.world.lines is not None:
            self.world.note(f"{process.name} has ended: {how}")
        self.post(self._note_end, process, how)

    def _note_end(self, process: DriverProcess, how: str) -> None:
        name = process.experiment.name
        if self.processes.get(name) is process:
            del self.processes[name]
            self._look()
            self.scheduler.ended(name, ProcessEnd(kind=KINDS.get(how, "died"), error=how))

    # ------------------------------------------------------------------ its users
    def ask(self, verb: Callable[..., None], *args: Any) -> None:
        """A user asks for something; if the answer is an error, that is that."""

        def ask() -> None:
            with contextlib.suppress(OSError, NotSubmitted, WrongState):
                verb(*args)

        self.post(ask)

    def submit(self, name: str) -> None:
        """Submit an experiment."""
        if name in self._results.wanted:
            return
        setup = self._results.experiments[name].setup
        share = Share(priority=setup.priority, weight=setup.weight, max_slots=setup.max_slots)
        _, runs = self.scheduler.submit(Path(name), share, has_process=self.world.random.random() < 0.5)
        self._results.wanted[name] = {"run"}
        if runs:
            self._start(name, {})

    def want(self, name: str, wanted: str, verb: Callable[..., object], *args: Any) -> None:
        """Have an experiment run, pause or stop."""
        if name in self._results.wanted:
            self._results.wanted[name].add(wanted)
            verb(name, *args)
            self._results.wanted[name] = {wanted}

    def look(self) -> bool:
        """Users submit what they have not, have run again what they have stopped, or extend what has completed;
        returns whether all is done."""
        scheduler, done = self.scheduler, True
        for name, experiment in self._results.experiments.items():
            if name not in self._results.wanted:
                if self.world.random.random() < 0.7:
                    self.ask(self.submit, name)
            elif (state := scheduler.experiment(name).state) in ("PAUSED", "STOPPED", "ERROR"):
                self.ask(self.want, name, "run", scheduler.act, "activate")
            elif state == "COMPLETED" and experiment.extensions:
                extension = dict(experiment.extensions.pop(0))
                self.ask(self.want, name, "run", scheduler.extend, extension)
            elif state == "COMPLETED":
                continue
            done = False
        return done


KINDS: dict[str, Any] = {"done": "COMPLETED", "stopped": "stopped"}
"""Of the ends of processes; others have died."""
