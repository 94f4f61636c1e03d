"""How many worker groups fit on a cluster: on its nodes as they are, and once it has grown as far as it can.

A group that starts requests its resources with a placement group. An autoscaler sees nothing else, so the demand ends
with the driver, however that ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from dray.cluster import autoscaler
from dray.cluster.autoscaler import HEAD, Limits
from dray.cluster.connection import Cluster
from dray.cluster.nodes import GPU_TYPE, nodes
from dray.config.resources import Resources
from dray.errors import ConfigError
from dray.groups.group import Slots

CPUS_PER_START = 4
"""CPUs that a node must have for each group that starts there at the same time."""


class Capacity:
    """How many groups of one size fit on the cluster that this process is connected to.

    Args:
        slots: the slots of a group.
        limits: what an autoscaler may start; None without an autoscaler.
        max_slots: how many slots all groups may have together; None: no limit.

    Attributes:
        limits: as given.
        broken: ids of nodes that no group is to be on.
    """

    def __init__(self, slots: Slots, limits: Limits | None, max_slots: int | None = None) -> None:
        self._slots, self.limits = slots, limits
        self.broken: set[str] = set()
        self._max_groups = math.inf if max_slots is None else max_slots * slots.shared_by // slots.per_trial

    @property
    def may_grow(self) -> bool:
        """Whether an autoscaler may start nodes."""
        return self.limits is not None

    @property
    def has_room(self) -> bool:
        """Whether a group fits on the nodes that are not broken, or an autoscaler may start others."""
        slots = self._slots
        free = slots_now(slots.kind, slots.cpus_per_slot, slots.gpu_types, self.broken)
        return self.may_grow or groups_in(free, slots.per_trial, slots.placement_strategy) > 0

    def now(self) -> int:
        """How many groups fit on the nodes as they are; at least one, which waits if it does not fit."""
        slots = self._slots
        return int(self._fit(lambda types: slots_now(slots.kind, slots.cpus_per_slot, types, self.broken)) or 0)

    def grown(self) -> float:
        """How many groups fit once the cluster has grown as far as it can; at least one, infinity if unknown."""
        slots = self._slots
        fit = self._fit(lambda types: most_slots(slots.kind, slots.cpus_per_slot, self.limits, types, self.broken))
        return self._max_groups if fit is None else fit

    def starts_at_once(self) -> int:
        """How many groups may start at the same time: each worker takes several seconds of its node's CPUs."""
        kind, cpus = self._slots.kind, self._slots.cpus_per_slot
        usable = [resources for resources in _node_resources(self._slots.gpu_types) if slots_of(resources, kind, cpus)]
        return max(1, sum(max(1, int(resources["CPU"] // CPUS_PER_START)) for resources in usable))

    def _fit(self, slots_of_nodes: Callable[[Collection[str]], list[int] | None]) -> float | None:
        """How many groups fit on nodes with so many slots, by the types of their GPUs; None if unknown."""
        each, strategy = self._slots.per_trial, self._slots.placement_strategy
        if (slots := slots_of_nodes(self._slots.gpu_types)) is None:
            return None
        groups = groups_in(slots, each, strategy)
        if types := self._slots.gpu_types:
            # All of a group are of one type, while an autoscaler's limit for all machines is for the types together.
            groups = min(groups, sum(groups_in(slots_of_nodes((one,)) or [], each, strategy) for one in types))
        return max(1, min(groups * self._slots.shared_by, self._max_groups))


def find_slots(cluster: Cluster, asked: Resources, least: int) -> tuple[str, Limits | None]:
    """The kind of a slot, "gpu" or "cpu", and what an autoscaler may start; None without one.

    Args:
        asked: the config's ``resources``.
        least: slots of the smallest group.

    Raises:
        ConfigError: the cluster can never have room for one group.
    """
    limits = None if cluster.own else autoscaler.limits()
    kind = slot_kind(asked.slot, limits)
    if kind is None:
        fault = (
            f"required, as {cluster.description} has an autoscaler that does not report its node types; "
            "set it to gpu or cpu"
        )
        raise ConfigError([("resources.slot", fault)])
    types = gpu_types(asked, limits)
    if asked.slot_type and not types:
        known = ", ".join(_known_gpu_types(limits)) or "no node with that label"
        fault = f"{cluster.description} has no such GPUs, and can start none; {GPU_TYPE} of its nodes: {known}"
        raise ConfigError([("resources.slot_type", fault)])
    most = most_slots(kind, asked.cpus_per_slot, limits, types)
    of_types = [most_slots(kind, asked.cpus_per_slot, limits, (one,)) for one in types] or [most]
    if most is not None and not _fits_any(of_types, least, asked.placement_strategy):
        other = "cpu" if kind == "gpu" else "gpu"
        has_other = _fits_any([most_slots(other, asked.cpus_per_slot, limits)], least, asked.placement_strategy)
        instead = f"set resources.slot: {other}" if has_other else "add nodes"
        where = {"STRICT_PACK": " on one node", "STRICT_SPREAD": " on as many nodes"}.get(asked.placement_strategy, "")
        fault = (
            f"{asked.share or f'{least} slots'} requested{where}, "
            f"but {cluster.description} has, or can grow to, {sum(most)} {kind} slots "
            f"(with {asked.cpus_per_slot} CPUs each) on {sum(map(bool, most))} nodes; "
            f"request fewer, or {instead}"
        )
        raise ConfigError([("resources.slots_per_trial", fault)])
    return kind, limits


def _fits_any(of_types: Sequence[list[int] | None], slots: int, placement_strategy: str) -> bool:
    """Whether a group of this size fits on nodes of one type."""
    return any(groups_in(nodes or [], slots, placement_strategy) for nodes in of_types)


def gpu_types(asked: Resources, limits: Limits | None) -> tuple[str, ...]:
    """Those of the config's types of GPUs that nodes have, or can have, in its order; () if it has none."""
    unknown = limits is not None and (limits.types is None or any(each.labels is None for each in limits.types))
    known = _known_gpu_types(limits)
    return tuple(each for each in dict.fromkeys(asked.slot_type or ()) if unknown or each in known)


def slots_of(resources: Mapping[str, float], kind: str, cpus_per_slot: float) -> int:
    """How many slots a node with these resources has."""
    slots = int(resources.get("CPU", 0) // cpus_per_slot)
    return min(slots, int(resources.get("GPU", 0))) if kind == "gpu" else slots


def slot_kind(asked: str | None, limits: Limits | None) -> str | None:
    """The kind of a slot, "gpu" or "cpu": as configured, otherwise "gpu" if the cluster has or can have any GPU.

    None if unknown: there are no GPUs now, and what the autoscaler may start is unknown.
    """
    if asked:
        return asked
    node_types = () if limits is None else limits.types or ()
    possible = [*_node_resources(), *(node_type.resources for node_type in node_types)]
    if any(resources.get("GPU", 0) > 0 for resources in possible):
        return "gpu"
    return None if limits is not None and limits.types is None else "cpu"


def slots_now(
    kind: str, cpus_per_slot: float, gpu_types: Collection[str] = (), broken: Collection[str] = ()
) -> list[int]:
    """How many slots each node with GPUs of these types has now; each node, if there are none. Without broken nodes."""
    return [slots_of(resources, kind, cpus_per_slot) for resources in _node_resources(gpu_types, broken)]


def most_slots(
    kind: str,
    cpus_per_slot: float,
    limits: Limits | None,
    gpu_types: Collection[str] = (),
    broken: Collection[str] = (),
) -> list[int] | None:
    """The same once the cluster has grown as far as it can; None if unknown."""
    now = slots_now(kind, cpus_per_slot, gpu_types, broken)
    if limits is None:
        return now
    if limits.types is None:
        return None
    slots = sorted((slots_of(resources, kind, cpus_per_slot) for resources in limits.nodes(gpu_types)), reverse=True)
    most = [slots_of(resources, kind, cpus_per_slot) for resources in _node_resources(gpu_types) if HEAD in resources]
    most += slots[: limits.max_count]
    # Machines may have been added manually.
    return max(now, most, key=sum)


def groups_in(nodes: Sequence[int], slots: int, placement_strategy: str) -> int:
    """How many worker groups fit at the same time.

    Args:
        nodes: slots of each node.
        slots: of one group.
        placement_strategy: of each group, one of Ray's names.
    """
    match placement_strategy:
        case "STRICT_PACK":
            return sum(node // slots for node in nodes)
        case "STRICT_SPREAD":
            # A node gives each of n groups at most one slot: n groups fit if that makes n * slots.
            most = sum(nodes) // slots
            return max(n for n in range(most + 1) if sum(min(node, n) for node in nodes) >= n * slots)
    return sum(nodes) // slots


def _node_resources(gpu_types: Collection[str] = (), broken: Collection[str] = ()) -> list[Mapping[str, float]]:
    usable = [node for node in nodes() if node.id not in broken]
    return [node.resources for node in usable if not gpu_types or node.labels.get(GPU_TYPE) in gpu_types]


def _known_gpu_types(limits: Limits | None) -> list[str]:
    """The types of GPUs that nodes have, or can have, as far as known."""
    labels = [node.labels for node in nodes()] + [each.labels or {} for each in (limits and limits.types) or ()]
    return sorted({each[GPU_TYPE] for each in labels if GPU_TYPE in each})
