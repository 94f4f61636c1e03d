"""The lender of worker groups: a desk, and a pool of groups of each kind.

A driver lends its own groups to its one experiment, a server lends its groups to all experiments. The number of groups
of each kind follows from the waiting trials, and from each experiment's share.

Pure, with a given clock: it passes effects to `emit`, and `dray.groups.lender_shell` carries them out.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dray.cluster.view import ClusterView
from dray.display.counts import Counts
from dray.groups.capacity import most_slots, slots_now
from dray.groups.effects import GiveUp, GroupsEffect, GroupsEvent, LookAtCluster, NodesDrain
from dray.groups.pool import Groups, GroupsPlan
from dray.groups.slots import Slots
from dray.leases import effects as lease_effects
from dray.leases.desk import CALLS, Desk
from dray.leases.effects import Tell
from dray.leases.messages import GroupEnded, Unfit, WorkerUnfit
from dray.leases.shares import Demand, Shares, fits_account, most_groups
from dray.rpc.calls import Call, PeerUnreachable
from dray.rpc.wire import Malformed, checked, wire

LOOK_S = 5.0
"""How often to look at the size of a cluster that several experiments share."""
KINDS = ("gpu", "cpu")
MAX_UNKNOWN = 10_000.0
"""Assumed slots of a cluster whose autoscaler does not report its limits."""


@wire
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKind:
    """A kind of groups, which can run each other's trials.

    With ``reuse_workers: false``, processes are new for each trial, even after a trial of another experiment. `slots`:
    the slots of a group, or of the smallest group if it is elastic. `environment`: variables for its processes.
    """

    slots: Slots
    environment: Mapping[str, str | None] = field(repr=False)
    deterministic: bool
    collective_timeout_s: float
    reuse_workers: bool

    @property
    def shape(self) -> str:
        """A hash that is the same for equal kinds."""
        parts = (
            self.slots,
            sorted(self.environment.items()),
            self.deterministic,
            self.collective_timeout_s,
            self.reuse_workers,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------- effects
@dataclass(frozen=True, slots=True)
class PoolOpened:
    """An owner may have groups of a kind from now on."""

    owner: str
    kind: GroupKind


@dataclass(frozen=True, slots=True)
class OnPool:
    """An effect of an owner's groups."""

    owner: str
    effect: GroupsEffect


@dataclass(frozen=True, slots=True)
class PoolClosed:
    """An owner's groups must end. `error`: the reason why they can't run trials; "" if no trial needs them."""

    owner: str
    error: str = ""


LenderEffect = lease_effects.Effect | LookAtCluster | PoolOpened | OnPool | PoolClosed


@dataclass(slots=True)
class _Pool:
    """The groups of one kind, and their wanted number."""

    owner: str
    shape: str
    groups: Groups
    wanted: int = 0


class Lender:
    """A desk and its groups.

    Args:
        view: the current view of the cluster.
        clock: returns the time in seconds, and does not go backwards.
        plan: limits on the number of groups.
        emit: called with each effect, in order.
        counts: counts groups that start or are lost.

    Attributes:
        desk: the desk that lends the groups.
        demands: the demand of each experiment at the last step, by the name of its run.
        given: the number of groups that each is to have.
    """

    def __init__(
        self,
        view: ClusterView,
        clock: Callable[[], float],
        *,
        plan: GroupsPlan,
        emit: Callable[[LenderEffect], None],
        counts: Counts,
    ) -> None:
        self._clock, self._emit, self._plan, self._counts = clock, emit, plan, counts
        self.desk = Desk(self._from_desk)
        self.demands: dict[str, Demand] = {}
        self.given: dict[str, int] = {}
        self._pools: dict[str, _Pool] = {}
        self._owners: dict[str, _Pool] = {}
        self._owner_numbers, self._names = itertools.count(), itertools.count()
        self._starts = itertools.count(1)
        self._shares = {kind: Shares() for kind in KINDS}
        self._held: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
        self._divided_at = clock()
        self.look(view)

    # ------------------------------------------------------------------ clients
    def add(self, client: str, kind: GroupKind, endpoint: Any, share: Mapping[str, Any]) -> None:
        """Add an experiment's run with a new name. Its trials report at `endpoint`, or, if None, at the desk's own.
        `share`: priority, weight and max_slots, as in `dray.leases.shares.Claim`."""
        slots = kind.slots
        size, unit = slots.taken * slots.unit, slots.unit
        if (shape := kind.shape) not in self._pools:
            owner = f"groups-{next(self._owner_numbers)}"
            self.desk.add(owner, is_owner=True)
            groups = Groups(
                owner,
                slots,
                self._plan,
                self.view,
                self._clock(),
                desk=self.desk,
                emit=lambda effect: self._from_pool(owner, effect),
                counts=self._counts,
                names=self._names,
                starts=self._starts,
            )
            self._pools[shape] = self._owners[owner] = _Pool(owner, shape, groups)
            self._emit(PoolOpened(owner, kind))
        self.desk.add(client, endpoint=endpoint, shape=shape, kind=slots.kind, size=size, unit=unit, **share)

    def take(self, call: Call) -> None:
        """Handle a worker's call."""
        if call.method in CALLS:
            checked(getattr(self.desk, call.method), call, *call.args)
        else:
            raise Malformed(f"there is no method {call.method:.80}")

    def send(self, method: str, *args: Any) -> None:
        """Call a method of the desk."""
        getattr(self.desk, method)(*args)

    # ------------------------------------------------------------------ groups
    @property
    def count(self) -> int:
        """The number of groups, including those that are starting."""
        return sum(pool.groups.count for pool in self._pools.values())

    @property
    def ready_count(self) -> int:
        """The number of groups that have started."""
        return sum(pool.groups.ready_count for pool in self._pools.values())

    def on(self, owner: str, event: GroupsEvent) -> None:
        """Handle an event about an owner's groups, reported by the shell."""
        if isinstance(event, GroupEnded):
            if event.error.startswith(f"{PeerUnreachable.__name__}: "):  # no other process would reach it either
                why = Unfit(message=event.error.partition(": ")[2], resumable=True)
                self.desk.broken(None, owner, event.group, why)
            self.desk.group_ended(owner, event)
        elif (pool := self._owners.get(owner)) is not None:
            pool.groups.on(event, self._clock())

    def nodes_drain(self, nodes: Iterable[str]) -> None:
        """Handle the announcement that nodes (Ray's ids) will be removed: their trials save, and continue elsewhere."""
        for pool in self._owners.values():
            pool.groups.on(NodesDrain(frozenset(nodes)), self._clock())

    def look(self, view: ClusterView) -> None:
        """Set the current view of the cluster."""
        self.view, self._looked_at = view, self._clock()
        found = {kind: most_slots(view, kind, 1) for kind in KINDS}
        self._slots = {kind: MAX_UNKNOWN if each is None else float(sum(each)) for kind, each in found.items()}

    def slots(self) -> float:
        """The cluster's GPUs, or its CPUs if it has no GPUs."""
        return self._slots["gpu"] or self._slots["cpu"]

    def free_slots(self) -> tuple[float, float, str]:
        """The slots of the cluster's current nodes, how many of them no trial uses, and their kind."""
        kind = "gpu" if self._slots["gpu"] else "cpu"
        slots = self.slots_up()[kind]
        busy = sum(demand.has * demand.size for demand in self.demands.values() if demand.kind == kind)
        return slots, max(slots - busy, 0.0), kind

    def most_slots(self, kind: str) -> float:
        """The cluster's slots of a kind, after it has scaled up."""
        return self._slots[kind]

    def slots_up(self) -> dict[str, float]:
        """The slots of the nodes that are up, by kind."""
        return {kind: float(sum(slots_now(self.view, kind, 1))) for kind in KINDS}

    def supposed(self, demands: Collection[Demand]) -> dict[str, int]:
        """The number of groups that each experiment would have with these demands: divided on a copy of the shares."""
        asking = [demand for demand in demands if demand.groups]
        given: dict[str, int] = {}
        for kind in KINDS:
            shares = copy.deepcopy(self._shares[kind])
            given |= shares.divide((each for each in asking if each.kind == kind), self._slots[kind])
        return given

    def groups_wait(self, demand: Demand) -> str:
        """What the groups of a demand wait for: nodes, or their processes."""
        pool = self._pools.get(demand.shape)
        return (pool and pool.groups.node_wait) or "its worker processes start"

    def is_preempted(self, demand: Demand) -> bool:
        """Whether other experiments have, or get first, the slots that a demand waits for."""
        return has_no_room(demand, self.demands.values(), self._slots[demand.kind])

    def step(self) -> None:
        """Adjust the number of groups of each kind. Call it after events, and periodically."""
        if self._plan.is_servers:
            self._divide()
        else:
            for pool in self._pools.values():
                clients = (client for client in self.desk.clients.values() if client.shape == pool.shape)
                pool.wanted = sum(most_groups(each.groups, each.size, each.max_slots) for each in clients)
        for pool in list(self._owners.values()):
            pool.groups.reconcile(pool.wanted, self._clock())
            if not pool.groups.count and all(client.shape != pool.shape for client in self.desk.clients.values()):
                self._close(pool)

    def end(self) -> None:
        """End all groups: those that have not started at once, the others when their ranks ask for leases."""
        for pool in list(self._owners.values()):
            self._close(pool)

    def _close(self, pool: _Pool, error: str = "") -> None:
        del self._owners[pool.owner], self._pools[pool.shape]
        pool.groups.close()
        self.desk.close(pool.owner)
        self._emit(PoolClosed(pool.owner, error))

    def _give_up(self, pool: _Pool, why: Unfit) -> None:
        """Close a kind of groups that can't run trials. The experiments that need it get the error, and end."""
        if pool.owner in self._owners:
            self._close(pool, why.message or str(why.faults[0]))
            self.desk.unfit(pool.shape, why)

    def _from_desk(self, effect: lease_effects.Effect) -> None:
        self._emit(effect)
        if isinstance(effect, Tell) and (pool := self._owners.get(effect.client)) is not None:
            if isinstance(effect.message, WorkerUnfit):
                self._give_up(pool, effect.message.why)
            else:
                pool.groups.on(effect.message, self._clock())

    def _from_pool(self, owner: str, effect: GroupsEffect) -> None:
        if isinstance(effect, GiveUp):
            self._give_up(self._owners[owner], Unfit(message=effect.error, resumable=True))
        else:
            self._emit(OnPool(owner, effect))

    # ------------------------------------------------------------------ shares
    def _divide(self) -> None:
        """Divide the cluster's slots among the experiments, and count the groups of each kind."""
        now = self._clock()
        if now >= self._looked_at + LOOK_S:
            self._looked_at = now
            self._emit(LookAtCluster(waiting=False))
        demands = self.desk.demands({name: had for shares in self._shares.values() for name, had in shares.had.items()})
        self.demands = {demand.name: demand for demand in demands}
        given: dict[str, int] = {}
        passed, self._divided_at = now - self._divided_at, now
        for kind in KINDS:
            given |= self._shared(kind, passed)
        self.given = given
        for shape, pool in self._pools.items():
            pool.wanted = sum(given.get(demand.name, 0) for demand in demands if demand.shape == shape)
        if len(self._pools) > 1:
            self._make_room(demands)

    def _shared(self, kind: str, passed: float) -> dict[str, int]:
        """The number of groups of each experiment on slots of this kind. `passed`: seconds since the last division."""
        shares = self._shares[kind]
        asking = [demand for demand in self.demands.values() if demand.kind == kind and demand.groups]
        weights = {demand.name: demand.weight for demand in asking}
        shares.passed(passed, {name: slots for name, slots in self._held[kind].items() if name in weights}, weights)
        self._held[kind] = {demand.name: demand.has * demand.size for demand in asking}
        return shares.divide(asking, self._slots[kind])

    def _make_room(self, demands: Iterable[Demand]) -> None:
        """End groups of one kind for waiting groups of another: at the ends of trials, or at once for a higher
        priority."""

        def priorities(shape: str) -> list[int]:
            return [demand.priority for demand in demands if demand.shape == shape and demand.groups]

        for shape, pool in self._pools.items():
            waiting = [
                min(priorities(other), default=0)
                for other, others in self._pools.items()
                if other != shape and others.groups.has_waiting and others.groups.count <= others.wanted
            ]
            if waiting and pool.groups.count > pool.wanted:
                pool.groups.make_room(at_once=min(waiting) < min(priorities(shape), default=0))


def has_no_room(demand: Demand, demands: Iterable[Demand], slots: float) -> bool:
    """Whether a group of a demand does not fit into the slots of its kind that remain after the groups of others, and
    after the groups that others with a higher priority wait for; or into those that others leave of its account."""
    others = [each for each in demands if each.name != demand.name]
    if not fits_account(
        demand, sum(each.has * each.size / each.unit for each in others if each.account == demand.account)
    ):
        return True
    for each in others:
        if each.kind == demand.kind:
            groups = max(each.has, each.most) if each.priority < demand.priority else each.has
            slots -= groups * each.size
    return slots < demand.size
