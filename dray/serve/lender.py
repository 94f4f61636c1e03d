"""Starts the worker groups that experiments borrow, and ends those that none needs.

The server owns the desk and the groups. Each experiment is a process of its own, which owns its search: it registers at
the desk with what its trials need of a group, queues them there, and gets leases as if the groups were its own.
Experiments whose trials run on equal groups share them: these have the same `shape`.
"""

from __future__ import annotations

import functools
import itertools
import pickle
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from dray.cluster import autoscaler
from dray.cluster.autoscaler import Limits
from dray.desk.desk import SERVER
from dray.desk.messages import ClientAdded, Demand, GroupReady, Message, WorkerUnfit
from dray.desk.shares import Shares
from dray.display.counts import Counts
from dray.experiment.workers import Workers
from dray.groups.capacity import Capacity, most_slots
from dray.groups.pool import Groups
from dray.records.timeline import Timeline

STEP_S = 0.25
"""How often the demand is looked at, if nothing happens."""
LOOK_S = 5.0
"""How often the cluster's size is looked at."""
KINDS = ("gpu", "cpu")
MAX_UNKNOWN = 10_000.0
"""Slots of a cluster whose autoscaler does not say how far it can grow."""


@dataclass(slots=True)
class _Pool:
    """The groups of one shape.

    Attributes:
        kind: of their slots.
        wanted: how many there should be.
        mail: the call that returns the desk's next messages about them.
    """

    owner: str
    kind: str
    groups: Groups
    wanted: int
    mail: Any


class Lender:
    """The groups of a server.

    Args:
        desk: the desk's actor handle, whose first client is the server.
        own_cluster: the server has started the cluster on this machine.
        directory: for timelines and Ray Train's state.
        idle_s: after this time, groups end that no experiment needs.
        say: prints a line.

    Attributes:
        demands: what each experiment had and asked for at the last step, by the name of its run.
    """

    def __init__(
        self, desk: Any, *, own_cluster: bool, directory: Path, idle_s: float, say: Callable[[str], None]
    ) -> None:
        self._desk, self._own_cluster, self._directory, self._say = desk, own_cluster, directory, say
        self._idle_s = idle_s
        self.demands: dict[str, Demand] = {}
        self._pools: dict[str, _Pool] = {}
        self._numbers = itertools.count(1)
        self._shares = {kind: Shares() for kind in KINDS}
        self._held: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
        self._divided_at = time.monotonic()
        self._looked_at = -LOOK_S
        self._limits: Limits | None = None
        self._slots = dict.fromkeys(KINDS, 0.0)
        self._mail = desk.messages.remote(SERVER, {})
        for left in directory.glob(f"{SERVER}-*"):  # by a server that was killed
            shutil.rmtree(left, ignore_errors=True)

    @property
    def group_count(self) -> int:
        """How many groups there are, including those that start."""
        return sum(pool.groups.count for pool in self._pools.values())

    def slots(self) -> float:
        """GPUs of the cluster, or its CPUs if it has none."""
        return self._slots["gpu"] or self._slots["cpu"]

    def is_preempted(self, demand: Demand) -> bool:
        """Whether others have the slots of a group that an experiment waits for, or get them first."""
        return has_no_room(demand, self.demands.values(), self._slots[demand.kind])

    def step(self) -> None:
        """Read the desk's messages, and have as many groups of each shape as experiments should have.

        Raises:
            ray.exceptions.RayActorError: the desk has died.
        """
        mails = {self._mail: None, **{pool.mail: pool for pool in self._pools.values()}}
        ready, _ = ray.wait(list(mails), num_returns=1, timeout=STEP_S)
        for ref in ready:
            pool = mails[ref]
            messages = ray.get(ref)
            if pool is None:
                self._mail = self._desk.messages.remote(SERVER, {})
            else:
                pool.mail = self._desk.messages.remote(pool.owner, {})
            for message in messages:
                self._read(message, pool)
        self._look_at_cluster()
        self._divide()
        for shape, pool in list(self._pools.items()):
            pool.groups.reconcile()
            if pool.groups.error is not None:
                self._give_up(shape, pool.groups.error)
            elif not pool.groups.count and all(demand.shape != shape for demand in self.demands.values()):
                self._forget(self._pools.pop(shape))

    def _read(self, message: Message, pool: _Pool | None) -> None:
        match message:
            case ClientAdded():
                if message.shape not in self._pools:
                    self._pools[message.shape] = self._new_pool(message.shape, pickle.loads(message.workers))
            case WorkerUnfit():
                assert pool is not None, message
                self._give_up(next(shape for shape, each in self._pools.items() if each is pool), message.cause)
            case _:
                assert pool is not None, message
                pool.groups.on(message)
                if isinstance(message, GroupReady):
                    # The group works: what trials do to it is a matter of their experiments.
                    pool.groups.trial_left(message.group)

    def _forget(self, pool: _Pool) -> None:
        """Its groups have ended, and no experiment needs them."""
        self._desk.remove.remote(pool.owner)
        shutil.rmtree(self._directory / pool.owner, ignore_errors=True)

    def _give_up(self, shape: str, error: Exception) -> None:
        """Groups of this shape can't run trials: the experiments that need them get the error, and end."""
        self._say(f"no trials of this kind can run: {error}")
        pool = self._pools.pop(shape)
        pool.groups.end(at_once=True)
        self._forget(pool)
        self._desk.unfit.remote(shape, error)

    def _new_pool(self, shape: str, workers: Workers) -> _Pool:
        owner = f"{SERVER}-{next(self._numbers)}"
        ray.get(self._desk.add.remote(owner, shape=shape))
        directory = self._directory / owner
        directory.mkdir(parents=True, exist_ok=True)
        self._look_at_cluster()
        workers = replace(workers, directory=directory)  # not the experiment's, which others may outlive
        groups = Groups(
            functools.partial(workers.start, self._desk, owner=owner, lent=True),
            desk=self._desk,
            owner=owner,
            slots=workers.slots,
            capacity=Capacity(workers.slots, self._limits),
            elastic=None,
            own_cluster=False,
            runnable=lambda: self._pools[shape].wanted if shape in self._pools else 0,
            counts=Counts(),
            timeline=Timeline(directory),
            display=_Lines(self._say),
            experiment=directory,
            numbers=self._numbers,
            idle_s=self._idle_s,
            least=0,
        )
        return _Pool(owner, workers.slots.kind, groups, 0, self._desk.messages.remote(owner, {}))

    def _look_at_cluster(self) -> None:
        """Count the slots that the cluster has, or can have."""
        if time.monotonic() < self._looked_at + LOOK_S:
            return
        self._looked_at = time.monotonic()
        self._limits = None if self._own_cluster else autoscaler.limits()
        for kind in KINDS:
            slots = most_slots(kind, 1, self._limits)
            self._slots[kind] = MAX_UNKNOWN if slots is None else float(sum(slots))

    def _divide(self) -> None:
        """Divide the cluster's slots among the experiments, and count the groups of each shape."""
        demands: list[Demand] = ray.get(
            self._desk.demands.remote(
                {name: had for shares in self._shares.values() for name, had in shares.had.items()}
            )
        )
        self.demands = {demand.claim.name: demand for demand in demands}
        now, before = time.monotonic(), self._divided_at
        self._divided_at = now
        wanted = dict.fromkeys(self._pools, 0)
        for kind in KINDS:
            asking = [demand for demand in demands if demand.kind == kind and demand.claim.groups]
            weights = {demand.claim.name: demand.claim.weight for demand in asking}
            held = {name: slots for name, slots in self._held[kind].items() if name in weights}
            self._shares[kind].passed(now - before, held, weights)
            given = self._shares[kind].divide([demand.claim for demand in asking], self._slots[kind])
            self._held[kind] = {demand.claim.name: demand.has * demand.claim.size for demand in asking}
            for demand in asking:
                if demand.shape in wanted:
                    wanted[demand.shape] += given[demand.claim.name]
        for shape, pool in self._pools.items():
            pool.wanted = wanted[shape]
        self._make_room(demands)

    def _make_room(self, demands: Sequence[Demand]) -> None:
        """Have groups of a shape end for those of another that wait for their slots: at ends of trials; at once for a
        higher priority."""

        def priorities(shape: str) -> list[int]:
            return [demand.claim.priority for demand in demands if demand.shape == shape and demand.claim.groups]

        for shape, pool in self._pools.items():
            hungry = [
                min(priorities(other), default=0)
                for other, its in self._pools.items()
                if other != shape and its.groups.has_waiting and its.groups.count <= its.wanted
            ]
            if hungry and pool.groups.count > pool.wanted:
                pool.groups.make_room(at_once=min(hungry) < min(priorities(shape), default=0))

    def nodes_drain(self, nodes: Collection[str]) -> None:
        """These nodes will be removed: the trials on them save, and continue elsewhere. Called from any thread."""
        for pool in list(self._pools.values()):
            pool.groups.nodes_drain(nodes)

    def end(self) -> None:
        """End all groups."""
        for pool in self._pools.values():
            pool.groups.end(at_once=True)
            shutil.rmtree(self._directory / pool.owner, ignore_errors=True)


def has_no_room(demand: Demand, demands: Iterable[Demand], slots: float) -> bool:
    """Whether a group fits into none of the slots that others neither have nor, having a higher priority, wait for.

    Args:
        demand: asks for the group.
        demands: of all.
        slots: of this kind.
    """
    mine = demand.claim
    for each in demands:
        if each.kind == demand.kind and each.claim.name != mine.name:
            groups = max(each.has, each.claim.most) if each.claim.priority < mine.priority else each.has
            slots -= groups * each.claim.size
    return slots < mine.size


class _Lines:
    """What `Groups` needs of a display: it has no screen to show what groups wait for."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say

    def waits(self, status: str) -> None:
        """Nothing."""
