"""Simulated nodes and worker groups, corresponding to `dray.groups.lending` and `dray.groups.group` on Ray."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dray.cluster.view import ClusterView, RayNode
from dray.desk.connection import DeskUnreachable
from dray.desk.effects import After
from dray.desk.failure import LOST_NODE
from dray.desk.messages import Departure
from dray.groups.effects import ClusterSeen, EndGroup, GroupPlaced, LookAtCluster, ProcessesEnded, StartGroup
from dray.groups.lender import GroupKind, Lender, OnPool, PoolClosed, PoolOpened
from tests.simulation.world import Connection, Failed, Future, Process, Steps, World, proceed


class Node:
    """A machine."""

    def __init__(self, name: str, slots: int) -> None:
        self.name, self.slots, self.free, self.is_alive = name, slots, slots, True
        self.is_draining = False


class Cluster:
    """Nodes, their slots, and the owners of the slots."""

    def __init__(self, world: World, slots: tuple[int, ...]) -> None:
        self.world = world
        self.nodes = [Node(f"node-{number}", each) for number, each in enumerate(slots)]
        self._names = len(slots)
        self.waiting: list[Group] = []

    def view(self) -> ClusterView:
        """Return the resources that Ray reports."""
        return ClusterView(
            nodes=tuple(RayNode(each.name, each.name, True, {"CPU": float(each.slots)}, {}) for each in self.nodes),
            draining=frozenset(each.name for each in self.nodes if each.is_draining),
            free={"CPU": float(sum(each.free for each in self.nodes))},
        )

    def free(self, nodes: list[Node]) -> None:
        """Free these slots."""
        for node in nodes:
            node.free += 1
            if node.free > node.slots:
                raise Failed(f"{node.name} got back more slots than it has")
        self.world.at(self.world.delay(), self.place)

    def place(self) -> None:
        """Assign slots to waiting groups."""
        for group in list(self.waiting):
            nodes = [node for node in self.nodes if not node.is_draining for _ in range(node.free)][: group.size]
            if len(nodes) == group.size:
                self.waiting.remove(group)
                for node in nodes:
                    node.free -= 1
                group.placed(nodes)

    def kill(self, node: Node) -> None:
        """Let a machine lose power; another one replaces it some time later."""
        node.is_alive = False
        self.nodes.remove(node)
        for process in list(self.world.processes):
            if isinstance(process, Rank) and process.node is node:
                process.end()
        self.world.at(self.world.random.uniform(1.0, 60.0), self._boot, node.slots)

    def _boot(self, slots: int) -> None:
        self._names += 1
        self.nodes.append(Node(f"node-{self._names}", slots))
        self.place()


class Lending:
    """Starts and ends the groups that a `Lender` decides on, like `dray.groups.lending.Lending`.

    Args:
        process: the driver's or the server's `Loop`.
        end_s: maximum time for groups to end by themselves.
        ends: called with the name of each group that has ended.
    """

    def __init__(
        self,
        process: Any,
        cluster: Cluster,
        lender: Lender,
        *,
        end_s: float,
        ends: Callable[[str], None] = lambda group: None,
    ) -> None:
        self._note_end = ends
        self.process, self.world, self.cluster, self._lender, self._end_s = (
            process,
            cluster.world,
            cluster,
            lender,
            end_s,
        )
        self._kinds: dict[str, GroupKind] = {}
        self._groups: dict[str, dict[int, Group]] = {}
        self.ended = Future()

    def perform(self, effect: Any) -> None:
        later, lender, view = self.process.later, self._lender, self.cluster.view
        match effect:
            case After(seconds, method, args):
                later(seconds, lender.send, method, *args)
            case PoolOpened(owner, kind):
                self._kinds[owner], self._groups[owner] = kind, {}
            case OnPool(owner, StartGroup() as start):
                self._groups[owner][start.start] = Group(self, owner, self._kinds[owner], start)
            case OnPool(owner, EndGroup(start=number)):
                if (group := self._groups.get(owner, {}).pop(number, None)) is not None:
                    group.end()
            case OnPool(owner, LookAtCluster()):
                later(self.world.delay(), lambda: lender.on(owner, ClusterSeen(view())))
            case PoolClosed(owner):  # leaves its groups time to end by themselves
                later(self._end_s, self._end_all, owner)
            case LookAtCluster():
                later(self.world.delay(), lambda: lender.look(view()))

    def report(self, owner: str, event: GroupPlaced | ProcessesEnded) -> None:
        """Handle a report of a group."""
        if isinstance(event, ProcessesEnded):
            self.process.post(self._note_end, event.group)
        self.process.post(self._lender.on, owner, event)

    def end(self) -> None:
        """End all groups. In the event loop."""
        self._lender.end()
        if not self._groups:
            self.ended.resolve()

    def end_at_once(self) -> None:
        """End all groups, since no more effects are carried out."""
        for owner in list(self._groups):
            self._end_all(owner)
        self.ended.resolve()

    def _end_all(self, owner: str) -> None:
        for group in self._groups.pop(owner, {}).values():
            group.end()
        if not self._groups:
            self.ended.resolve()

    def lost(self) -> None:
        """End the groups some time after the death of the process that owns them."""
        for groups in self._groups.values():
            for group in groups.values():
                self.world.at(self.world.random.choice((0.0, 0.1, 10.0)), group.end)


class Group:
    """A worker group, from the request for its slots to its end."""

    def __init__(self, lending: Lending, owner: str, kind: GroupKind, start: StartGroup) -> None:
        self.lending, self.owner, self.shape, self.world = lending, owner, kind.shape, lending.world
        self.name, self.start, self.size = start.group, start.start, start.slots.per_trial
        self._is_ending = self._is_over = False
        self._nodes: list[Node] = []
        self.ranks: list[Rank] = []
        self._ends: dict[int, str] = {}
        self._signals: dict[tuple[int, int], Future] = {}
        lending.cluster.waiting.append(self)
        self.world.at(self.world.delay(), lending.cluster.place)

    def placed(self, nodes: list[Node]) -> None:
        """Start the group, which has its slots."""
        self._nodes = nodes
        self.lending.report(self.owner, GroupPlaced(group=self.name, start=self.start))
        self.world.at(self.world.random.uniform(0.5, 3.0), self._start)

    def _start(self) -> None:
        if self._is_ending:
            return
        from tests.simulation.worker import Rank0, RankN

        for rank, node in enumerate(self._nodes):
            process: Rank = (RankN if rank else Rank0)(self, rank, node)
            self.ranks.append(process)
        for process in self.ranks:
            if process.node.is_alive:
                proceed(process, process.main())
            else:
                process.end()

    def signal(self, lease: int, rank: int) -> Future:
        """Return the other ranks' data of this lease; None if one has failed."""
        return self._signals.setdefault((lease, rank), Future())

    def rank_ended(self, rank: int, how: str) -> None:
        """Handle the end of a rank's process, with its error, or "!" and the cause of its death."""
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
        if self in self.lending.cluster.waiting:
            self.lending.cluster.waiting.remove(self)
        for process in self.ranks:
            process.end()
        self.lending.cluster.free([node for node in self._nodes if node.is_alive])
        if not was_ending:
            self.lending.report(self.owner, ProcessesEnded(group=self.name, start=self.start))


class Rank(Process):
    """A process of a worker group, which serves one lease after another, like `dray.worker.serve`."""

    def __init__(self, group: Group, rank: int, node: Node) -> None:
        super().__init__(group.world, f"{group.name}.{group.start}/{rank}")
        self.group, self.rank, self.node = group, rank, node
        self._has_returned = False
        self._driver: Connection | None = None
        self._endpoint: Any = None
        self._code: Any = None  # the experiment and the code that are loaded
        self._is_reused = False  # it has run a trial, or had other code

    def end(self) -> None:
        if self.alive:
            super().end()
            if not self._has_returned:
                self.group.rank_ended(self.rank, f"!{'' if self.node.is_alive else LOST_NODE}")

    def main(self) -> Steps:
        group, number, error = self.group, 0, ""
        desk = self.desk = Connection(self, group.lending.process)
        next_lease = partial(desk.call, "next_lease", group.owner, group.name, group.start, self.rank, group.size)
        try:
            desk.tell("arrived", group.owner, group.name, group.start, self.node.name, "", "CPU")
            mine = None if self.rank else ("host", group.start)
            met = yield desk.call("address", group.start, mine)
            if tuple(met) != ("host", group.start):
                raise Failed(f"{self.name} meets its peers at {met}")
            while (granted := (yield next_lease(number, group.shape))) is not None:
                _, endpoint, parameters = granted
                lease = self.world.kept(parameters)
                if lease.bind.lease <= number:
                    raise Failed(f"{self.name} got lease {lease.bind.lease} after lease {number}")
                number = lease.bind.lease
                if self.rank == 0:
                    desk.tell("begun", number)
                code = lease.experiment.name, lease.bind.code
                self._is_reused = self._is_reused or self._code not in (None, code)
                if self._is_reused and self._code != code and lease.experiment.setup.once == "import":
                    self._code = code, "not"
                    desk.tell("leave", number, self.rank, Departure(outcome="unloaded", alone=True))
                    continue
                self._code = code
                departure = yield from self.serve(lease, self._connect(endpoint))
                self._is_reused = True
                desk.tell("leave", number, self.rank, departure)
        except DeskUnreachable:
            error = f"{DeskUnreachable.__name__}: the desk"
        self._has_returned = True
        if self._driver is not None:
            self._driver.close()
        desk.close()
        self.end()
        group.rank_ended(self.rank, error)

    def _connect(self, endpoint: Any) -> Connection:
        """Return the connection to the lease's driver; None if that is the desk's process."""
        if endpoint is None:
            return self.desk
        if self._driver is None or endpoint != self._endpoint:
            if self._driver is not None:
                self._driver.close()
            self._endpoint = endpoint
            process = next((each for each in self.world.processes if each.name == endpoint[0]), None)
            self._driver = Connection(self, process)
        return self._driver

    def serve(self, lease: Any, driver: Connection) -> Steps:
        raise NotImplementedError
