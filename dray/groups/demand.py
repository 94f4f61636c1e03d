"""How many worker groups an experiment requests from a cluster, and what those that are not up wait for.

A group that starts requests its resources with a placement group of its own. An autoscaler sees nothing else, so the
demand ends with the driver, however that ends. Demand is thus the number of groups that are started: as many as there
are trials, and no more than the cluster can ever have room for. Groups without a trial are given back.
"""

from __future__ import annotations

import math
import time

import ray

from dray.cluster import autoscaler
from dray.cluster.connection import groups_in, most_slots, slots_now, slots_of
from dray.cluster.nodes import nodes
from dray.groups.group import Slots

IDLE_S = 15.0
"""How long there must have been more groups than trials before one is given back: about as long as a start takes, so
that a wrong guess costs at most twice as much as the right one (ski rental; Karlin et al. 1988)."""
SAID_AFTER_S = 10.0
"""How long a group must have waited for nodes before that is said: it takes less than a second if there are nodes, and
an autoscaler looks every five."""
CPUS_OF_A_START = 4
"""CPUs that a node must have for each group that starts there at the same time."""
LOOK_S = 5.0
"""How often the autoscaler is asked what it is doing."""


class Demand:
    """Args:
    slots: the slots of a group.
    limits: what an autoscaler may start; None without an autoscaler.
    most: how many slots all groups may have together; None: no limit.
    """

    def __init__(self, slots: Slots, limits: autoscaler.Limits | None, most: int | None = None) -> None:
        self._slots, self._limits = slots, limits
        self._most = math.inf if most is None else most * slots.shared_by // slots.per_trial
        self._too_many_since: float | None = None
        self._waits_since: float | None = None
        self._looked_at = -LOOK_S
        self._told: object = None
        self.now = ""
        """What groups wait for, in short; empty if none waits."""

    def room(self) -> int:
        """How many groups the cluster has room for, at least one."""
        return self._in(slots_now(self._slots.kind, self._slots.cpus_per_slot))

    def at_once(self) -> int:
        """How many groups may start at the same time: each worker takes several seconds of its node's CPUs."""
        kind, cpus = self._slots.kind, self._slots.cpus_per_slot
        there = [node.resources for node in nodes() if slots_of(node.resources, kind, cpus)]
        return max(1, sum(max(1, int(each["CPU"] // CPUS_OF_A_START)) for each in there))

    def most(self, wanted: int) -> int:
        """How many of the `wanted` groups fit, at least one, if the cluster grows as far as it can."""
        slots = most_slots(self._slots.kind, self._slots.cpus_per_slot, self._limits)
        return int(min(wanted, self._most if slots is None else self._in(slots)))

    def _in(self, slots: list[int]) -> int:
        """How many groups fit on nodes with these numbers of slots."""
        there = groups_in(slots, self._slots.per_trial, self._slots.placement_strategy) * self._slots.shared_by
        return int(max(1, min(there, self._most)))

    def too_many(self, groups: int, trials: int) -> int:
        """How many groups have had no trial for so long that they should be given back.

        Args:
            groups: how many there are.
            trials: how many can run now.
        """
        spare, now = groups - max(1, trials), time.monotonic()
        if spare <= 0:
            self._too_many_since = None
        elif self._too_many_since is None:
            self._too_many_since = now
        elif now - self._too_many_since > IDLE_S:
            self._too_many_since = None
            return spare
        return 0

    def wait(self, waiting: int, groups: int) -> str:
        """What groups wait for, in one line, if that is news; otherwise empty.

        Args:
            waiting: how many of the groups have no resources.
            groups: how many there are.
        """
        now = time.monotonic()
        if not waiting:
            self._waits_since, self._told, self.now = None, None, ""
            return ""
        self._waits_since = now if self._waits_since is None else self._waits_since
        if now - self._waits_since < SAID_AFTER_S:
            return ""
        if self._told is not None and now - self._looked_at < LOOK_S:
            return ""
        self._looked_at = now
        which = f"{waiting} of {groups} worker groups wait" if groups > 1 else "the worker group waits"
        if self._limits is None:
            doing, news, short = "no autoscaler is running to start more", "", ""
        else:
            told = autoscaler.doing()
            doing, news, short = str(told), str(sorted(told.failed)), told.short()
        self.now = f"{which} for nodes{short and f' ({short})'}"
        if self._told == news:
            return ""
        self._told = news
        return f"{which} for nodes. Each needs {self._slots}. The cluster has {_has()}; {doing}"


def _has() -> str:
    """What the cluster has, and how much of it is free."""
    has, free = ray.cluster_resources(), ray.available_resources()
    kinds = [f"{has[kind]:g} {kind}s ({free.get(kind, 0):g} free)" for kind in ("GPU", "CPU") if has.get(kind)]
    there = len(nodes())
    return f"{' and '.join(kinds) or 'no CPUs'} on {there} node{'s' * (there != 1)}"
