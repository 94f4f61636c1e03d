"""Which nodes a worker group asks for: those with a type of GPU, and those that the cloud has.

Ray's autoscaler starts machines of the type with the highest ``priority`` in the cluster's file; in the files that dray
ships, spot machines first. If a launch fails, it asks for the same type again, forever. So a group that waits asks
again without the types whose launch failed lately, by a label selector of its placement group. The other types are then
started in the order of their priorities: on-demand machines while there are no spot machines, for instance.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Set

from dray.cluster.view import GPU_TYPE, NODE_ID, NODE_TYPE, Activity, AutoscalerLimits, ClusterView, NodeType
from dray.groups.capacity import slots_of
from dray.groups.slots import Slots

RETRY_S = 60.0  # for how long after a failed launch no group asks for this type of machine, if it can have another
PATIENCE_S = 10.0
"""A group that has waited this long, without a machine for it being started, asks for something else: an autoscaler
looks every five seconds."""


class NodeChoice:
    """The nodes that a run's groups ask for. Pure, as `dray.groups.pool` is.

    Args:
        slots: of a group, with the types of GPUs in the order of preference.
        limits: what an autoscaler may start; None without an autoscaler.

    Attributes:
        broken: ids of nodes that no group is to be on.
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
        self._failed: dict[str, float] = {}  # types of machines whose launch failed lately, and when

    def look(self, view: ClusterView, now: float) -> None:
        """What the autoscaler is starting, if this was asked for, and what failed."""
        if view.activity is not None:
            self._activity = view.activity
            self._failed_at = {name: now - view.time + at for name, at in view.activity.failed_at.items()}

    def _forget_old_failures(self, now: float) -> None:
        self._failed = {name: at for name, at in self._failed_at.items() if at > now - RETRY_S}

    def first(self, now: float) -> dict[str, str]:
        """The label selector of a group that starts: of the first type of GPU that the cloud does not refuse."""
        self._forget_old_failures(now)
        gpu_types = [each for each in self._gpu_types if self._oldest_if_all_failed(each) is None]
        return self._selector((gpu_types or self._gpu_types)[0])

    def others(self, waiting: Mapping[str, tuple[Mapping[str, str], float]], now: float) -> dict[str, dict[str, str]]:
        """What waiting groups should ask for instead, by name; those that should keep waiting are left out.
        `waiting`: by name, in the order in which they get machines: what each asked for, and how many seconds ago."""
        self._forget_old_failures(now)
        room = {name: float(self._activity.booting.get(name, 0) * slots) for name, slots in self._slots.items()}

        @functools.cache  # of a thousand groups most ask for the same
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
        """Take a group's slots from those of machines that boot; False if these are too few."""
        needed: float = self._per_group
        if sum(room[name] for name in allowed) < needed:
            return False
        for name in sorted(allowed):
            taken = min(needed, room[name])
            room[name] -= taken
            needed -= taken
        return True

    def _other(self, labels: Mapping[str, str], allowed: Set[str], *, is_new: bool) -> dict[str, str] | None:
        """What a group should ask for instead; None if it should keep waiting. It asks for `labels`, which allow
        these types of machines; if `is_new`, for less than `PATIENCE_S`."""
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
        """The type of GPU to ask for after this one: one that the cloud does not refuse, if there is one."""
        at = self._gpu_types.index(gpu_type) + 1
        others = [*self._gpu_types[at:], *self._gpu_types[:at]]
        return next((each for each in others if self._oldest_if_all_failed(each) is None), others[0])

    def _selector(self, gpu_type: str) -> dict[str, str]:
        failed = self._failed
        # If the cloud has none of them, each is asked for in turn.
        excluded = {each.name for each in self._of(gpu_type)} & failed.keys() - {self._oldest_if_all_failed(gpu_type)}
        found = {GPU_TYPE: gpu_type} if gpu_type else {}
        for label, names in ((NODE_TYPE, excluded), (NODE_ID, self.broken)):
            if names:
                found[label] = f"!in({','.join(sorted(names))})"
        return found

    def _with(self, gpu_type: str) -> list[NodeType]:
        """Types of machines with slots, and with this type of GPU."""
        types = [each for each in self._node_types if self._slots[each.name]]
        return [each for each in types if each.may_have((gpu_type,) if gpu_type else ())]

    def _of(self, gpu_type: str) -> list[NodeType]:
        """Those of them that a selector can exclude."""
        return [each for each in self._with(gpu_type) if (each.labels or {}).get(NODE_TYPE) == each.name]

    def _oldest_if_all_failed(self, gpu_type: str) -> str | None:
        """The type of machine with this type of GPU whose launch failed first, if those of all of them did lately."""
        failed, names = self._failed, [each.name for each in self._of(gpu_type)]
        return min(names, key=failed.__getitem__) if names and failed.keys() >= set(names) else None


def _excluded(labels: Mapping[str, str]) -> set[str]:
    return set(labels.get(NODE_TYPE, "").removeprefix("!in(").removesuffix(")").split(","))
