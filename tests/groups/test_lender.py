"""How many groups of each kind there are, of those that several experiments share; nodes and times are given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import pytest

from dray.display.counts import Counts
from dray.groups.effects import ClusterSeen, GroupPlaced, LookAtCluster, StartGroup
from dray.groups.lender import LOOK_S, GroupKind, Lender, LenderEffect, OnPool, PoolClosed, PoolOpened, has_no_room
from dray.groups.pool import IDLE_S, GroupsPlan
from dray.leases.effects import Reply, Tell
from dray.leases.lease import Lease
from dray.leases.messages import Departure, GroupEnded, Unfit, WorkerUnfit
from dray.leases.shares import Demand
from dray.rpc.wire import pack, unpack
from tests.groups.clusters import cluster, cpus

M = TypeVar("M")


KIND = GroupKind(slots=cpus(), environment={}, deterministic=False, collective_timeout_s=600.0, reuse_workers=True)
OTHER = replace(KIND, environment={"A": "1"})


class Scene:
    """A server's lender on a cluster with so many CPUs. Groups that get one are up at once, and ask for a trial."""

    def __init__(self, slots: int) -> None:
        self.slots, self.now = slots, 0.0
        self.effects: list[LenderEffect] = []
        self.waiting: list[tuple[str, StartGroup]] = []
        self.up: dict[str, tuple[str, int]] = {}
        """Owner and start of the groups that are up."""
        self.lender = Lender(
            cluster({"CPU": float(slots)}),
            lambda: self.now,
            plan=GroupsPlan(is_servers=True),
            emit=self.effects.append,
            counts=Counts(),
        )

    def add(self, name: str, trials: int, of: GroupKind = KIND, **share: Any) -> None:
        """An experiment with so many trials."""
        self.lender.add(name, of, ("host", 1, b"key"), share)
        self.lender.desk.enqueue(name, range(trials), False)

    def step(self, passes_s: float = 1.0) -> None:
        """Time passes; groups start and end, and begin the trials that they get."""
        for _ in range(10):
            self.lender.step()
            self.now += passes_s / 10
            for each in self.take(OnPool):
                if isinstance(each.effect, StartGroup):
                    self.waiting.append((each.owner, each.effect))
                elif isinstance(each.effect, LookAtCluster):
                    self.lender.on(each.owner, ClusterSeen(cluster(*[{"CPU": 1.0}] * self.slots)))
            while self.waiting and len(self.up) < self.slots:
                owner, start = self.waiting.pop(0)
                self.up[start.group] = owner, start.start
                self.lender.on(owner, GroupPlaced(group=start.group, start=start.start))
                self.ask(start.group, 0)
            for client in self.lender.desk.clients.values():
                for lease in list(client.leases):
                    self.lender.desk.bind(client.name, lease, b"")
                    self.lender.desk.begun(None, lease)
            for reply in self.take(Reply):
                if reply.value is None and (ended := self.up.pop(str(reply.call), None)) is not None:
                    self.lender.on(ended[0], GroupEnded(group=str(reply.call), start=ended[1]))

    def ask(self, group: str, after: int) -> None:
        owner, start = self.up[group]
        shape = next(each.kind.shape for each in self.effects if isinstance(each, PoolOpened) and each.owner == owner)
        self.lender.desk.next_lease(group, owner, group, start, 0, 1, after, shape)

    def take(self, kind: type[M]) -> list[M]:
        found = [each for each in self.effects if isinstance(each, kind)]
        self.effects[:] = [each for each in self.effects if not isinstance(each, kind)]
        return found

    def leases(self, client: str) -> list[Lease]:
        return list(self.lender.desk.clients[client].leases.values())

    def has(self) -> dict[str, int]:
        """How many groups train each experiment's trials."""
        return {name: len(self.leases(name)) for name in self.lender.demands}

    def finish(self, client: str) -> None:
        """An experiment's trials complete, and their groups ask for others."""
        for lease in self.leases(client):
            self.lender.desk.leave(None, lease.number, 0, Departure(outcome="completed"))
            self.ask(lease.group.name, lease.number)


def test_experiments_of_one_kind_share_as_many_groups_as_slots() -> None:
    scene = Scene(4)
    scene.add("a", 8)
    scene.add("b", 8)
    scene.step()
    assert len(scene.take(PoolOpened)) == 1
    assert scene.has() == {"a": 2, "b": 2}
    assert (scene.lender.count, scene.lender.ready_count) == (4, 4)


def test_another_kind_gets_its_share_as_trials_of_the_first_end() -> None:
    scene = Scene(4)
    scene.add("a", 100)
    scene.step()
    assert scene.has() == {"a": 4}
    scene.add("b", 100, OTHER)
    scene.step()
    assert scene.has() == {"a": 4, "b": 0}
    for _ in range(6):
        scene.finish("a")
        scene.step()
    assert scene.has() == {"a": 2, "b": 2}


def test_another_kind_of_a_higher_priority_gets_its_slots_at_once() -> None:
    scene = Scene(4)
    scene.add("a", 100)
    scene.step()
    scene.add("b", 1, OTHER, priority=1)
    scene.step()
    assert [lease.state for lease in scene.leases("a")] == ["running"] * 3 + ["moving"]


def test_groups_that_nobody_needs_end_and_their_pool_closes() -> None:
    scene = Scene(2)
    scene.add("a", 2)
    scene.step()
    scene.finish("a")
    scene.lender.desk.remove("a")
    scene.step()
    assert scene.lender.count == 2, "for the next experiment"
    scene.step(2 * IDLE_S)
    scene.step()
    assert (scene.lender.count, len(scene.take(PoolClosed))) == (0, 1)


def test_only_experiments_of_an_unfit_kind_of_group_hear_of_it() -> None:
    scene = Scene(4)
    scene.add("a", 1)
    scene.add("b", 1, OTHER)
    scene.step()
    [lease] = scene.leases("a")
    why = Unfit(message="no torch")
    scene.lender.desk.broken("call", lease.group.owner.name, lease.group.name, why)
    heard = [each for each in scene.take(Tell) if isinstance(each.message, WorkerUnfit) and each.client in "ab"]
    assert [each.client for each in heard] == ["a"]
    assert scene.take(PoolClosed) == [PoolClosed(lease.group.owner.name, "no torch")]
    scene.step()
    assert len(scene.leases("b")) == 1


def test_a_shared_cluster_is_looked_at_now_and_then_and_may_grow() -> None:
    scene = Scene(1)
    scene.add("a", 8)
    scene.step(LOOK_S)
    scene.take(LookAtCluster)
    scene.lender.step()
    assert scene.take(LookAtCluster)
    assert scene.has() == {"a": 1}
    scene.lender.look(cluster({"CPU": 1.0}, {"CPU": 2.0}))
    scene.slots = 3
    scene.step(60.0)
    scene.step(60.0)
    assert (scene.lender.slots(), scene.has()) == (3, {"a": 3})


def demand(name: str, *, has: int = 0, priority: int = 42, size: float = 1, kind: str = "cpu") -> Demand:
    """The demand of an experiment that could use one more group than it has."""
    return Demand(name=name, groups=has + 1, has=has, size=size, priority=priority, shape="shape", kind=kind)


MINE, LARGE = demand("mine"), demand("large", size=2)


@pytest.mark.parametrize(
    ("mine", "others", "no_room"),
    [
        (MINE, [demand("other", has=2)], True),
        (MINE, [demand("other", has=1)], False),  # its worker has died
        (MINE, [demand("other"), demand("third")], False),
        (LARGE, [demand("other", has=1)], True),
        (MINE, [demand("other", has=2, kind="gpu")], False),
        (MINE, [demand("urgent", has=1, priority=1)], True),
        (MINE, [demand("later", has=1, priority=99)], False),
    ],
)
def test_a_group_has_room_beside_others_and_higher_priorities(
    mine: Demand, others: list[Demand], no_room: bool
) -> None:
    assert has_no_room(mine, [mine, *others], 2) is no_room


def test_a_group_does_not_fit_if_others_of_its_account_have_its_slots() -> None:
    mine, mate = (Demand(name=name, groups=2, size=2, unit=2, account="agent", account_slots=2) for name in "ab")
    for has, account, no_room in ((1, "agent", False), (2, "agent", True), (2, "other", False)):
        assert has_no_room(mine, [mine, replace(mate, has=has, account=account)], 64) is no_room


def test_a_received_kind_keeps_its_shape_and_rays_environment() -> None:
    env = {"py_modules": ["gcs://dray.zip"], "env_vars": {"A": "1"}}
    sent = replace(KIND, slots=replace(cpus(), runtime_env=env))
    got = unpack(pack(sent))
    assert got.slots.env_for_ray == env
    assert replace(got, slots=replace(got.slots, runtime_env=env)).shape == sent.shape
