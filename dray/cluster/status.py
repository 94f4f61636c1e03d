"""The resources of a Ray cluster, for ``dray cluster status``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def status(address: str | None) -> dict[str, Any]:
    """The nodes of a cluster, and how much of them is free.

    Args:
        address: of the cluster; by default ``RAY_ADDRESS``, as for an experiment.

    Returns:
        ``address``: None if no cluster is named; an experiment then starts one on this machine. ``nodes``:
        ``address``, ``is_alive``, ``cpus``, ``gpus`` and ``memory`` (bytes) of each. ``cpus``, ``gpus``: of all alive
        nodes together. ``cpus_free``, ``gpus_free``: the unused ones of these.

    Raises:
        ConnectionError: there is no cluster at the address.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    if not address or address == "local":
        unknown = {"gpus": None, "cpus_free": None, "gpus_free": None}
        return {"address": None, "nodes": [], "cpus": os.cpu_count(), **unknown}
    # Imported here: it takes a second, and is not needed without a named cluster.
    import ray

    from dray.cluster.connection import join
    from dray.cluster.nodes import known_nodes

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
