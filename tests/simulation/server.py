"""A server: the real `ServerCore`, in a shell that does what `dray.serve.manager.Manager` does, in the same order; and
its users."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dray.desk.effects import Tell
from dray.desk.messages import LeaseGranted
from dray.display.counts import Counts
from dray.groups.lender import GroupKind, Lender
from dray.groups.lent import LentGroups
from dray.groups.pool import GroupsPlan
from dray.serve import effects
from dray.serve.control import Share
from dray.serve.core import ServerCore
from dray.serve.queue import Queue
from dray.serve.quota import Quota
from dray.serve.refusals import NotSubmitted, WrongState
from dray.serve.scheduler import ProcessEnd
from searchers import rows
from tests.simulation.cluster import Cluster, Lending
from tests.simulation.driver import Core, DriverProcess, Loop, check_leases
from tests.simulation.experiment import Experiment
from tests.simulation.world import Call, Connection, Disk, DiskJournal, End, Failed, Future, World

LOOK_S = 15.0
"""How often users look at what they have submitted."""
KINDS: dict[str, Any] = {"done": "COMPLETED", "spent": "COMPLETED", "stopped": "stopped"}
"""What ends of processes mean; other processes have died."""


class Lent(LentGroups):
    """The real desk, on a simulated connection."""

    def __init__(self, process: LentDriver, core: Core, kind: GroupKind, share: Mapping[str, Any]) -> None:
        self._client, self._leases = process.name, set()
        self._hear = lambda message: process.post(core.hear, message)
        desk = Connection(process, process.server, self._heard)
        desk.call("add", process.name, kind, (process.name,), dict(share))
        self._desk = desk  # type: ignore[assignment]
        self.ended = Future()

    def end(self) -> None:
        super().end()
        self.ended.resolve()

    def end_at_once(self) -> None:
        self.ended.resolve()

    def perform(self, effect: Any) -> None:
        """No-op: there are no decisions, and messages are not shown."""

    def lost(self) -> None:
        """No-op: the server ends the groups."""


class LentDriver(DriverProcess):
    """The process of a server's experiment."""

    server: ServerProcess

    def _lend(self, core: Core, kind: GroupKind) -> None:
        setup = self.experiment.setup
        share = {"priority": setup.priority, "weight": setup.weight, "max_slots": setup.max_slots}
        core.lender = self.lending = Lent(self, core, kind, share)


class Results:
    """The parts that outlive servers: the queue's journal, the experiments, and their users' knowledge.

    Attributes:
        wanted: possible requests for each accepted experiment: its user's last acknowledged request,
            and later ones that may have reached the disk.
        quota: of the token that submits them, if any.
    """

    def __init__(self, world: World, experiments: list[Experiment], token_slots: int | None = None) -> None:
        self.owner, self.quota = "" if token_slots is None else "agent", Quota(slots=token_slots)
        self.disk = Disk(world)
        self.experiments = {each.name: each for each in experiments}
        self.wanted: dict[str, set[str]] = {}
        self.servers = 0


class ServingCore(ServerCore):
    """A server process that may be killed between any two effects."""

    process: ServerProcess

    def carry_out(self, effect: Any) -> None:
        self.process.burn(effect)
        match effect:
            case Tell(client, LeaseGranted()) if client in self.lender.desk.clients:
                check_leases(self.lender.desk.clients[client])
                self.check_quota()
        super().carry_out(effect)

    def check_quota(self) -> None:
        """Check that the leases of the token's experiments keep its quota."""
        clients, most = self.lender.desk.clients.values(), self.process.quota.slots
        if most is not None and (held := sum(client.slots / client.unit for client in clients)) > most:
            raise Failed(f"{self.process.name}: the token has {held} slots, of {most}")


class ServerProcess(Loop):
    """A server from its start to its end; then `ended` is called."""

    def __init__(self, cluster: Cluster, results: Results, ended: Callable[[], None]) -> None:
        results.servers += 1
        super().__init__(cluster.world, f"server-{results.servers}")
        self._cluster, self._results, self._ended = cluster, results, ended
        self.processes: dict[str, LentDriver] = {}
        self._is_ending = False
        journal = DiskJournal(results.disk, lambda record: None)
        records = rows.strict(results.disk.data, self.name)
        self.quota = results.quota
        queue = Queue(records, journal.append, clock=lambda: self.world.now)
        self._check(queue)
        self._core = ServingCore(queue, self._lend, self._perform, quota_of=lambda owner: self.quota)
        self._core.process = self
        self.scheduler, lender = self._core.scheduler, self._core.lender
        self.lending = Lending(self, cluster, lender, end_s=0.0)
        self.lending.ended.then(lambda _: self.end())

    @property
    def lender(self) -> Lender:
        return self._core.lender

    def _lend(self, emit: Callable[[Any], None]) -> Lender:
        return Lender(
            self._cluster.view(),
            lambda: self.world.now,
            plan=lambda owner, kind: GroupsPlan(owner=owner, slots=kind.slots, own_cluster=False, min_groups=0),
            emit=emit,
            counts=Counts(),
            shares_cluster=True,
        )

    def _check(self, queue: Queue) -> None:
        """Check that no acknowledged request is lost."""
        items = {item.name: item for item in queue.items()}
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
        self.call(self._core.take, call)

    def lost(self, session: End) -> None:
        self.call(self._core.lost, session)

    def failed(self, error: Exception) -> None:
        """Try again."""

    def settle(self) -> None:
        self._core.settle()
        self._check_lanes()

    def _check_lanes(self) -> None:
        """Check that the lanes show the leases that there are, and no two trials at the same place."""
        leases = {number for client in self.lender.desk.clients.values() for number in client.leases}
        if (live := self._core.lanes.live.keys()) != leases:
            raise Failed(f"{self.name}: the lanes show leases {sorted(live)}, and there are {sorted(leases)}")
        places = [(each.kind, lane, each.part) for each in self._core.lanes.live.values() for lane in each.lanes]
        if len(places) != len(set(places)):
            raise Failed(f"{self.name}: two trials are on the same lane: {sorted(places)}")

    def _perform(self, effect: Any) -> None:
        match effect:
            case effects.StartProcess(name, _, extension):
                self._start(name, extension)
            case effects.ReadSpent(name):
                self.scheduler.settle(name, {})
            case effects.SignalProcess(name, number):
                if (process := self.processes.get(name)) is not None:
                    self.world.at(self.world.delay(), process.end if number == signal.SIGKILL else process.interrupt)
            case _:
                self.lending.perform(effect)

    def _start(self, name: str, extension: Mapping[str, Any]) -> None:
        experiment = self._results.experiments[name]
        experiment.extension = dict(extension)
        process = self.processes[name] = LentDriver(experiment, self._cluster, self._child_ended)
        process.server = self
        self.world.at(self.world.random.choice((0.01, 2.0)), process.start)

    def _child_ended(self, process: DriverProcess, how: str) -> None:
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
        """Send a user's request, ignoring errors."""

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
        has_process, owner = self.world.random.random() < 0.5, self._results.owner
        _, runs = self.scheduler.submit(Path(name), share, has_process=has_process, owner=owner)
        self._results.wanted[name] = {"run"}
        if runs:
            self._start(name, {})

    def want(self, name: str, wanted: str, verb: Callable[..., object], *args: Any) -> None:
        """Have an experiment run, pause or stop."""
        if name in self._results.wanted:
            self._results.wanted[name].add(wanted)
            verb(name, *args)
            self._results.wanted[name] = {wanted}

    def extend(self, name: str) -> None:
        """Extend an experiment."""
        if extensions := self._results.experiments[name].extensions:
            self.want(name, "run", self.scheduler.extend, dict(extensions[0]))
            extensions.pop(0)

    def look(self) -> bool:
        """Let users submit their remaining experiments, restart stopped ones, or extend completed ones;
        returns whether all experiments are done."""
        scheduler, done = self.scheduler, True
        for name, experiment in self._results.experiments.items():
            if name not in self._results.wanted:
                if self.world.random.random() < 0.7:
                    self.ask(self.submit, name)
            elif (state := scheduler.experiment(name).state) in ("PAUSED", "STOPPED", "ERROR"):
                self.ask(self.want, name, "run", scheduler.act, "activate")
            elif state == "COMPLETED" and experiment.extensions:
                self.ask(self.extend, name)
            elif state == "COMPLETED":
                continue
            done = False
        return done
