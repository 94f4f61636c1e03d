"""The nodes that a worker group requests: with a certain GPU type, and available in the cloud.

Ray's autoscaler starts machines of the type with the highest ``priority`` in the cluster's file; in the files that dray
ships, spot machines first. If a launch fails, it requests the same type again, forever. So a waiting group repeats its
request without the types whose launch failed recently, through a label selector of its placement group. The other types
are then started in the order of their priorities: for example on-demand machines while there are no spot machines.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Set

from dray.cluster.view import GPU_TYPE, NODE_ID, NODE_TYPE, Activity, AutoscalerLimits, ClusterView, NodeType
from dray.groups.capacity import slots_of
from dray.groups.slots import Slots

RETRY_S = 60.0  # how long after a failed launch groups avoid a type of machine, if there are other types
PATIENCE_S = 10.0
"""How long a group waits for a machine to be started for it before it requests something else; the autoscaler acts
every five seconds."""


class NodeChoice:
    """The nodes that a run's groups request. Pure, like `dray.groups.pool`.

    Args:
        slots: the slots of a group, with the GPU types in order of preference.
        limits: the autoscaler's limits; None without an autoscaler.

    Attributes:
        broken: ids of nodes that must get no groups.
    """

    def __init__(self, slots: Slots, limits: AutoscalerLimits | None) -> None:
        self.broken: Set[str] = frozenset()
        self._gpu_types, self._per_group = slots.gpu_types or ("",), slots.taken
        self._node_types = limits.types or () if limits else ()
        self._slots = {
            each.name: slots_of(each.resources, slots.kind, slots.cpus_per_slot) for each in self._node_types
        }
        self._activity = Activity(starting={}, failed={})
        self._failed_at: dict[str, float] = {}
        self._failed: dict[str, float] = {}  # times of recent failed launches, by type of machine

    def look(self, view: ClusterView, now: float) -> None:
        """Update from a view with the autoscaler's activity."""
        if view.activity is not None:
            self._activity = view.activity
            self._failed_at = {name: now - view.time + at for name, at in view.activity.failed_at.items()}

    def _forget_old_failures(self, now: float) -> None:
        self._failed = {name: at for name, at in self._failed_at.items() if at > now - RETRY_S}

    def first(self, now: float) -> dict[str, str]:
        """The label selector of a starting group: for the first GPU type whose launches don't all fail."""
        self._forget_old_failures(now)
        gpu_types = [each for each in self._gpu_types if self._oldest_if_all_failed(each) is None]
        return self._selector((gpu_types or self._gpu_types)[0])

    def others(self, waiting: Mapping[str, tuple[Mapping[str, str], float]], now: float) -> dict[str, dict[str, str]]:
        """New label selectors for waiting groups, by name, without groups that should keep waiting.
        `waiting`: their current selectors, and the seconds since their requests, in the order of their turns."""
        self._forget_old_failures(now)
        room = {name: float(self._activity.booting.get(name, 0) * slots) for name, slots in self._slots.items()}

        @functools.cache  # most of a thousand groups have the same request
        def other(asked: frozenset[tuple[str, str]], is_new: bool) -> tuple[Set[str], dict[str, str] | None]:
            labels = dict(asked)
            allowed = {each.name for each in self._with(labels.get(GPU_TYPE, ""))} - _excluded(labels)
            return allowed, self._other(labels, allowed, is_new=is_new)

        found = {}
        for name, (labels, waited_s) in waiting.items():
            allowed, instead = other(frozenset(labels.items()), waited_s < PATIENCE_S)
            if not self._take(room, allowed) and instead is not None:
                found[name] = instead
        return found

    def _take(self, room: dict[str, float], allowed: Set[str]) -> bool:
        """Take a group's slots from those of booting machines; False if there are too few."""
        needed: float = self._per_group
        if sum(room[name] for name in allowed) < needed:
            return False
        for name in sorted(allowed):
            taken = min(needed, room[name])
            room[name] -= taken
            needed -= taken
        return True

    def _other(self, labels: Mapping[str, str], allowed: Set[str], *, is_new: bool) -> dict[str, str] | None:
        """A new selector for a group with the selector `labels`, which allows these types of machines; None if the
        group should keep waiting. `is_new`: its request is less than `PATIENCE_S` old."""
        gpu_type, failed = labels.get(GPU_TYPE, ""), self._failed
        if allowed & failed.keys():
            if self._oldest_if_all_failed(gpu_type) is not None:
                gpu_type = self._next(gpu_type)
        elif is_new or any(self._activity.starting.get(name) for name in allowed):
            return None
        else:
            gpu_type = self._next(gpu_type)
        selector = self._selector(gpu_type)
        return None if selector == labels else selector

    def _next(self, gpu_type: str) -> str:
        """The GPU type to request after this one: if possible, one whose launches don't all fail."""
        at = self._gpu_types.index(gpu_type) + 1
        others = [*self._gpu_types[at:], *self._gpu_types[:at]]
        return next((each for each in others if self._oldest_if_all_failed(each) is None), others[0])

    def _selector(self, gpu_type: str) -> dict[str, str]:
        failed = self._failed
        # If the launches of all types failed, each is tried in turn.
        excluded = {each.name for each in self._of(gpu_type)} & failed.keys() - {self._oldest_if_all_failed(gpu_type)}
        found = {GPU_TYPE: gpu_type} if gpu_type else {}
        for label, names in ((NODE_TYPE, excluded), (NODE_ID, self.broken)):
            if names:
                found[label] = f"!in({','.join(sorted(names))})"
        return found

    def _with(self, gpu_type: str) -> list[NodeType]:
        """Types of machines with slots and with this GPU type."""
        types = [each for each in self._node_types if self._slots[each.name]]
        return [each for each in types if each.may_have((gpu_type,) if gpu_type else ())]

    def _of(self, gpu_type: str) -> list[NodeType]:
        """Types of machines with this GPU type that a selector can exclude."""
        return [each for each in self._with(gpu_type) if (each.labels or {}).get(NODE_TYPE) == each.name]

    def _oldest_if_all_failed(self, gpu_type: str) -> str | None:
        """The type of machine with this GPU type whose launch failed first, if the launches of all have failed
        recently; else None."""
        failed, names = self._failed, [each.name for each in self._of(gpu_type)]
        return min(names, key=failed.__getitem__) if names and failed.keys() >= set(names) else None


def _excluded(labels: Mapping[str, str]) -> set[str]:
    return set(labels.get(NODE_TYPE, "").removeprefix("!in(").removesuffix(")").split(","))
