"""How many worker groups fit on a cluster: on its nodes as they are, and once it has grown as far as it can.

A group that starts requests its resources with a placement group. An autoscaler sees nothing else, so the demand ends
with the driver, however that ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dray.cluster import autoscaler
from dray.cluster.autoscaler import HEAD, Limits
from dray.cluster.connection import Cluster
from dray.cluster.nodes import nodes
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
    """

    def __init__(self, slots: Slots, limits: Limits | None, max_slots: int | None = None) -> None:
        self._slots, self._limits = slots, limits
        self._max_groups = math.inf if max_slots is None else max_slots * slots.shared_by // slots.per_trial

    @property
    def may_grow(self) -> bool:
        """Whether an autoscaler may start nodes."""
        return self._limits is not None

    def now(self) -> int:
        """How many groups fit on the nodes as they are; at least one, which waits if it does not fit."""
        return int(self._fit(slots_now(self._slots.kind, self._slots.cpus_per_slot)))

    def grown(self) -> float:
        """How many groups fit once the cluster has grown as far as it can; at least one, infinity if unknown."""
        slots = most_slots(self._slots.kind, self._slots.cpus_per_slot, self._limits)
        return self._max_groups if slots is None else self._fit(slots)

    def starts_at_once(self) -> int:
        """How many groups may start at the same time: each worker takes several seconds of its node's CPUs."""
        kind, cpus = self._slots.kind, self._slots.cpus_per_slot
        usable = [resources for resources in _node_resources() if slots_of(resources, kind, cpus)]
        return max(1, sum(max(1, int(resources["CPU"] // CPUS_PER_START)) for resources in usable))

    def _fit(self, slots: list[int]) -> float:
        """How many groups fit on nodes with these numbers of slots."""
        groups = groups_in(slots, self._slots.per_trial, self._slots.placement_strategy) * self._slots.shared_by
        return max(1, min(groups, self._max_groups))


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
    most = most_slots(kind, asked.cpus_per_slot, limits)
    if most is not None and not groups_in(most, least, asked.placement_strategy):
        other = "cpu" if kind == "gpu" else "gpu"
        where = {"STRICT_PACK": " on one node", "STRICT_SPREAD": " on as many nodes"}.get(asked.placement_strategy, "")
        fault = (
            f"{asked.share or f'{least} slots'} requested{where}, "
            f"but {cluster.description} has, or can grow to, {sum(most)} {kind} slots "
            f"(with {asked.cpus_per_slot} CPUs each) on {sum(map(bool, most))} nodes; "
            f"request fewer, or set resources.slot: {other}"
        )
        raise ConfigError([("resources.slots_per_trial", fault)])
    return kind, limits


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


def slots_now(kind: str, cpus_per_slot: float) -> list[int]:
    """How many slots each node has now."""
    return [slots_of(resources, kind, cpus_per_slot) for resources in _node_resources()]


def most_slots(kind: str, cpus_per_slot: float, limits: Limits | None) -> list[int] | None:
    """How many slots each node has once the cluster has grown as far as it can; None if unknown."""
    now = slots_now(kind, cpus_per_slot)
    if limits is None:
        return now
    if limits.types is None:
        return None
    slots = sorted((slots_of(resources, kind, cpus_per_slot) for resources in limits.nodes()), reverse=True)
    most = [slots_of(resources, kind, cpus_per_slot) for resources in _node_resources() if HEAD in resources]
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


def _node_resources() -> list[Mapping[str, float]]:
    return [node.resources for node in nodes()]
