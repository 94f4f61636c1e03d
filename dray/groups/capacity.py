"""The capacity of a cluster for worker groups: on its current nodes, and after it has scaled up fully.

A group that starts requests its resources with a placement group. The autoscaler sees only that, so the demand ends
with the driver, however the driver ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from dray.cluster.view import GPU_TYPE, HEAD, ClusterView
from dray.errors import ConfigError
from dray.groups.slots import Slots
from dray.text import counted

if TYPE_CHECKING:
    from dray.config.resources import Resources

CPUS_PER_START = 4  # CPUs of a node for each group that starts there at the same time


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The number of groups of one size that fit on a cluster. `view`: without nodes that must get no groups.
    `max_slots`: most slots of all groups together; None: no limit."""

    view: ClusterView
    slots: Slots
    max_slots: int | None = None

    @property
    def has_room(self) -> bool:
        """Whether a group fits on the nodes, or an autoscaler may start others."""
        now = self._slots_now(self.slots.gpu_types)
        return self.view.limits is not None or groups_in(now, self.slots.per_trial, self.slots.placement_strategy) > 0

    @cached_property
    def groups_now(self) -> int:
        """The number of groups that fit on the current nodes; at least one, which waits if it does not fit."""
        return int(self._fit(self._slots_now) or 0)

    @cached_property
    def max_groups_after_scale_up(self) -> float:
        """The number of groups that fit after the cluster has scaled up fully; at least one, infinity if unknown."""
        slots = self.slots
        fit = self._fit(lambda types: most_slots(self.view, slots.kind, slots.cpus_per_slot, types))
        return self._max_groups if fit is None else fit

    @cached_property
    def max_concurrent_starts(self) -> int:
        """The most groups that may start at the same time: each worker takes several seconds of its node's CPUs."""
        kind, cpus = self.slots.kind, self.slots.cpus_per_slot
        usable = [each for each in self.view.resources(self.slots.gpu_types) if slots_of(each, kind, cpus)]
        return max(1, sum(max(1, int(resources["CPU"] // CPUS_PER_START)) for resources in usable))

    @property
    def _max_groups(self) -> float:
        return math.inf if self.max_slots is None else self.max_slots * self.slots.shared_by // self.slots.per_trial

    def _slots_now(self, types: Collection[str]) -> list[int]:
        return slots_now(self.view, self.slots.kind, self.slots.cpus_per_slot, types)

    def _fit(self, slots_of_nodes: Callable[[Collection[str]], list[int] | None]) -> float | None:
        """The number of groups that fit on nodes, given the nodes' slots by GPU type; None if unknown."""
        each, strategy = self.slots.per_trial, self.slots.placement_strategy
        if (slots := slots_of_nodes(self.slots.gpu_types)) is None:
            return None
        groups = groups_in(slots, each, strategy)
        if types := self.slots.gpu_types:
            # A group's GPUs have one type, while an autoscaler's limit on machines applies to all types together.
            groups = min(groups, sum(groups_in(slots_of_nodes((one,)) or [], each, strategy) for one in types))
        return max(1, min(groups * self.slots.shared_by, self._max_groups))


def find_slots(view: ClusterView, asked: Resources, least: int, cluster: str) -> str:
    """The kind of a slot: "gpu" or "cpu". A `ConfigError` about ``resources`` if the cluster can never have room for a
    group of `least` slots."""
    kind = slot_kind(asked.slot, view)
    if kind is None:
        fault = f"required, as {cluster} has an autoscaler that does not report its node types; set it to gpu or cpu"
        raise ConfigError([("resources.slot", fault)])
    types = gpu_types(asked, view)
    if asked.slot_type and not types:
        known = ", ".join(_known_gpu_types(view)) or "no node with that label"
        fault = f"{cluster} has no such GPUs, and can start none; {GPU_TYPE} of its nodes: {known}"
        raise ConfigError([("resources.slot_type", fault)])
    most = most_slots(view, kind, asked.cpus_per_slot, types)
    of_types = [most_slots(view, kind, asked.cpus_per_slot, (one,)) for one in types] or [most]
    if most is not None and not _fits_any(of_types, least, asked.placement_strategy):
        other = "cpu" if kind == "gpu" else "gpu"
        has_other = _fits_any([most_slots(view, other, asked.cpus_per_slot)], least, asked.placement_strategy)
        instead = f"set resources.slot: {other}" if has_other else "add nodes"
        where = {"STRICT_PACK": " on one node", "STRICT_SPREAD": " on as many nodes"}.get(asked.placement_strategy, "")
        fault = (
            f"{asked.share or counted(least, 'slot')} requested{where}, "
            f"but {cluster} has, or can grow to, {counted(sum(most), f'{kind} slot')} "
            f"(with {counted(asked.cpus_per_slot, 'CPU')} each) on {counted(sum(map(bool, most)), 'node')}; "
            f"request fewer, or {instead}"
        )
        raise ConfigError([("resources.slots_per_trial", fault)])
    return kind


def _fits_any(of_types: Sequence[list[int] | None], slots: int, placement_strategy: str) -> bool:
    """Whether a group of this size fits on nodes of one type."""
    return any(groups_in(nodes or [], slots, placement_strategy) for nodes in of_types)


def gpu_types(asked: Resources, view: ClusterView) -> tuple[str, ...]:
    """The GPU types of the config that nodes have, or can have, in the config's order; () if it names none."""
    limits, known = view.limits, _known_gpu_types(view)
    unknown = limits is not None and (limits.types is None or any(each.labels is None for each in limits.types))
    return tuple(each for each in dict.fromkeys(asked.slot_type or ()) if unknown or each in known)


def slots_of(resources: Mapping[str, float], kind: str, cpus_per_slot: float) -> int:
    """The number of slots of a node with these resources."""
    slots = int(resources.get("CPU", 0) // cpus_per_slot)
    return min(slots, int(resources.get("GPU", 0))) if kind == "gpu" else slots


def slot_kind(asked: str | None, view: ClusterView) -> str | None:
    """The kind of a slot, "gpu" or "cpu": as configured, otherwise "gpu" if the cluster has or can have any GPU.

    None if unknown: there are no GPUs now, and the autoscaler's node types are unknown.
    """
    if asked:
        return asked
    node_types = () if view.limits is None else view.limits.types or ()
    possible = [*view.resources(), *(node_type.resources for node_type in node_types)]
    if any(resources.get("GPU", 0) > 0 for resources in possible):
        return "gpu"
    return None if view.limits is not None and view.limits.types is None else "cpu"


def slots_now(view: ClusterView, kind: str, cpus_per_slot: float, gpu_types: Collection[str] = ()) -> list[int]:
    """The current number of slots of each node with GPUs of these types; of all nodes if no types are given."""
    return [slots_of(resources, kind, cpus_per_slot) for resources in view.resources(gpu_types)]


def most_slots(view: ClusterView, kind: str, cpus_per_slot: float, gpu_types: Collection[str] = ()) -> list[int] | None:
    """The number of slots of each node after the cluster has scaled up fully; None if unknown."""
    now, limits = slots_now(view, kind, cpus_per_slot, gpu_types), view.limits
    if limits is None:
        return now
    if limits.types is None:
        return None
    slots = sorted((slots_of(resources, kind, cpus_per_slot) for resources in limits.nodes(gpu_types)), reverse=True)
    most = [slots_of(each, kind, cpus_per_slot) for each in view.resources(gpu_types) if HEAD in each]
    most += slots[: limits.max_count]
    # Machines may also have been added manually.
    return max(now, most, key=sum)


def groups_in(nodes: Sequence[int], slots: int, placement_strategy: str) -> int:
    """The number of worker groups of this many slots that fit at the same time on nodes with these slots."""
    match placement_strategy:
        case "STRICT_PACK":
            return sum(node // slots for node in nodes)
        case "STRICT_SPREAD":
            # A node gives each of n groups at most one slot: n groups fit if the total is n * slots.
            most = sum(nodes) // slots
            return max(n for n in range(most + 1) if sum(min(node, n) for node in nodes) >= n * slots)
    return sum(nodes) // slots


def _known_gpu_types(view: ClusterView) -> list[str]:
    """The known GPU types that nodes have, or can have."""
    labels = [node.labels for node in view.nodes]
    labels += [each.labels or {} for each in (view.limits and view.limits.types) or ()]
    return sorted({each[GPU_TYPE] for each in labels if GPU_TYPE in each})
