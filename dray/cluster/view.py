"""A cluster at one time: its nodes, and which nodes its autoscaler may start and is starting.

This is pure: the code that decides about worker groups gets these values, for which `dray.groups.lender_shell`
asks Ray.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

GPU_TYPE = "ray.io/accelerator-type"
"""A label: the type of a node's GPUs. Ray sets it on running nodes; the cluster file has it for nodes to be started."""

MARKET_TYPE = "ray.io/market-type"
"""A label: "spot" for nodes that the cloud may take back."""
NODE_ID = "ray.io/node-id"  # a label that Ray sets: its id of a node
HEAD = "node:__internal_head__"  # a resource that only the head has
NODE_TYPE = "ray.io/node-group"
"""A label: the name of a node's type in the cluster file. Ray sets it on running nodes; the file has it for others."""
UNLIMITED = 10_000  # the maximum of a node type without a limit


def slot_type(labels: Mapping[str, str], *, gpu: bool) -> str:
    """The type of the slots of a node with these labels, as in a config's prices.

    >>> slot_type({GPU_TYPE: "A100", MARKET_TYPE: "spot"}, gpu=True), slot_type({}, gpu=True), slot_type({}, gpu=False)
    ('A100-spot', 'GPU', 'CPU')
    """
    return f"{labels.get(GPU_TYPE, 'GPU') if gpu else 'CPU'}{'-spot' * (labels.get(MARKET_TYPE) == 'spot')}"


class RayNode(NamedTuple):
    id: str  # a node that comes back gets a new one
    address: str
    is_alive: bool
    resources: Mapping[str, float]  # used or not; empty once it is gone
    labels: Mapping[str, str]  # Ray's own, and those that the node was started with


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeType:
    name: str = ""
    resources: Mapping[str, float]  # of one machine; the labels too
    labels: Mapping[str, str] | None = None  # None: unknown
    max_count: int

    def may_have(self, gpu_types: Collection[str]) -> bool:
        """Whether its GPUs are, or may be, of one of these types. If no types are given, all nodes qualify."""
        return not gpu_types or self.labels is None or self.labels.get(GPU_TYPE) in gpu_types


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerLimits:
    types: tuple[NodeType, ...] | None  # None: unknown
    max_count: int = UNLIMITED  # for all machines together, besides the head

    def nodes(self, gpu_types: Collection[str] = ()) -> list[Mapping[str, float]]:
        """The resources of each machine with such GPUs that may be started, type by type.

        `max_count` does not limit their sum.
        """
        types = [each for each in self.types or () if each.may_have(gpu_types)]
        return [each.resources for each in types for _ in range(min(each.max_count, self.max_count))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """The machines that the autoscaler is starting, by node type."""

    starting: Mapping[str, int]  # requested from the cloud, and not up yet
    failed: Mapping[str, str]  # why the cloud could not provide a machine
    failed_at: Mapping[str, float] = field(default_factory=dict)  # when it last could not, since the epoch
    booting: Mapping[str, int] = field(default_factory=dict)  # those of `starting` that the cloud has provided

    def __str__(self) -> str:
        failures = "; ".join(f"it could not start {name}: {why}" for name, why in sorted(self.failed.items()))
        return f"the autoscaler is starting {self._starting() or 'none'}" + (f"; {failures}" if failures else "")

    def short(self) -> str:
        """A short description. Failed types are not shown as starting too, although the autoscaler keeps trying."""
        starting, failed = self._starting(leave_out=self.failed), ", ".join(sorted(self.failed))
        return ", ".join(filter(None, [starting and f"{starting} starting", failed and f"{failed} not available"]))

    def _starting(self, leave_out: Container[str] = ()) -> str:
        return ", ".join(f"{count} {name}" for name, count in sorted(self.starting.items()) if name not in leave_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """A cluster at one time. Values that were not asked for are None."""

    nodes: tuple[RayNode, ...]  # alive
    draining: frozenset[str] = frozenset()  # ids of nodes that will be removed
    limits: AutoscalerLimits | None = None  # None: there is no autoscaler
    free: Mapping[str, float] | None = None
    activity: Activity | None = None
    time: float = 0.0  # seconds since the epoch

    def without(self, nodes: Collection[str]) -> ClusterView:
        return replace(self, nodes=tuple(node for node in self.nodes if node.id not in nodes))

    def resources(self, gpu_types: Collection[str] = ()) -> list[Mapping[str, float]]:
        """The resources of each node with GPUs of these types, or of each node if no types are given."""
        return [node.resources for node in self.nodes if not gpu_types or node.labels.get(GPU_TYPE) in gpu_types]
