"""Clusters as values, for tests of what decides about worker groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dray.cluster.view import GPU_TYPE, HEAD, AutoscalerLimits, ClusterView, NodeType, RayNode
from dray.groups.slots import Slots

HEAD_NODE = {HEAD: 1.0, "CPU": 4.0}
GPU_NODE = {"CPU": 8.0, "GPU": 2.0}
GPUS = AutoscalerLimits(types=(NodeType(resources=GPU_NODE, max_count=5),), max_count=3)
UNKNOWN = AutoscalerLimits(types=None)


def node(resources: Mapping[str, float], gpu_type: str = "", name: str = "id") -> RayNode:
    """A node with these resources."""
    return RayNode(name, f"address-of-{name}", True, resources, {GPU_TYPE: gpu_type} if gpu_type else {})


def cluster(*nodes: Mapping[str, float], limits: AutoscalerLimits | None = None, **fields: Any) -> ClusterView:
    """A view of a cluster of nodes with these resources."""
    return ClusterView(nodes=tuple(map(node, nodes)), limits=limits, **fields)


def cpus(per_trial: int = 1, **fields: Any) -> Slots:
    """Slots of one CPU."""
    return Slots(per_trial=per_trial, gpu=False, cpus_per_slot=1, runtime_env={}, **fields)


def gpus(per_trial: int = 1, **fields: Any) -> Slots:
    """Slots of one GPU and one CPU."""
    return Slots(per_trial=per_trial, gpu=True, cpus_per_slot=1, runtime_env={}, **fields)
