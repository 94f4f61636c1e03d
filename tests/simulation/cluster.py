"""Simulated nodes, and worker groups on them, as `dray.groups.shell` and `dray.groups.group` have them on Ray."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dray.cluster.view import ClusterView, RayNode
from dray.desk import desk
from dray.desk.effects import After
from dray.desk.failure import LOST_NODE
from dray.desk.messages import Unfit
from dray.display.counts import Counts
from dray.groups.effects import (
    ClusterSeen,
    EndGroup,
    GiveUp,
    GroupPlaced,
    LookAtCluster,
    ProcessesEnded,
    StartGroup,
)
from dray.groups.lender import GroupKind, Lender, OnPool, PoolClosed, PoolOpened
from dray.groups.pool import GroupsPlan
from tests.simulation.world import Call, Connection, Failed, Future, Process, Steps, Unreachable, World, proceed

UNREACHABLE = "DeskUnreachable: "
"""Begins the error of a process that has lost the desk."""


class Node:
    """A machine."""

    def __init__(self, name: str, slots: int) -> None:
        self.name, self.slots, self.free, self.is_alive = name, slots, slots, True
        self.is_draining = False


class Cluster:
    """Nodes, and who has their slots.

    Args:
        slots: of each node.
    """

    def __init__(self, world: World, slots: tuple[int, ...]) -> None:
        self._world = world
        self.nodes = [Node(f"node-{number}", each) for number, each in enumerate(slots)]
        self._names = len(slots)
        self._waiting: list[tuple[int, Callable[[list[Node]], None]]] = []

    def view(self) -> ClusterView:
        """What Ray says."""
        return ClusterView(
            nodes=tuple(RayNode(each.name, each.name, True, {"CPU": float(each.slots)}, {}) for each in self.nodes),
            draining=frozenset(each.name for each in self.nodes if each.is_draining),
            free={"CPU": float(sum(each.free for each in self.nodes))},
        )

    def ask(self, slots: int, placed: Callable[[list[Node]], None]) -> Callable[[], None]:
        """Have this called with the node of each slot once there are so many. Returns what withdraws it."""
        request = (slots, placed)
        self._waiting.append(request)
        self._world.at(self._world.delay(), self._place)

        def withdraw() -> None:
            if request in self._waiting:
                self._waiting.remove(request)

        return withdraw

    def free(self, nodes: list[Node]) -> None:
        """These slots are free again."""
        for node in nodes:
            node.free += 1
            if node.free > node.slots:
                raise Failed(f"{node.name} got back more slots than it has")
        self._world.at(self._world.delay(), self._place)

    def _place(self) -> None:
        for request in list(self._waiting):
            slots, placed = request
            nodes = [node for node in self.nodes if not node.is_draining for _ in range(node.free)]
            if len(nodes) >= slots:
                self._waiting.remove(request)
                for node in nodes[:slots]:
                    node.free -= 1
                placed(nodes[:slots])

    def kill(self, node: Node) -> None:
        """A machine loses power; another one takes its place some time later."""
        node.is_alive = False
        self.nodes.remove(node)
        for process in list(self._world.processes):
            if isinstance(process, Rank) and process.node is node:
                process.end()
        self._world.at(self._world.random.uniform(1.0, 60.0), self._boot, node.slots)

    def _boot(self, slots: int) -> None:
        self._names += 1
        self.nodes.append(Node(f"node-{self._names}", slots))
        self._place()


class Lending:
    """As `dray.groups.lending.Lending`: a `Lender`, and the groups that it decides on.

    Args:
        process: the driver's, or the server's; it has `call` and `post` of `dray.desk.loop.EventLoop`.
        kept: what survives it.
    """

    is_own = True

    def __init__(
        self,
        process: Any,
        cluster: Cluster,
        plan: Callable[[str, GroupKind], GroupsPlan],
        emit: Callable[[Any], None],
        counts: Counts,
        *,
        shares_cluster: bool,
        end_s: float,
    ) -> None:
        self.process, self.world, self.cluster = process, process.world, cluster
        self._end_s = end_s
        self._kinds: dict[str, GroupKind] = {}
        self.groups: dict[str, dict[int, Group]] = {}
        self.lender = Lender(
            cluster.view(), self.world.now, plan=plan, emit=emit, counts=counts, shares_cluster=shares_cluster
        )
        self.ended = Future()

    @property
    def count(self) -> int:
        return self.lender.group_count

    def take(self, call: Call) -> None:
        if call.method not in desk.CALLS:
            raise Failed(f"there is no method {call.method}")
        self.on(getattr(self.lender.desk, call.method), call, *call.args)

    def send(self, method: str, *args: Any) -> None:
        self.on(getattr(self.lender.desk, method), *args)

    def on(self, method: Callable[..., None], *args: Any) -> None:
        self.lender.now = self.world.now
        method(*args)

    def step(self) -> None:
        self.on(self.lender.step)

    def nodes_drain(self, nodes: list[str]) -> None:
        self.on(self.lender.nodes_drain, nodes)

    def perform(self, effect: Any) -> None:
        """Carry out an effect."""
        match effect:
            case After(seconds, method, args):
                self.process.later(seconds, self.on, getattr(self.lender.desk, method), *args)
            case PoolOpened(owner, kind):
                self._kinds[owner] = kind
                self.groups[owner] = {}
            case OnPool(owner, StartGroup() as start):
                self.groups[owner][start.start] = Group(self, owner, self._kinds[owner], start)
            case OnPool(owner, EndGroup(start=number)):
                if (group := self.groups.get(owner, {}).pop(number, None)) is not None:
                    group.end()
            case OnPool(owner, LookAtCluster()):
                self.process.later(self.world.delay(), self._look, owner)
            case OnPool(owner, GiveUp()):
                raise AssertionError("the lender takes it")
            case OnPool():
                pass
            case PoolClosed(owner):
                self._close(owner)
            case LookAtCluster():
                self.process.later(self.world.delay(), lambda: self.on(self.lender.look, self.cluster.view()))
            case _:
                raise AssertionError(effect)

    def _look(self, owner: str) -> None:
        self.on(self.lender.on, owner, ClusterSeen(self.cluster.view()))

    def report(self, owner: str, event: GroupPlaced | ProcessesEnded) -> None:
        """A group has reported this."""
        self.process.post(self._heard, owner, event)

    def _heard(self, owner: str, event: GroupPlaced | ProcessesEnded) -> None:
        if isinstance(event, ProcessesEnded) and event.error.startswith(UNREACHABLE):
            why = Unfit(message=event.error, resumable=True)
            self.on(self.lender.desk.broken, None, owner, event.group, why)
        self.on(self.lender.on, owner, event)

    def end(self) -> None:
        """End all groups. In the event loop."""
        self.on(self.lender.end)
        if not self.groups:
            self.ended.resolve()

    def end_at_once(self) -> None:
        """End all groups, as nothing is carried out any more."""
        for owner in list(self.groups):
            self._end_all(owner)
        self.ended.resolve()

    def _close(self, owner: str) -> None:
        """Give an owner's groups time to end by themselves, then end them."""
        self.process.later(self._end_s, self._end_all, owner)

    def _end_all(self, owner: str) -> None:
        for group in list(self.groups.pop(owner, {}).values()):
            group.end()
        if not self.groups:
            self.ended.resolve()

    def lost(self) -> None:
        """The process that owns the groups is gone: they end some time later."""
        for groups in self.groups.values():
            for group in groups.values():
                self.world.at(self.world.random.choice((0.0, 0.1, 10.0)), group.end)


class Group:
    """A worker group, from the request for its slots to its end."""

    def __init__(self, lending: Lending, owner: str, kind: GroupKind, start: StartGroup) -> None:
        self.lending, self.owner, self.kind = lending, owner, kind
        self.name, self.start, self.size = start.group, start.start, start.slots.per_trial
        self.world: World = lending.world
        self._is_ending = self._is_over = False
        self.nodes: list[Node] = []
        self.ranks: list[Rank] = []
        self._ends: dict[int, str] = {}
        self._signals: dict[tuple[int, int], Future] = {}
        self._withdraw = lending.cluster.ask(self.size, self._placed)

    @property
    def desk(self) -> Process:
        """The process with the desk that lends this group."""
        process: Process = self.lending.process
        return process

    def _placed(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.lending.report(self.owner, GroupPlaced(group=self.name, start=self.start))
        self.world.at(self.world.random.uniform(0.5, 3.0), self._start)

    def _start(self) -> None:
        if self._is_ending:
            return
        from tests.simulation.worker import Rank0, RankN

        for rank, node in enumerate(self.nodes):
            process: Rank = (RankN if rank else Rank0)(self, rank, node)
            self.ranks.append(process)
        for process in self.ranks:
            if process.node.is_alive:
                proceed(process, process.main())
            else:
                process.end()

    def signal(self, lease: int, rank: int) -> Future:
        """What a rank learns of this lease from the other ranks: None if one has failed."""
        return self._signals.setdefault((lease, rank), Future())

    def rank_ended(self, rank: int, how: str) -> None:
        """A rank's process has returned, with its error; or it has died: "!" and the cause."""
        self._ends[rank] = how
        for signal in list(self._signals.values()):
            self.world.at(self.world.delay(), signal.resolve, None)
        if not self._is_ending:
            self._is_ending = True
            self.world.at(0.1 if how.startswith("!") else 5.0, self._report_end)

    def _report_end(self) -> None:
        dead = {rank: how[1:] for rank, how in self._ends.items() if how.startswith("!")}
        error = "" if dead else next((how for how in self._ends.values() if how), "")
        self.lending.report(self.owner, ProcessesEnded(group=self.name, start=self.start, dead=dead, error=error))

    def end(self) -> None:
        """End its processes at once, and free its slots."""
        if self._is_over:
            return
        self._is_over = True
        was_ending, self._is_ending = self._is_ending, True
        self._withdraw()
        for process in self.ranks:
            process.end()
        self.lending.cluster.free([node for node in self.nodes if node.is_alive])
        if not was_ending:
            self.lending.report(self.owner, ProcessesEnded(group=self.name, start=self.start))


class Rank(Process):
    """A process of a worker group: serves one lease after another, as `dray.worker.serve`."""

    def __init__(self, group: Group, rank: int, node: Node) -> None:
        super().__init__(group.world, f"{group.name}.{group.start}/{rank}")
        self.group, self.rank, self.node = group, rank, node
        self.lease: Any = None
        self._has_returned = False

    def end(self) -> None:
        if self.alive:
            super().end()
            if not self._has_returned:
                cause = "" if self.node.is_alive else LOST_NODE
                self.group.rank_ended(self.rank, f"!{cause}")

    def main(self) -> Steps:
        group, number = self.group, 0
        self.desk = Connection(self, group.desk)
        self.driver: Connection | None = None
        self._endpoint: Any = None
        desk_call = partial(self.desk.call, "next_lease", group.owner, group.name, group.start, self.rank, group.size)
        error = ""
        try:
            self.desk.tell("arrived", group.owner, group.name, group.start, self.node.name, "")
            mine = None if self.rank else ("host", group.start)
            met = yield self.desk.call("address", group.start, mine)
            if tuple(met) != ("host", group.start):
                raise Failed(f"{self.name} meets its peers at {met}")
            while (granted := (yield desk_call(number, group.kind.shape))) is not None:
                _, endpoint, parameters = granted
                lease = self.world.kept(parameters)
                if lease.number <= number:
                    raise Failed(f"{self.name} got lease {lease.number} after lease {number}")
                number = lease.number
                if self.rank == 0:
                    self.desk.tell("begun", number)
                self.lease = lease
                departure = yield from self.serve(lease, self._connect(endpoint))
                self.lease = None
                self.desk.tell("leave", number, self.rank, departure)
        except Unreachable:
            error = f"{UNREACHABLE}the desk"
        self._has_returned = True
        if self.driver is not None:
            self.driver.close()
        self.desk.close()
        self.end()
        group.rank_ended(self.rank, error)

    def _connect(self, endpoint: Any) -> Connection:
        """The connection to the lease's driver; None: it is the desk's process."""
        if endpoint is None:
            return self.desk
        if self.driver is None or endpoint != self._endpoint:
            if self.driver is not None:
                self.driver.close()
            self._endpoint = endpoint
            process = next((each for each in self.world.processes if each.name == endpoint[0]), None)
            self.driver = Connection(self, process)
        return self.driver

    def serve(self, lease: Any, driver: Connection) -> Steps:
        raise NotImplementedError
