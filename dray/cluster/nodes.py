"""The nodes of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dray.cluster.view import RayNode


def known_nodes() -> list[RayNode]:
    return [
        RayNode(node["NodeID"], node["NodeManagerAddress"], node["Alive"], node["Resources"], node["Labels"])
        for node in ray.nodes()
    ]


def nodes() -> list[RayNode]:
    return [node for node in known_nodes() if node.is_alive]


def on_node(what: Any, node: str, **options: Any) -> Any:
    """A remote function or class that runs on the node with this id, however busy that node is."""
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(**{"num_cpus": 0, "scheduling_strategy": strategy, **options})(what)


def status(address: str | None) -> dict[str, Any]:
    """The nodes of a cluster (by default ``RAY_ADDRESS``), and the total and free CPUs and GPUs of the living ones.

    The address is None if no cluster is named; an experiment then starts Ray on this machine.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    if not address or address == "local":
        unknown = {"gpus": None, "cpus_free": None, "gpus_free": None}
        return {"address": None, "nodes": [], "cpus": os.cpu_count(), **unknown}
    from dray.cluster.connection import join

    join(address)
    try:
        nodes = [
            {
                "address": node.address,
                "is_alive": node.is_alive,
                **_counts(node.resources),
                "memory": int(node.resources.get("memory", 0)),
            }
            for node in known_nodes()
        ]
        free = _counts(ray.available_resources())
        return {
            "address": ray.get_runtime_context().gcs_address,
            "nodes": nodes,
            **_counts(ray.cluster_resources()),
            "cpus_free": free["cpus"],
            "gpus_free": free["gpus"],
        }
    finally:
        ray.shutdown()


def _counts(resources: Mapping[str, float]) -> dict[str, int]:
    return {"cpus": int(resources.get("CPU", 0)), "gpus": int(resources.get("GPU", 0))}
