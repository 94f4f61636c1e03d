"""The real `ServerCore` behind a fake server's queue: experiments whose trials begin and end when a test says so."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

from dray.cluster.view import ClusterView
from dray.display.counts import Counts
from dray.groups.effects import ClusterSeen, EndGroup, GroupPlaced, LookAtCluster, StartGroup
from dray.groups.lender import GroupKind, Lender, OnPool, PoolOpened
from dray.groups.pool import GroupsPlan
from dray.leases.desk import Desk
from dray.leases.lease import Lease
from dray.leases.messages import Departure, GroupEnded, LeaseOutcome
from dray.leases.shares import Demand
from dray.serve.control import QueueState, Share, Status, Submitted, Verb
from dray.serve.core import ServerCore
from dray.serve.effects import SignalProcess, StartProcess
from dray.serve.lanes import Lanes
from dray.serve.queue import Item, Queue
from dray.serve.quota import Quota
from dray.serve.scheduler import MAX_PROCESSES, ProcessEnd
from tests.groups.clusters import cluster, cpus
from tests.serve.fake import FakeControl

P = ParamSpec("P")
R = TypeVar("R")
NOON = 1_700_000_000.0


def kind(slots: int = 1, shared_by: int = 1) -> GroupKind:
    """Groups of so many CPUs, or of a part of one."""
    return GroupKind(
        slots=cpus(slots, shared_by=shared_by),
        environment={},
        deterministic=False,
        collective_timeout_s=600.0,
        reuse_workers=True,
    )


def is_start(effect: Any, number: int) -> bool:
    """Whether an effect is this start of a group."""
    return isinstance(effect, OnPool) and isinstance(effect.effect, StartGroup) and effect.effect.start == number


@dataclass(frozen=True)
class Asks:
    """A group's call for its next lease."""

    group: str
    ended: list[str]

    def answer(self, value: Any) -> None:
        """Without a lease, its processes end."""
        if value is None:
            self.ended.append(self.group)


def alone(method: Callable[P, R]) -> Callable[P, R]:
    """A method that runs in one thread at a time: a server's decisions are made in a single one."""

    @functools.wraps(method)
    def call(*given: P.args, **named: P.kwargs) -> R:
        with given[0].lock:  # type: ignore[attr-defined]
            return method(*given, **named)

    return call


class SceneControl(FakeControl):
    """A server on a machine with so many CPUs, at a given time. Processes and groups are up at once."""

    def __init__(self, results: Path, slots: int = 4, quota: Quota | None = None) -> None:
        super().__init__(results)
        self.lock = threading.RLock()
        self.now, self.cpus = NOON, slots
        self.kinds: dict[str, GroupKind] = {}
        self.trials: dict[str, int] = {}
        self.performed: list[Any] = []
        self.ends: list[str] = []  # groups whose ranks were told to end
        self.up: dict[str, tuple[str, int, GroupKind]] = {}  # owner, start and kind by group
        self._pools: dict[str, GroupKind] = {}
        self.kept: list[Mapping[str, Any]] = []
        self.records: list[Mapping[str, Any]] = []
        self.hold = False  # groups' processes arrive, and can't train yet
        self.slow: set[str] = set()  # experiments whose processes take their time to start
        self.core = ServerCore(
            Queue([], self.records.append, clock=lambda: self.now),
            self._lend,
            lambda effect: self.performed.append(effect),
            quota_of=lambda owner: quota or Quota(),
            lanes=Lanes((), self.kept.append, clock=lambda: self.now),
        )
        self.scheduler = self.core.scheduler

    def _lend(self, emit: Callable[[Any], None]) -> Lender:
        return Lender(
            self.view(),
            lambda: self.now,
            plan=GroupsPlan(is_servers=True),
            emit=emit,
            counts=Counts(),
        )

    def view(self) -> ClusterView:
        """The machine."""
        return cluster({"CPU": float(self.cpus)})

    @property
    def desk(self) -> Desk:
        return self.core.lender.desk

    # ------------------------------------------------------------------ what happens
    @alone
    def run(self, name: str, trials: int = 9, *, of: GroupKind | None = None, owner: str = "", **share: Any) -> None:
        """Submit an experiment with so many trials."""
        self.kinds[name], self.trials[name] = of or kind(), trials
        self.core.scheduler.submit(self.results / name, Share(**share), has_process=False, owner=owner)
        self.settle()

    @alone
    def settle(self, seconds: float = 1.0) -> None:
        """Time passes, and everything that is due happens."""
        for _ in range(10):
            self.core.settle()
            self.now += seconds / 10
            effects, self.performed = self.performed, []
            while effects:
                effect = effects.pop(0)
                if isinstance(effect, OnPool) and isinstance(effect.effect, EndGroup):
                    effects = [each for each in effects if not is_start(each, effect.effect.start)]
                self._carry_out(effect)
            for group in [each for each in self.ends if each in self.up]:
                self._end(group, self.up[group][1])
            self.ends.clear()
            for client in list(self.desk.clients.values()):
                for lease in list(client.leases.values()):
                    self.desk.bind(client.name, lease.number, b"")
                    self.desk.begun(None, lease.number)
                    if lease.state in ("moving", "leaving") or client.closing:
                        self._leave(lease, "interrupted")

    def _carry_out(self, effect: Any) -> None:
        match effect:
            case StartProcess(name):
                if name not in self.slow:
                    self.connect(name)
            case SignalProcess(name):  # its trials save, and it ends
                self.core.scheduler.ended(name, ProcessEnd(kind="stopped"))
            case PoolOpened(owner, of):
                self._pools[owner] = of
            case OnPool(owner, StartGroup() as start):
                if sum(of.slots.taken for _, _, of in self.up.values()) + start.slots.taken > self.cpus:
                    self.performed.append(effect)  # it waits for its slots
                    return
                self.up[start.group] = owner, start.start, self._pools[owner]
                self.core.lender.on(owner, GroupPlaced(group=start.group, start=start.start))
                self.desk.arrived(None, owner, start.group, start.start, "node", "", "CPU")
                if not self.hold:
                    self._ask(start.group, 0)
            case OnPool(owner, EndGroup(group=group, start=number)):
                self.performed[:] = [each for each in self.performed if not is_start(each, number)]
                self._end(group, number)
            case OnPool(owner, LookAtCluster()):
                self.core.lender.on(owner, ClusterSeen(self.view()))

    def _end(self, group: str, start: int) -> None:
        if group in self.up and self.up[group][1] == start:
            owner, start, _ = self.up.pop(group)
            self.core.lender.on(owner, GroupEnded(group=group, start=start))

    def connect(self, name: str) -> None:
        """An experiment's process is up, and queues its trials."""
        share = self.core.scheduler.experiment(name).share
        session = SimpleNamespace(push=lambda message: None)
        given = {"priority": share.priority, "weight": share.weight, "max_slots": share.max_slots}
        for method, args in (
            ("add", (f"{name}-run", self.kinds[name], ("host", 1, b"key"), given)),
            ("enqueue", (f"{name}-run", tuple(range(self.trials[name])), False)),
        ):
            call = SimpleNamespace(method=method, args=args, session=session, answer=lambda value=None: None)
            self.core.take(call)  # type: ignore[arg-type]

    def _ask(self, group: str, after: int) -> None:
        owner, start, of = self.up[group]
        self.desk.next_lease(Asks(group, self.ends), owner, group, start, 0, 1, after, of.shape)

    def leases(self, name: str) -> list[Lease]:
        client = self.desk.clients.get(f"{name}-run")
        return [] if client is None else list(client.leases.values())

    @alone
    def finish(self, name: str, outcome: LeaseOutcome = "completed", count: int = 99) -> None:
        """Trials of an experiment leave, and their groups get others."""
        for lease in self.leases(name)[:count]:
            self._leave(lease, outcome)
        self.settle()

    def _leave(self, lease: Lease, outcome: LeaseOutcome) -> None:
        self.desk.leave(None, lease.number, 0, Departure(outcome=outcome))
        self._ask(lease.group.name, lease.number)

    @alone
    def has(self) -> dict[str, int]:
        """The number of each experiment's groups that train."""
        return {each.name: int(each.slots) for each in self.core.scheduler.experiments()}

    # ------------------------------------------------------------------ the verbs
    @alone
    def experiments(self) -> list[Submitted]:
        return self.core.scheduler.experiments()

    @alone
    def experiment(self, name: str) -> Submitted:
        return self.core.scheduler.experiment(name)

    @alone
    def act(self, name: str, verb: Verb) -> Submitted:
        self.core.scheduler.act(name, verb)
        self.settle()
        return self.experiment(name)

    @alone
    def change(self, name: str, change: Mapping[str, Any]) -> Submitted:
        self.core.scheduler.change(name, change)
        self.settle()
        return self.experiment(name)

    @alone
    def status(self) -> Status:
        lender = self.core.lender
        busy = sum(demand.has * demand.size for demand in lender.demands.values())
        return replace(super().status(), slots=lender.slots(), busy=busy, groups=lender.count)

    @alone
    def queue(self, seconds: float) -> QueueState:
        return self.core.queue(seconds)

    @alone
    def foresee(self, shares: Mapping[str, Share]) -> list[str]:
        return self.core.foresee(shares, self.guess)

    def guess(self, item: Item) -> Demand:
        """The demand of an experiment without a process."""
        slots, trials = self.kinds[item.name].slots, min(self.trials[item.name], MAX_PROCESSES)
        return Demand(name=f"{item.name}-guess", groups=trials, size=slots.taken * slots.unit, kind=slots.kind)
